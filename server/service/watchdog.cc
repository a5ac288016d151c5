#include "server/service/watchdog.h"

#include <chrono>
#include <utility>

namespace bmuf::service {

Watchdog::Watchdog(const Clock& clock) : clock_(clock), thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Watchdog::Watch(std::weak_ptr<Transfer> transfer) {
  bool first;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    first = transfers_.empty();
    transfers_.push_back(std::move(transfer));
  }
  if (first) wake_.notify_one();
}

void Watchdog::CheckAll() {
  std::vector<std::shared_ptr<Transfer>> open;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    transfers_.remove_if([&](const std::weak_ptr<Transfer>& transfer) {
      std::shared_ptr<Transfer> held = transfer.lock();
      if (held == nullptr) return true;
      open.push_back(std::move(held));
      return false;
    });
  }
  const MonotonicTime now = clock_.Now();
  for (const auto& transfer : open) transfer->CheckProgress(now);
}

void Watchdog::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !transfers_.empty(); });
    wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stopping_; });
    if (stopping_) return;
    lock.unlock();
    CheckAll();
    lock.lock();
  }
}

}  // namespace bmuf::service
