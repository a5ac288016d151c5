// Ends downloads whose readers stopped reading.
//
// Problem: a reader that neither reads nor hangs up holds a version and a stream for ever, and no event ever comes.
// Idea: every open download is asked once a second how long it has been stuck.
#ifndef BMUF_SERVER_SERVICE_WATCHDOG_H_
#define BMUF_SERVER_SERVICE_WATCHDOG_H_

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/clock.h"

namespace bmuf::service {

class Transfer {
 public:
  virtual ~Transfer() = default;
  // Called about once a second, on the watchdog's thread.
  virtual void CheckProgress(MonotonicTime now) = 0;
};

// Thread-safe.
class Watchdog {
 public:
  // `clock` outlives it.
  explicit Watchdog(const Clock& clock);
  ~Watchdog();

  // Watches `transfer` as long as it exists.
  void Watch(std::weak_ptr<Transfer> transfer);
  // One round of questions, as the thread asks them. For tests.
  void CheckAll();

 private:
  void Run();

  const Clock& clock_;
  // Not absl::Mutex: its timed waits follow the wall clock.
  std::mutex mu_;
  std::condition_variable wake_;
  std::list<std::weak_ptr<Transfer>> transfers_;  // Guarded by mu_.
  bool stopping_ = false;                         // Guarded by mu_.
  std::thread thread_;
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_WATCHDOG_H_
