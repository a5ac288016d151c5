// What the coordinator tells its surroundings: things for people, facts for metrics, and the end of everything.
#ifndef BMUF_SERVER_COORDINATOR_OBSERVER_H_
#define BMUF_SERVER_COORDINATOR_OBSERVER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "bmuf/v1/types.pb.h"

namespace bmuf::coordinator {

// A line for people.
struct Announcement {
  enum class Level { kDebug, kInfo, kWarning, kError };
  Level level = Level::kInfo;
  std::string job;  // May be empty.
  uint64_t round = 0;
  std::string worker;  // May be empty.
  std::string text;    // What peers contributed to it is escaped.
  std::string reason;  // Name of the refusal's reason, if it is one; lines of one reason may be thinned out.
};

// Called on the loop's thread, but for Fatal, which may come from any. Calls must be short and must not call back.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void OnAnnouncement(const Announcement&) {}
  // `record` is complete.
  virtual void OnCommitted(const std::string& /*job*/, const v1::RoundRecord& /*record*/) {}
  // State can no longer be kept: the process must end without acknowledging anything more (durability.md).
  virtual void OnFatal(const absl::Status& /*why*/) {}
};

// Named points between the steps of a commit, where tests make a process die. They are reached on compute threads.
class Seams {
 public:
  virtual ~Seams() = default;
  virtual void Reached(absl::string_view /*point*/) {}
};

// The steps of a commit, in order. Between any two of them a crash leaves a state that can be recovered.
inline constexpr absl::string_view kCommitComputed = "commit.computed";
inline constexpr absl::string_view kCommitDurable = "commit.durable";
inline constexpr absl::string_view kCommitPublished = "commit.published";

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_OBSERVER_H_
