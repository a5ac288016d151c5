#include "server/storage/memory_env.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace bmuf::storage {
namespace {

constexpr uint64_t kAnySize = 1 << 20;

std::unique_ptr<WritableFile> Write(MemoryEnv& env, const std::string& path, const std::string& data, bool sync) {
  auto file = env.Create(path);
  EXPECT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE((*file)->Append(data).ok());
  if (sync) {
    EXPECT_TRUE((*file)->Sync().ok());
  }
  return std::move(file).value();
}

TEST(MemoryEnvTest, ReadsBackWhatWasWritten) {
  MemoryEnv env;
  ASSERT_TRUE(env.CreateDir("jobs").ok());
  ASSERT_TRUE(env.CreateDir("jobs").ok()) << "twice is the same";
  auto file = Write(env, "jobs/a", "one", false);
  ASSERT_TRUE(file->Append("two").ok());
  EXPECT_EQ(*env.Read("jobs/a", kAnySize), "onetwo");
  EXPECT_EQ(env.Read("jobs/a", 5).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*env.List(""), std::vector<std::string>{"jobs"});
  EXPECT_EQ(*env.List("jobs"), std::vector<std::string>{"a"});
  EXPECT_EQ(env.Create("jobs/a").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(env.Create("none/a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(env.Read("jobs/b", kAnySize).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(file->Close().ok());
  EXPECT_EQ(file->Append("x").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(env.Remove("jobs/a").ok());
  EXPECT_EQ(env.Remove("jobs/a").code(), absl::StatusCode::kNotFound);
}

TEST(MemoryEnvTest, ACrashKeepsSyncedBytesUnderSyncedNames) {
  MemoryEnv env;
  auto file = Write(env, "a", "synced", true);
  ASSERT_TRUE(file->Append(" not").ok());
  ASSERT_TRUE(env.SyncDir("").ok());
  Write(env, "b", "its name was not synced", true);
  env.DropUnsynced();
  EXPECT_EQ(*env.Read("a", kAnySize), "synced");
  EXPECT_EQ(*env.List(""), std::vector<std::string>{"a"});
  EXPECT_EQ(file->Append("x").code(), absl::StatusCode::kDataLoss) << "a handle from before the crash";
}

TEST(MemoryEnvTest, ANameWithoutSyncedBytesIsAnEmptyFileAfterACrash) {
  MemoryEnv env;
  Write(env, "a", "lost", false);
  ASSERT_TRUE(env.SyncDir("").ok());
  env.DropUnsynced();
  EXPECT_EQ(*env.Read("a", kAnySize), "");
}

TEST(MemoryEnvTest, ARenameCountsOnceItsDirectoryIsSynced) {
  MemoryEnv env;
  Write(env, "x", "old", true);
  ASSERT_TRUE(env.SyncDir("").ok());
  Write(env, "x.tmp", "new", true);
  ASSERT_TRUE(env.Rename("x.tmp", "x").ok());
  EXPECT_EQ(*env.Read("x", kAnySize), "new");
  env.DropUnsynced();
  EXPECT_EQ(*env.Read("x", kAnySize), "old");

  Write(env, "x.tmp", "new", true);
  ASSERT_TRUE(env.Rename("x.tmp", "x").ok());
  ASSERT_TRUE(env.SyncDir("").ok());
  env.DropUnsynced();
  EXPECT_EQ(*env.Read("x", kAnySize), "new");
  EXPECT_EQ(*env.List(""), std::vector<std::string>{"x"});
  EXPECT_EQ(env.Rename("gone", "x").code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(env.CreateDir("d").ok());
  EXPECT_EQ(env.Rename("x", "d/x").code(), absl::StatusCode::kInvalidArgument);
}

TEST(MemoryEnvTest, ARemovalThatWasNotSyncedIsUndoneByACrash) {
  MemoryEnv env;
  Write(env, "x", "data", true);
  ASSERT_TRUE(env.SyncDir("").ok());
  ASSERT_TRUE(env.Remove("x").ok());
  env.DropUnsynced();
  EXPECT_EQ(*env.Read("x", kAnySize), "data");
}

TEST(MemoryEnvTest, ALockHasOneHolderAndDiesWithTheMachine) {
  MemoryEnv env;
  auto first = env.Lock("LOCK", "pid 1");
  ASSERT_TRUE(first.ok());
  const auto second = env.Lock("LOCK", "pid 2");
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find("pid 1"), absl::string_view::npos);
  first->reset();
  auto third = env.Lock("LOCK", "pid 3");
  ASSERT_TRUE(third.ok());
  env.DropUnsynced();
  auto fourth = env.Lock("LOCK", "pid 4");
  ASSERT_TRUE(fourth.ok());
  third->reset();  // A lock of before the crash frees nothing.
  EXPECT_FALSE(env.Lock("LOCK", "pid 5").ok());
}

TEST(MemoryEnvTest, RefusesPathsThatLeaveTheRoot) {
  MemoryEnv env;
  for (const char* path : {"", "/a", "../a", "a/../b", "a//b", ".", "a/"}) {
    EXPECT_EQ(env.Create(path).status().code(), absl::StatusCode::kInvalidArgument) << path;
  }
}

}  // namespace
}  // namespace bmuf::storage
