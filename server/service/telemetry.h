// Turns what the coordinator says into log lines.
#ifndef BMUF_SERVER_SERVICE_TELEMETRY_H_
#define BMUF_SERVER_SERVICE_TELEMETRY_H_

#include <functional>
#include <string>

#include "server/coordinator/observer.h"
#include "server/ops/log.h"

namespace bmuf::service {

// Thread-safe.
class Telemetry : public coordinator::Observer {
 public:
  // `log` outlives it. `on_fatal` must end the process; it gets an exit status of durability.md.
  Telemetry(ops::Log& log, std::function<void(int)> on_fatal) : log_(log), on_fatal_(std::move(on_fatal)) {}

  void OnAnnouncement(const coordinator::Announcement& announcement) override;
  void OnCommitted(const std::string& job, const v1::RoundRecord& record) override;
  void OnFatal(const absl::Status& why) override;

 private:
  ops::Log& log_;
  const std::function<void(int)> on_fatal_;
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_TELEMETRY_H_
