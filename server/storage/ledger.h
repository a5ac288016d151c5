// What the daemon must not forget: its epoch, its jobs, its commits.
//
// Problem: a round is committed or it is not, whatever crashes; and two daemons must never both believe they commit.
// Idea: one interface with few transactions, each of them all or nothing and durable when it returns OK. AppendRound is
// the commit point of a round. Every write names the epoch of its writer; a writer whose epoch is no longer the newest
// is refused (fencing). Usage:
//   ASSIGN_OR_RETURN(Epoch epoch, ledger->RaiseEpoch());             // once, before anything is served
//   RETURN_IF_ERROR(ledger->PutJob(epoch, {name, config, manifest}));
//   RETURN_IF_ERROR(ledger->AppendRound(epoch, name, record));       // durable; then publish; then acknowledge
#ifndef BMUF_SERVER_STORAGE_LEDGER_H_
#define BMUF_SERVER_STORAGE_LEDGER_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/ids.h"

namespace bmuf::storage {

// A job as it is kept.
struct JobRow {
  std::string name;
  v1::JobConfig config;                  // Resolved.
  std::optional<v1::Manifest> manifest;  // Once the first worker brought it; never changes after that.
};

struct JobHistory {
  JobRow job;
  std::vector<v1::RoundRecord> rounds;  // Rising without gaps; where old ones were dropped, the newest.
};

// Everything that is kept.
struct LedgerContents {
  Epoch epoch;
  std::map<std::string, JobHistory> jobs;
};

// Thread-safe. Calls may block on a disk: not for a gRPC thread. A failed call has changed nothing, but for an error of
// status DATA_LOSS, after which what is kept is unknown and the process must stop (durability.md: never retried).
class Ledger {
 public:
  virtual ~Ledger() = default;

  // Takes over: the new epoch is above every earlier one and durable when this returns.
  virtual absl::StatusOr<Epoch> RaiseEpoch() = 0;

  // The newest epoch; 0 before the first RaiseEpoch. Somebody else may have raised it since.
  virtual absl::StatusOr<Epoch> CurrentEpoch() = 0;

  // Adds a job or replaces its configuration. Errors: EPOCH_CHANGED (`epoch`) if `epoch` is not the newest;
  // INVALID_REQUEST for an empty name; WRONG_STATE if a manifest that is kept would change or vanish; TOO_MANY beyond
  // limits::kMaxJobs.
  virtual absl::Status PutJob(Epoch epoch, const JobRow& job) = 0;

  // The commit point of `record.round()`. The first record of a job may have any round from 1 on, each further one the
  // next. The newest record once more, equal in every field, is OK and changes nothing (a repeated call after an answer
  // that was lost). Errors: EPOCH_CHANGED (`epoch`); JOB_NOT_FOUND (`job`); WRONG_STATE for a round out of order or
  // another record of a round that is there.
  virtual absl::Status AppendRound(Epoch epoch, const std::string& job, const v1::RoundRecord& record) = 0;

  // A consistent copy of everything, for recovery.
  virtual absl::StatusOr<LedgerContents> ReadAll() = 0;
};

}  // namespace bmuf::storage

#endif  // BMUF_SERVER_STORAGE_LEDGER_H_
