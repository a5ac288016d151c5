#include "server/storage/memory_ledger.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/status_macros.h"
#include "google/protobuf/util/message_differencer.h"

namespace bmuf::storage {

using google::protobuf::util::MessageDifferencer;

MemoryLedger::MemoryLedger(Epoch epoch_before) { contents_.epoch = epoch_before; }

absl::StatusOr<Epoch> MemoryLedger::RaiseEpoch() {
  absl::MutexLock lock(&mu_);
  contents_.epoch = contents_.epoch.Next();
  return contents_.epoch;
}

absl::StatusOr<Epoch> MemoryLedger::CurrentEpoch() {
  absl::MutexLock lock(&mu_);
  return contents_.epoch;
}

absl::Status MemoryLedger::CheckEpoch(Epoch epoch) const {
  if (epoch == contents_.epoch) return absl::OkStatus();
  return Error(v1::REASON_EPOCH_CHANGED, absl::StrCat("the state belongs to epoch ", contents_.epoch.value(),
                                                      ", this is epoch ", epoch.value(), ": another daemon took over"))
      .With("epoch", contents_.epoch.value());
}

absl::Status MemoryLedger::PutJob(Epoch epoch, const JobRow& job) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckEpoch(epoch));
  if (job.name.empty()) return Error(v1::REASON_INVALID_REQUEST, "a job needs a name").Field("name", "empty");
  const auto it = contents_.jobs.find(job.name);
  if (it == contents_.jobs.end()) {
    if (contents_.jobs.size() >= limits::kMaxJobs) {
      return Error(v1::REASON_TOO_MANY,
                   absl::StrCat("there are ", limits::kMaxJobs, " jobs already, the most allowed"));
    }
    contents_.jobs[job.name].job = job;
    return absl::OkStatus();
  }
  const std::optional<v1::Manifest>& kept = it->second.job.manifest;
  if (kept.has_value() && !(job.manifest.has_value() && MessageDifferencer::Equals(*kept, *job.manifest))) {
    return Error(v1::REASON_WRONG_STATE, absl::StrCat("job ", job.name, " has a manifest, which cannot change"));
  }
  it->second.job = job;
  return absl::OkStatus();
}

absl::Status MemoryLedger::AppendRound(Epoch epoch, const std::string& job, const v1::RoundRecord& record) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckEpoch(epoch));
  const auto it = contents_.jobs.find(job);
  if (it == contents_.jobs.end()) {
    return Error(v1::REASON_JOB_NOT_FOUND, absl::StrCat("the ledger has no job ", job)).With("job", job);
  }
  std::vector<v1::RoundRecord>& rounds = it->second.rounds;
  if (!rounds.empty() && rounds.back().round() == record.round() && MessageDifferencer::Equals(rounds.back(), record)) {
    return absl::OkStatus();
  }
  const bool follows = rounds.empty() ? record.round() >= 1 : record.round() == rounds.back().round() + 1;
  if (!follows) {
    return Error(v1::REASON_WRONG_STATE,
                 absl::StrCat("the record of round ", record.round(), " cannot follow that of round ",
                              rounds.empty() ? 0 : rounds.back().round()));
  }
  rounds.push_back(record);
  if (rounds.size() > limits::kMaxRoundRecords) rounds.erase(rounds.begin());
  return absl::OkStatus();
}

absl::StatusOr<LedgerContents> MemoryLedger::ReadAll() {
  absl::MutexLock lock(&mu_);
  return contents_;
}

}  // namespace bmuf::storage
