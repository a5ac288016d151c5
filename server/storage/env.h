// Files and directories, as far as durable state needs them.
//
// Problem: what is on the disk after a crash is not what was written but what was synced: file contents by Sync, names
// by SyncDir. Code that gets this wrong passes every test that never crashes. Idea: a small interface whose twin in
// memory (memory_env.h) forgets exactly what was not synced. Usage, to replace a file atomically:
//   ASSIGN_OR_RETURN(auto file, env.Create("dir/x.tmp"));
//   RETURN_IF_ERROR(file->Append(bytes)); RETURN_IF_ERROR(file->Sync()); RETURN_IF_ERROR(file->Close());
//   RETURN_IF_ERROR(env.Rename("dir/x.tmp", "dir/x")); RETURN_IF_ERROR(env.SyncDir("dir"));
#ifndef BMUF_SERVER_STORAGE_ENV_H_
#define BMUF_SERVER_STORAGE_ENV_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace bmuf::storage {

// A file that only grows. Thread-compatible. Destroying it closes it without a sync.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // Errors: RESOURCE_EXHAUSTED (disk full), DATA_LOSS (I/O); how much was written is then unknown. FAILED_PRECONDITION
  // after Close.
  virtual absl::Status Append(absl::string_view data) = 0;
  // What was appended survives a crash if this is OK (the file's name: see Env::SyncDir). Errors: DATA_LOSS: the file
  // is to be abandoned, a second try may lie. FAILED_PRECONDITION after Close.
  virtual absl::Status Sync() = 0;
  // Idempotent.
  virtual absl::Status Close() = 0;
};

// A lock on a file, held until destroyed or until the process dies.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

// Thread-safe. Paths are relative to the environment's root, with "/" between elements, none of which is empty, "." or
// "..": others get INVALID_ARGUMENT. Calls may block on a disk. Errors not named: DATA_LOSS for I/O.
class Env {
 public:
  virtual ~Env() = default;

  // A new empty file. Errors: ALREADY_EXISTS; NOT_FOUND (no such directory).
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // The whole file. Errors: NOT_FOUND; RESOURCE_EXHAUSTED if it is longer than `max_bytes`.
  virtual absl::StatusOr<std::string> Read(const std::string& path, uint64_t max_bytes) = 0;
  // Replaces `to` if it is a file; both names lie in the same directory. After a crash without SyncDir either name may
  // be there. Errors: NOT_FOUND; INVALID_ARGUMENT (different directories).
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Errors: NOT_FOUND.
  virtual absl::Status Remove(const std::string& path) = 0;
  // Creates a directory and makes its name durable; OK if it exists. Errors: NOT_FOUND (no parent); ALREADY_EXISTS (a
  // file).
  virtual absl::Status CreateDir(const std::string& path) = 0;
  // What was created, renamed and removed in `path` ("" is the root) survives a crash if this is OK. Errors: NOT_FOUND.
  virtual absl::Status SyncDir(const std::string& path) = 0;
  // Names in `path`, sorted. Errors: NOT_FOUND.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;
  // Takes the lock on `path`, which is created if absent; `holder` is shown to whoever finds it taken. Never waits.
  // Errors: FAILED_PRECONDITION naming the holder.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path, const std::string& holder) = 0;
};

}  // namespace bmuf::storage

#endif  // BMUF_SERVER_STORAGE_ENV_H_
