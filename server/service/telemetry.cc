#include "server/service/telemetry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/error.h"

namespace bmuf::service {
namespace {

constexpr int kExitIo = 74;
constexpr int kExitLock = 75;

}  // namespace

void Telemetry::OnAnnouncement(const coordinator::Announcement& announcement) {
  ops::Log::Line line;
  switch (announcement.level) {
    case coordinator::Announcement::Level::kDebug:
      line.level = ops::Log::Level::kDebug;
      break;
    case coordinator::Announcement::Level::kInfo:
      line.level = ops::Log::Level::kInfo;
      break;
    case coordinator::Announcement::Level::kWarning:
      line.level = ops::Log::Level::kWarning;
      break;
    case coordinator::Announcement::Level::kError:
      line.level = ops::Log::Level::kError;
      break;
  }
  line.job = announcement.job;
  line.round = announcement.round;
  line.worker = announcement.worker;
  line.text = announcement.text;
  line.reason = announcement.reason;
  log_.Write(line);
}

void Telemetry::OnCommitted(const std::string& job, const v1::RoundRecord& record) {
  ops::Log::Line line;
  line.job = job;
  line.round = record.round();
  line.text =
      absl::StrFormat("round %d committed: %d of %d contributed, %s, |mean| %.4g, commit took %.1f ms", record.round(),
                      record.contributions_size(), record.expected(), record.reason(), record.mean_norm(),
                      static_cast<double>(record.commit_time().seconds()) * 1e3 + record.commit_time().nanos() * 1e-6);
  log_.Write(line);
}

void Telemetry::OnFatal(const absl::Status& why) {
  ops::Log::Line line;
  line.level = ops::Log::Level::kError;
  line.text = absl::StrCat("state can no longer be kept, stopping: ", std::string(why.message()));
  log_.Write(line);
  on_fatal_(ReasonOf(why) == v1::REASON_EPOCH_CHANGED ? kExitLock : kExitIo);
}

}  // namespace bmuf::service
