// When a round closes. A function of plain values; the table in barrier_test.cc is its specification by example.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/engine/durations.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

// A reason names so many workers and counts the rest.
constexpr size_t kNamesInReason = 5;

std::string NameList(const std::vector<std::string>& names) {
  std::string text;
  const size_t shown = std::min(names.size(), kNamesInReason);
  for (size_t i = 0; i < shown; ++i) {
    const bool last = i + 1 == names.size();
    absl::StrAppend(&text, i == 0 ? "" : last ? " and " : ", ", names[i]);
  }
  if (names.size() > shown) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

// The deadline that comes next, and what happens then.
struct Next {
  absl::Duration at = absl::InfiniteDuration();
  const char* name = "";
  std::string then;
};

BarrierDecision Close(BarrierDecision::Kind kind, std::string reason) {
  BarrierDecision decision;
  decision.kind = kind;
  decision.gist = reason;
  decision.reason = std::move(reason);
  return decision;
}

}  // namespace

uint32_t Quorum(const v1::BarrierPolicy& policy, uint32_t expected) {
  // The small slack keeps 0.1 * 30 at 3: the product of doubles may lie just above the whole number that was meant.
  const double share = std::ceil(policy.min_fraction() * expected - 1e-9);
  return std::max({policy.min_workers(), uint32_t{1}, static_cast<uint32_t>(std::max(0.0, share))});
}

BarrierDecision DecideBarrier(const BarrierInput& input, const v1::BarrierPolicy& policy) {
  using Kind = BarrierDecision::Kind;
  if (input.expected == 0) return Close(Kind::kRegather, "nobody is expected any more and nothing was contributed");

  const uint32_t need = Quorum(policy, input.expected);
  const bool quorum = input.have >= need;
  const bool complete = input.have == input.expected;
  const absl::Duration collect =
      policy.has_collect_timeout() ? ToDuration(policy.collect_timeout()) : absl::Minutes(10);
  const absl::Duration hard = collect + input.extension;
  absl::Duration soft = ToDuration(policy.soft_timeout());
  if (soft <= absl::ZeroDuration()) soft = absl::InfiniteDuration();
  if (input.adaptive_soft.has_value()) soft = std::min(soft, *input.adaptive_soft);
  const absl::Duration grace_end = std::min(soft + ToDuration(policy.grace()), hard);
  const bool may_extend = policy.on_timeout() == v1::ON_TIMEOUT_EXTEND &&
                          (policy.max_extensions() == 0 || input.extensions < policy.max_extensions());
  const std::string have = absl::StrCat("have ", input.have, " of ", input.expected, " (need ", need, ")");

  // Once folding began it cannot be undone, so that a commit or a restart waits for it.
  if (input.folding == 0) {
    if (complete && quorum) {
      return Close(Kind::kCommit,
                   input.have == 1 ? "the only one expected is in" : absl::StrCat("all ", input.have, " are in"));
    }
    const bool in_grace = input.uploading > 0 && input.elapsed < grace_end;
    if (quorum && input.elapsed >= soft && !in_grace) {
      return Close(Kind::kCommit, absl::StrCat("soft deadline of ", ForPeople(soft), ": ", have));
    }
    if (input.elapsed >= hard) {
      const std::string at = absl::StrCat("hard deadline of ", ForPeople(hard), ": ", have);
      if (may_extend) {
        return Close(
            Kind::kExtend,
            absl::StrCat(at, ", waits another ", ForPeople(collect), " (extension ", input.extensions + 1,
                         policy.max_extensions() == 0 ? std::string() : absl::StrCat(" of ", policy.max_extensions()),
                         ")"));
      }
      if (policy.on_timeout() == v1::ON_TIMEOUT_FAIL_ROUND) {
        return Close(Kind::kFailAttempt, absl::StrCat(at, ", and the job asks for all of them"));
      }
      return Close(quorum ? Kind::kCommit : Kind::kFailAttempt, at);
    }
  }

  Next next;
  if (input.elapsed < soft && soft < hard) {
    next = {soft, "soft deadline",
            quorum ? "commits with the quorum" : absl::StrCat("commits as soon as it has ", need)};
  } else if (quorum && input.uploading > 0 && input.elapsed < grace_end) {
    next = {grace_end, "grace for uploads", "commits with the quorum"};
  } else if (input.elapsed < hard) {
    next = {hard, "hard deadline",
            may_extend ? absl::StrCat("waits another ", ForPeople(collect))
            : policy.on_timeout() == v1::ON_TIMEOUT_FAIL_ROUND || !quorum ? "starts the round again"
                                                                          : "commits with the quorum"};
  }

  std::string what = have;
  if (input.folding > 0) absl::StrAppend(&what, ", adding ", input.folding);
  if (!input.awaited.empty()) {
    absl::StrAppend(&what, ", waiting for ", NameList(input.awaited));
  } else if (input.expected < need) {
    absl::StrAppend(&what, ", waiting for ", need - input.expected, " more to join");
  }
  BarrierDecision decision;
  decision.next_deadline = next.at;
  decision.reason = decision.gist = what;
  if (next.at != absl::InfiniteDuration()) {
    absl::StrAppend(&decision.reason, " for up to ", ForPeople(next.at - input.elapsed), " more (", next.name,
                    "), then ", next.then);
    absl::StrAppend(&decision.gist, " until the ", next.name, ", then ", next.then);
  }
  return decision;
}

}  // namespace bmuf::engine
