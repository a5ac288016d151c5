// Files in memory that a crash treats as a disk would: bytes survive up to the file's last Sync, names as of the
// directory's last SyncDir.
#ifndef BMUF_SERVER_STORAGE_MEMORY_ENV_H_
#define BMUF_SERVER_STORAGE_MEMORY_ENV_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/storage/env.h"

namespace bmuf::storage {

// Thread-safe. Files and locks that it gave out may outlive it.
class MemoryEnv : public Env {
 public:
  MemoryEnv();

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::string> Read(const std::string& path, uint64_t max_bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status CreateDir(const std::string& path) override;
  absl::Status SyncDir(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path, const std::string& holder) override;

  // The machine crashes: what was not synced is gone, locks are free, and files that are open accept nothing any more.
  void DropUnsynced();

 private:
  struct File {
    std::string data;
    size_t synced_bytes = 0;
  };
  using Names = std::map<std::string, std::shared_ptr<File>>;
  struct Directory {
    Names now;
    Names durable;
  };
  struct Disk {
    absl::Mutex mu;
    uint64_t boot ABSL_GUARDED_BY(mu) = 0;  // Rises with each crash; handles of an earlier boot are dead.
    std::map<std::string, Directory> directories ABSL_GUARDED_BY(mu);  // By path; "" is the root.
    std::map<std::string, std::string> locks ABSL_GUARDED_BY(mu);      // Path -> holder.
  };
  class OpenFile;
  class HeldLock;

  const std::shared_ptr<Disk> disk_;
};

}  // namespace bmuf::storage

#endif  // BMUF_SERVER_STORAGE_MEMORY_ENV_H_
