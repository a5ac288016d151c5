#include "server/storage/memory_env.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status_macros.h"

namespace bmuf::storage {
namespace {

struct Place {
  std::string directory;
  std::string name;
};

absl::Status CheckPath(const std::string& path) {
  for (absl::string_view element : absl::StrSplit(path, '/')) {
    if (element.empty() || element == "." || element == "..") {
      return absl::InvalidArgumentError(absl::StrCat("\"", path, "\" is not a plain relative path"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Place> PlaceOf(const std::string& path) {
  RETURN_IF_ERROR(CheckPath(path));
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return Place{"", path};
  return Place{path.substr(0, slash), path.substr(slash + 1)};
}

absl::Status NotFound(const std::string& path) { return absl::NotFoundError(absl::StrCat(path, " does not exist")); }

}  // namespace

class MemoryEnv::OpenFile : public WritableFile {
 public:
  OpenFile(std::shared_ptr<Disk> disk, std::shared_ptr<File> file, uint64_t boot)
      : disk_(std::move(disk)), file_(std::move(file)), boot_(boot) {}

  absl::Status Append(absl::string_view data) override {
    absl::MutexLock lock(&disk_->mu);
    RETURN_IF_ERROR(CheckOpen(disk_->boot));
    file_->data.append(data.data(), data.size());
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    absl::MutexLock lock(&disk_->mu);
    RETURN_IF_ERROR(CheckOpen(disk_->boot));
    file_->synced_bytes = file_->data.size();
    return absl::OkStatus();
  }

  absl::Status Close() override {
    closed_ = true;
    return absl::OkStatus();
  }

 private:
  absl::Status CheckOpen(uint64_t boot) const {
    if (closed_) return absl::FailedPreconditionError("the file is closed");
    if (boot != boot_) return absl::DataLossError("the machine crashed since this file was opened");
    return absl::OkStatus();
  }

  const std::shared_ptr<Disk> disk_;
  const std::shared_ptr<File> file_;
  const uint64_t boot_;
  bool closed_ = false;
};

class MemoryEnv::HeldLock : public FileLock {
 public:
  HeldLock(std::shared_ptr<Disk> disk, std::string path, uint64_t boot)
      : disk_(std::move(disk)), path_(std::move(path)), boot_(boot) {}
  ~HeldLock() override {
    absl::MutexLock lock(&disk_->mu);
    if (disk_->boot == boot_) disk_->locks.erase(path_);
  }

 private:
  const std::shared_ptr<Disk> disk_;
  const std::string path_;
  const uint64_t boot_;
};

MemoryEnv::MemoryEnv() : disk_(std::make_shared<Disk>()) {
  absl::MutexLock lock(&disk_->mu);
  disk_->directories[""];
}

absl::StatusOr<std::unique_ptr<WritableFile>> MemoryEnv::Create(const std::string& path) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  absl::MutexLock lock(&disk_->mu);
  const auto directory = disk_->directories.find(place.directory);
  if (directory == disk_->directories.end()) return NotFound(place.directory);
  if (disk_->directories.count(path) > 0) return absl::AlreadyExistsError(absl::StrCat(path, " is a directory"));
  const auto [it, is_new] = directory->second.now.try_emplace(place.name);
  if (!is_new) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  it->second = std::make_shared<File>();
  return std::unique_ptr<WritableFile>(std::make_unique<OpenFile>(disk_, it->second, disk_->boot));
}

absl::StatusOr<std::string> MemoryEnv::Read(const std::string& path, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  absl::MutexLock lock(&disk_->mu);
  const auto directory = disk_->directories.find(place.directory);
  if (directory == disk_->directories.end()) return NotFound(path);
  const auto it = directory->second.now.find(place.name);
  if (it == directory->second.now.end()) return NotFound(path);
  if (it->second->data.size() > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, " has ", it->second->data.size(), " bytes, at most ", max_bytes, " were asked for"));
  }
  return it->second->data;
}

absl::Status MemoryEnv::Rename(const std::string& from, const std::string& to) {
  ASSIGN_OR_RETURN(const Place source, PlaceOf(from));
  ASSIGN_OR_RETURN(const Place target, PlaceOf(to));
  if (source.directory != target.directory) {
    return absl::InvalidArgumentError(absl::StrCat(from, " and ", to, " lie in different directories"));
  }
  absl::MutexLock lock(&disk_->mu);
  const auto directory = disk_->directories.find(source.directory);
  if (directory == disk_->directories.end()) return NotFound(from);
  Names& names = directory->second.now;
  const auto it = names.find(source.name);
  if (it == names.end()) return NotFound(from);
  if (disk_->directories.count(to) > 0) return absl::InvalidArgumentError(absl::StrCat(to, " is a directory"));
  std::shared_ptr<File> file = std::move(it->second);
  names.erase(it);
  names[target.name] = std::move(file);
  return absl::OkStatus();
}

absl::Status MemoryEnv::Remove(const std::string& path) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  absl::MutexLock lock(&disk_->mu);
  const auto directory = disk_->directories.find(place.directory);
  if (directory == disk_->directories.end() || directory->second.now.erase(place.name) == 0) return NotFound(path);
  return absl::OkStatus();
}

absl::Status MemoryEnv::CreateDir(const std::string& path) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  absl::MutexLock lock(&disk_->mu);
  const auto parent = disk_->directories.find(place.directory);
  if (parent == disk_->directories.end()) return NotFound(place.directory);
  if (parent->second.now.count(place.name) > 0) return absl::AlreadyExistsError(absl::StrCat(path, " is a file"));
  disk_->directories[path];
  return absl::OkStatus();
}

absl::Status MemoryEnv::SyncDir(const std::string& path) {
  if (!path.empty()) RETURN_IF_ERROR(CheckPath(path));
  absl::MutexLock lock(&disk_->mu);
  const auto it = disk_->directories.find(path);
  if (it == disk_->directories.end()) return NotFound(path);
  it->second.durable = it->second.now;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> MemoryEnv::List(const std::string& path) {
  if (!path.empty()) RETURN_IF_ERROR(CheckPath(path));
  absl::MutexLock lock(&disk_->mu);
  const auto it = disk_->directories.find(path);
  if (it == disk_->directories.end()) return NotFound(path);
  std::vector<std::string> names;
  for (const auto& [name, file] : it->second.now) names.push_back(name);
  const std::string prefix = path.empty() ? "" : path + "/";
  for (const auto& [directory, content] : disk_->directories) {
    if (directory.size() <= prefix.size() || directory.compare(0, prefix.size(), prefix) != 0) continue;
    if (directory.find('/', prefix.size()) == std::string::npos) names.push_back(directory.substr(prefix.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::unique_ptr<FileLock>> MemoryEnv::Lock(const std::string& path, const std::string& holder) {
  ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  absl::MutexLock lock(&disk_->mu);
  const auto directory = disk_->directories.find(place.directory);
  if (directory == disk_->directories.end()) return NotFound(place.directory);
  const auto [it, is_new] = disk_->locks.try_emplace(path, holder);
  if (!is_new) return absl::FailedPreconditionError(absl::StrCat(path, " is locked by ", it->second));
  std::shared_ptr<File>& file = directory->second.now[place.name];
  if (file == nullptr) file = std::make_shared<File>();
  return std::unique_ptr<FileLock>(std::make_unique<HeldLock>(disk_, path, disk_->boot));
}

void MemoryEnv::DropUnsynced() {
  absl::MutexLock lock(&disk_->mu);
  ++disk_->boot;
  disk_->locks.clear();
  for (auto& [path, directory] : disk_->directories) {
    directory.now = directory.durable;
    for (auto& [name, file] : directory.now) file->data.resize(file->synced_bytes);
  }
}

}  // namespace bmuf::storage
