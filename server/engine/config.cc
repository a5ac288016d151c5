// Rules of a job: defaults, ranges, and which of them may change later.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/status_macros.h"
#include "server/engine/durations.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

// Longer than any sensible wait, and far from overflow when added up.
constexpr absl::Duration kLongest = absl::Hours(24 * 365);
constexpr size_t kMaxLabels = 64;
constexpr size_t kMaxLabelBytes = 256;
constexpr uint32_t kMaxInflightPushes = 4096;

absl::Status Wrong(const std::string& field, const std::string& rule) {
  return Error(v1::REASON_INVALID_REQUEST, absl::StrCat(field, " ", rule)).Field(field, rule);
}

// `d` in [least, kLongest]; well-formed (protobuf's rule: same signs, |nanos| below a second).
absl::Status CheckDuration(const std::string& field, const google::protobuf::Duration& d, absl::Duration least) {
  const bool formed =
      d.nanos() >= 0 && d.nanos() < 1'000'000'000 && d.seconds() >= 0 && d.seconds() <= absl::ToInt64Seconds(kLongest);
  if (!formed || ToDuration(d) < least) {
    return Wrong(
        field, absl::StrCat("must be between ", absl::FormatDuration(least), " and ", absl::FormatDuration(kLongest)));
  }
  return absl::OkStatus();
}

absl::Status ResolveOuter(v1::OuterOptimizer* outer) {
  if (!v1::Variant_IsValid(outer->variant())) return Wrong("outer.variant", "is not known");
  if (outer->variant() == v1::VARIANT_UNSPECIFIED) outer->set_variant(v1::VARIANT_NESTEROV);
  if (!outer->has_block_learning_rate()) outer->set_block_learning_rate(1.0);
  // Written so that NaN fails.
  if (!(outer->block_learning_rate() > 0 && outer->block_learning_rate() <= 100)) {
    return Wrong("outer.block_learning_rate", "must be above 0 and at most 100");
  }
  const auto fraction = [](double x) { return x >= 0 && x < 1; };
  if (outer->has_block_momentum() && !fraction(outer->block_momentum())) {
    return Wrong("outer.block_momentum", "must be at least 0 and below 1");
  }
  if (!outer->has_beta1()) outer->set_beta1(0.9);
  if (!fraction(outer->beta1())) return Wrong("outer.beta1", "must be at least 0 and below 1");
  if (!outer->has_beta2()) outer->set_beta2(0.99);
  if (!fraction(outer->beta2())) return Wrong("outer.beta2", "must be at least 0 and below 1");
  if (!outer->has_tau()) outer->set_tau(1e-3);
  if (!(outer->tau() > 0 && std::isfinite(outer->tau()))) return Wrong("outer.tau", "must be above 0");
  if (!v1::MomentumPolicy_IsValid(outer->momentum_policy())) return Wrong("outer.momentum_policy", "is not known");
  if (outer->momentum_policy() == v1::MOMENTUM_POLICY_UNSPECIFIED) {
    outer->set_momentum_policy(v1::MOMENTUM_POLICY_FROZEN);
  }
  if (outer->momentum_policy() != v1::MOMENTUM_POLICY_FROZEN && outer->has_block_momentum()) {
    return Wrong("outer.block_momentum", "must stay unset (auto) under a momentum policy that follows membership");
  }
  return absl::OkStatus();
}

absl::Status ResolveBarrier(v1::BarrierPolicy* barrier, uint32_t max_workers) {
  if (barrier->min_workers() == 0) barrier->set_min_workers(1);
  if (barrier->min_workers() > max_workers) return Wrong("barrier.min_workers", "must not exceed max_workers");
  if (!(barrier->min_fraction() >= 0 && barrier->min_fraction() <= 1)) {
    return Wrong("barrier.min_fraction", "must be between 0 and 1");
  }
  if (barrier->expected_workers() < barrier->min_workers()) barrier->set_expected_workers(barrier->min_workers());
  if (barrier->expected_workers() > max_workers) {
    return Wrong("barrier.expected_workers", "must not exceed max_workers");
  }
  if (!barrier->has_start_timeout()) barrier->mutable_start_timeout()->set_seconds(60);
  RETURN_IF_ERROR(CheckDuration("barrier.start_timeout", barrier->start_timeout(), absl::ZeroDuration()));
  RETURN_IF_ERROR(CheckDuration("barrier.soft_timeout", barrier->soft_timeout(), absl::ZeroDuration()));
  if (!(barrier->adaptive_soft_factor() >= 0 && barrier->adaptive_soft_factor() <= 1000)) {
    return Wrong("barrier.adaptive_soft_factor", "must be between 0 and 1000");
  }
  if (!barrier->has_collect_timeout()) barrier->mutable_collect_timeout()->set_seconds(600);
  RETURN_IF_ERROR(CheckDuration("barrier.collect_timeout", barrier->collect_timeout(), absl::Milliseconds(1)));
  if (!v1::OnTimeout_IsValid(barrier->on_timeout())) return Wrong("barrier.on_timeout", "is not known");
  if (barrier->on_timeout() == v1::ON_TIMEOUT_UNSPECIFIED) barrier->set_on_timeout(v1::ON_TIMEOUT_COMMIT_IF_QUORUM);
  return CheckDuration("barrier.grace", barrier->grace(), absl::ZeroDuration());
}

absl::Status ResolveNormGuard(v1::NormGuard* guard) {
  if (!v1::NormGuardAction_IsValid(guard->action())) return Wrong("norm_guard.action", "is not known");
  // Before there is a median the guard has no relative limit, which is the documented "off until then".
  if (guard->action() == v1::NORM_GUARD_ACTION_UNSPECIFIED) guard->set_action(v1::NORM_GUARD_ACTION_REJECT);
  if (guard->factor() == 0) guard->set_factor(10);
  if (!(guard->factor() > 0 && std::isfinite(guard->factor()))) return Wrong("norm_guard.factor", "must be above 0");
  if (!(guard->max_abs() >= 0 && std::isfinite(guard->max_abs()))) {
    return Wrong("norm_guard.max_abs", "must be 0 (none) or above");
  }
  return absl::OkStatus();
}

absl::Status ResolveCodecs(v1::JobConfig* config) {
  if (config->push_codecs().empty()) {
    for (v1::Codec codec : {v1::CODEC_FP32, v1::CODEC_BF16, v1::CODEC_FP16, v1::CODEC_INT8}) {
      config->add_push_codecs(codec);
    }
  }
  if (config->push_codecs_size() > v1::Codec_ARRAYSIZE) return Wrong("push_codecs", "has repeated entries");
  for (int codec : config->push_codecs()) {
    if (codec < v1::CODEC_FP32 || codec > v1::CODEC_INT8) {
      return Wrong("push_codecs", "may hold FP32, BF16, FP16 and INT8; others are not in this build");
    }
  }
  if (config->pull_codec() == v1::CODEC_UNSPECIFIED) config->set_pull_codec(v1::CODEC_FP32);
  if (config->pull_codec() != v1::CODEC_FP32 && config->pull_codec() != v1::CODEC_BF16) {
    return Wrong("pull_codec", "must be FP32 or BF16");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::JobConfig> ResolveConfig(const v1::JobConfig& config) {
  v1::JobConfig c = config;
  if (c.max_workers() == 0) c.set_max_workers(256);
  if (c.max_workers() > limits::kMaxWorkersPerJob) {
    return Wrong("max_workers", absl::StrCat("must be at most ", limits::kMaxWorkersPerJob));
  }
  RETURN_IF_ERROR(ResolveOuter(c.mutable_outer()));
  RETURN_IF_ERROR(ResolveBarrier(c.mutable_barrier(), c.max_workers()));
  RETURN_IF_ERROR(ResolveNormGuard(c.mutable_norm_guard()));
  RETURN_IF_ERROR(ResolveCodecs(&c));
  if (c.block_steps() == 0) c.set_block_steps(40);
  if (!v1::Weighting_IsValid(c.weighting())) return Wrong("weighting", "is not known");
  if (c.weighting() == v1::WEIGHTING_UNSPECIFIED) c.set_weighting(v1::WEIGHTING_EQUAL);
  if (!(c.nominal_block() >= 0 && std::isfinite(c.nominal_block())))
    return Wrong("nominal_block", "must not be negative");
  if (c.weighting() != v1::WEIGHTING_EQUAL && c.nominal_block() == 0) {
    return Wrong("nominal_block", "must be above 0 with this weighting: the usual samples or tokens of a block");
  }
  if (!c.has_reset_inner_state()) c.set_reset_inner_state(true);
  if (!c.has_initial_model_timeout()) c.mutable_initial_model_timeout()->set_seconds(600);
  RETURN_IF_ERROR(CheckDuration("initial_model_timeout", c.initial_model_timeout(), absl::Milliseconds(1)));
  if (!c.has_lease()) c.mutable_lease()->set_seconds(30);
  RETURN_IF_ERROR(CheckDuration("lease", c.lease(), absl::Seconds(1)));
  if (c.max_inflight_pushes() == 0) c.set_max_inflight_pushes(4);
  if (c.max_inflight_pushes() > kMaxInflightPushes) {
    return Wrong("max_inflight_pushes", absl::StrCat("must be at most ", kMaxInflightPushes));
  }
  if (!v1::Durability_IsValid(c.durability())) return Wrong("durability", "is not known");
  if (c.durability() == v1::DURABILITY_UNSPECIFIED) c.set_durability(v1::DURABILITY_EVERY_ROUND);
  if (c.snapshot_every() == 0) c.set_snapshot_every(10);
  if (c.labels().size() > kMaxLabels) return Wrong("labels", absl::StrCat("may have at most ", kMaxLabels, " entries"));
  for (const auto& [key, value] : c.labels()) {
    if (key.size() + value.size() > kMaxLabelBytes) {
      return Wrong("labels", absl::StrCat("entries may have at most ", kMaxLabelBytes, " bytes"));
    }
  }
  return c;
}

absl::StatusOr<v1::JobConfig> ApplyChanges(const v1::JobConfig& current, const v1::JobConfig& changes, bool has_model) {
  v1::JobConfig next = current;
  // Merging protobufs adds lists up and mixes the halves of durations; here what is set replaces what was.
  if (!changes.push_codecs().empty()) next.clear_push_codecs();
  if (!changes.labels().empty()) next.clear_labels();
  if (changes.has_lease()) next.clear_lease();
  if (changes.has_initial_model_timeout()) next.clear_initial_model_timeout();
  if (changes.barrier().has_start_timeout()) next.mutable_barrier()->clear_start_timeout();
  if (changes.barrier().has_soft_timeout()) next.mutable_barrier()->clear_soft_timeout();
  if (changes.barrier().has_collect_timeout()) next.mutable_barrier()->clear_collect_timeout();
  if (changes.barrier().has_grace()) next.mutable_barrier()->clear_grace();
  next.MergeFrom(changes);
  ASSIGN_OR_RETURN(next, ResolveConfig(next));
  if (!has_model) return next;
  const struct {
    const char* field;
    bool same;
  } fixed[] = {
      {"outer.variant", next.outer().variant() == current.outer().variant()},
      {"outer.momentum_policy", next.outer().momentum_policy() == current.outer().momentum_policy()},
      {"outer.warmup_rounds", next.outer().warmup_rounds() == current.outer().warmup_rounds()},
      {"pull_codec", next.pull_codec() == current.pull_codec()},
      {"warmup_steps", next.warmup_steps() == current.warmup_steps()},
      {"durability", next.durability() == current.durability()},
      {"expected_trajectories", next.expected_trajectories() == current.expected_trajectories()},
      {"seed", next.seed() == current.seed()},
  };
  for (const auto& [field, same] : fixed) {
    if (!same) {
      return Error(v1::REASON_WRONG_STATE,
                   absl::StrCat(field, " is fixed once the job has a model; create another job"))
          .Field(field, "is fixed once the job has a model");
    }
  }
  return next;
}

}  // namespace bmuf::engine
