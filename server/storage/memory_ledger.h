// The ledger's twin in memory: the same transactional promise, as durable as this object. For tests, the simulator
// (where it outlives the engine that crashes) and a daemon without a state directory.
#ifndef BMUF_SERVER_STORAGE_MEMORY_LEDGER_H_
#define BMUF_SERVER_STORAGE_MEMORY_LEDGER_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/storage/ledger.h"

namespace bmuf::storage {

// Thread-safe; never blocks for long. Keeps the newest limits::kMaxRoundRecords records of each job.
class MemoryLedger : public Ledger {
 public:
  // The first RaiseEpoch gives `epoch_before` + 1. A daemon that keeps nothing over a restart passes the wall clock's
  // seconds, so that workers see its successor's epoch as the higher one.
  explicit MemoryLedger(Epoch epoch_before);

  absl::StatusOr<Epoch> RaiseEpoch() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Epoch> CurrentEpoch() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status PutJob(Epoch epoch, const JobRow& job) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status AppendRound(Epoch epoch, const std::string& job, const v1::RoundRecord& record) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<LedgerContents> ReadAll() override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Status CheckEpoch(Epoch epoch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  LedgerContents contents_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf::storage

#endif  // BMUF_SERVER_STORAGE_MEMORY_LEDGER_H_
