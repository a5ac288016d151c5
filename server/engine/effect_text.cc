#include "server/engine/effect_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/error.h"
#include "server/engine/durations.h"

namespace bmuf::engine {
namespace {

std::string StatusText(const absl::Status& status) {
  if (status.ok()) return "OK";
  std::string text = ReasonName(ReasonOf(status));
  for (const char* key : {"round", "version", "incarnation", "limit", "worker"}) {
    if (const std::string value = MetadataOf(status, key); !value.empty()) absl::StrAppend(&text, " ", key, "=", value);
  }
  if (const auto delay = RetryDelayOf(status); delay.has_value()) {
    absl::StrAppend(&text, " retry=", absl::FormatDuration(*delay));
  }
  return absl::StrCat(text, " \"", std::string(status.message()), "\"");
}

struct Printer {
  static std::string Id(RequestId request) { return absl::StrCat(" #", request.value()); }

  std::string operator()(const ReplyJoin& e) const {
    if (!e.answer.ok()) return absl::StrCat("reply_join", Id(e.request), " ", StatusText(e.answer.status()));
    const v1::JoinResponse& a = *e.answer;
    return absl::StrCat("reply_join", Id(e.request), " incarnation=", a.session().incarnation(),
                        " token=", a.session().token(), " round=", a.round(),
                        " version=", a.has_model() ? absl::StrCat(a.version()) : "none",
                        a.need_initial_model() ? " send_model" : "",
                        a.has_resolved_block_momentum() ? absl::StrCat(" momentum=", a.resolved_block_momentum()) : "");
  }
  std::string operator()(const ReplyHeartbeat& e) const {
    if (!e.answer.ok()) return absl::StrCat("reply_heartbeat", Id(e.request), " ", StatusText(e.answer.status()));
    return absl::StrCat("reply_heartbeat", Id(e.request), " round=", e.answer->round(),
                        " version=", e.answer->version(), e.answer->need_initial_model() ? " send_model" : "", " \"",
                        e.answer->reason(), "\"");
  }
  std::string operator()(const ReplyStatus& e) const {
    return absl::StrCat("reply", Id(e.request), " ", StatusText(e.status));
  }
  std::string operator()(const AdmitPush& e) const {
    return absl::StrCat("admit", Id(e.request), " weight=", e.weight);
  }
  std::string operator()(const ReplyPush& e) const {
    const std::string keep = e.keep_staging ? " keep_staging" : "";
    if (!e.answer.ok()) return absl::StrCat("reply_push", Id(e.request), " ", StatusText(e.answer.status()), keep);
    return absl::StrCat("reply_push", Id(e.request), " ",
                        e.answer->outcome() == v1::PUSH_OUTCOME_ACCEPTED ? "ACCEPTED" : "DUPLICATE",
                        " round=", e.answer->round(), " weight=", e.answer->weight(), keep);
  }
  std::string operator()(const CancelPush& e) const {
    return absl::StrCat("cancel_push", Id(e.request), " ", StatusText(e.status));
  }
  std::string operator()(const Fold& e) const {
    return absl::StrCat("fold", Id(e.request), " round=", e.round.value(), " attempt=", e.attempt, " rank=", e.rank,
                        " weight=", e.weight, " scale=", e.scale);
  }
  std::string operator()(const StoreInitialModel& e) const { return absl::StrCat("store_model", Id(e.request)); }
  std::string operator()(const BeginAttempt& e) const {
    return absl::StrCat("begin round=", e.round.value(), " attempt=", e.attempt);
  }
  std::string operator()(const Commit& e) const {
    std::string parts;
    for (const auto& part : e.record.contributions()) {
      absl::StrAppend(&parts, parts.empty() ? "" : " ", part.worker(), "/", part.incarnation(), "*", part.weight(),
                      part.clipped() ? " clipped" : "");
    }
    return absl::StrCat("commit round=", e.record.round(), " of [", parts, "] weight=", e.record.total_weight(),
                        " trajectories=", e.record.trajectories(), " expected=", e.record.expected(), " ",
                        v1::Variant_Name(e.outer.variant()), " rate=", e.outer.block_learning_rate(),
                        " momentum=", e.outer.block_momentum(), " rescale=", e.record.momentum_rescale(),
                        " n=", e.trajectories_total, " \"", e.record.reason(), "\"");
  }
  std::string operator()(const NotifyWatchers&) const { return "notify"; }
  std::string operator()(const Announce& e) const {
    return absl::StrCat(e.level == Announce::Level::kWarning ? "warn" : "say", " \"", e.text, "\"");
  }
  std::string operator()(const JobEnded& e) const {
    return absl::StrCat("ended ", v1::JobState_Name(e.state), " \"", e.reason, "\"");
  }
};

}  // namespace

std::string EffectText(const Effect& effect) { return std::visit(Printer{}, effect); }

std::string WatchText(const v1::WatchRoundResponse& event) {
  if (event.has_waiting()) {
    const v1::RoundStatus& w = event.waiting();
    return absl::StrCat("waiting ", v1::RoundPhase_Name(w.phase()), " ", w.have(), "/", w.expected(), " need ",
                        w.need(), " \"", w.reason(), "\"");
  }
  if (event.has_started()) {
    const v1::RoundStarted& s = event.started();
    return absl::StrCat("started attempt=", s.attempt(), " base=", s.base_version(), " digest=", s.base_digest(),
                        " rank=", s.rank(), " size=", s.size(), " steps=", s.block_steps(),
                        " samples=", s.total_samples());
  }
  if (event.has_committed()) {
    const v1::RoundCommitted& c = event.committed();
    std::string names;
    for (const std::string& name : c.contributors()) absl::StrAppend(&names, names.empty() ? "" : " ", name);
    return absl::StrCat("committed version=", c.version(), " digest=", c.model_digest(), " by [", names,
                        "] rate=", c.block_learning_rate(), " momentum=", c.block_momentum(),
                        c.reset_inner_state() ? " reset" : "", " next=", c.next_round(), " newest=", c.newest_version(),
                        " samples=", c.total_samples(), c.job_finished() ? " finished" : "");
  }
  if (event.has_restarted()) {
    return absl::StrCat("restarted attempt=", event.restarted().attempt(), " \"", event.restarted().reason(), "\"");
  }
  return absl::StrCat("ended ", v1::JobState_Name(event.ended().job_state()), " \"", event.ended().reason(), "\"");
}

}  // namespace bmuf::engine
