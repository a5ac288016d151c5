#include "server/model/job_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/status_macros.h"
#include "core/codec/codec.h"

namespace bmuf {
namespace {

constexpr size_t kShareElements = 64 * 1024;
constexpr size_t kKeptVersions = 2;

// What BF16 leaves of x.
AlignedBuffer<float> RoundedToBf16(const AlignedBuffer<float>& x, const Kernels& kernels, ThreadPool& pool) {
  AlignedBuffer<float> rounded = AlignedBuffer<float>::Uninitialized(x.size());
  pool.ParallelFor(x.size(), kShareElements, [&](size_t begin, size_t end) {
    uint16_t halves[2048];
    for (size_t at = begin; at < end; at += 2048) {
      const size_t n = std::min<size_t>(2048, end - at);
      kernels.bf16_encode(halves, x.data() + at, n);
      kernels.bf16_decode(rounded.data() + at, halves, n);
    }
  });
  return rounded;
}

}  // namespace

MemoryPlan PlanMemory(const Layout& layout, const v1::JobConfig& config) {
  const FilterArrays arrays = ArraysOf(config.outer().variant());
  const uint64_t vector_bytes = layout.bmuf_elements() * sizeof(float);
  const uint64_t models = arrays.look_ahead || config.pull_codec() == v1::CODEC_BF16 ? 2 : 1;
  const uint64_t encoded = config.pull_codec() == v1::CODEC_BF16 ? vector_bytes / 2 : 0;
  MemoryPlan plan;
  plan.versions_bytes = 3 * (models * vector_bytes + encoded + layout.auxiliary_bytes());
  plan.state_bytes = 2 * vector_bytes * ((arrays.momentum ? 1 : 0) + (arrays.second_moment ? 1 : 0));
  plan.accumulator_bytes = 3 * vector_bytes + 3 * layout.auxiliary_bytes();
  uint64_t largest = 0;
  for (int codec : config.push_codecs()) {
    const auto bytes = EncodedBytes(static_cast<v1::Codec>(codec), layout.bmuf_elements());
    if (bytes.ok()) largest = std::max(largest, *bytes);
  }
  // The initial model comes as FP32 whatever the codecs of deltas are.
  plan.staging_bytes = std::max<uint64_t>(
      vector_bytes, std::max<uint64_t>(1, config.max_inflight_pushes()) * (largest + layout.auxiliary_bytes()));
  return plan;
}

absl::StatusOr<std::unique_ptr<JobModel>> JobModel::Create(std::shared_ptr<const Layout> layout,
                                                           const v1::JobConfig& config, MemoryBudget& budget,
                                                           const Kernels& kernels, ThreadPool& pool) {
  if (config.max_model_bytes() > 0 && layout->model_bytes() > config.max_model_bytes()) {
    return Error(v1::REASON_MODEL_TOO_LARGE, absl::StrCat("the model has ", layout->model_bytes(),
                                                          " bytes, the job allows ", config.max_model_bytes()))
        .With("required_bytes", layout->model_bytes())
        .With("limit_bytes", config.max_model_bytes());
  }
  const MemoryPlan plan = PlanMemory(*layout, config);
  ASSIGN_OR_RETURN(MemoryBudget::Reservation memory, budget.Reserve(plan.total_bytes(), "a job with this model"));
  return std::unique_ptr<JobModel>(new JobModel(std::move(layout), config, plan, std::move(memory), kernels, pool));
}

JobModel::JobModel(std::shared_ptr<const Layout> layout, const v1::JobConfig& config, MemoryPlan plan,
                   MemoryBudget::Reservation memory, const Kernels& kernels, ThreadPool& pool)
    : layout_(std::move(layout)),
      arrays_(ArraysOf(config.outer().variant())),
      tau_(config.outer().tau()),
      rounded_broadcast_(config.pull_codec() == v1::CODEC_BF16),
      plan_(plan),
      memory_(std::move(memory)),
      kernels_(kernels),
      pool_(pool),
      accumulator_(layout_) {}

std::shared_ptr<const Version> JobModel::SetInitialModel(const Staging& staging) {
  const size_t n = layout_->bmuf_elements();
  AlignedBuffer<float> model = AlignedBuffer<float>::Uninitialized(n);
  staging.ForEachPiece(kernels_, pool_, [&](uint64_t begin, absl::Span<const float> piece) {
    std::memcpy(model.data() + begin, piece.data(), piece.size() * sizeof(float));
  });
  AlignedBuffer<uint8_t> auxiliary = AlignedBuffer<uint8_t>::Uninitialized(layout_->auxiliary_bytes());
  if (!auxiliary.empty()) std::memcpy(auxiliary.data(), staging.auxiliary().data(), auxiliary.size());
  if (arrays_.momentum) momentum_ = AlignedBuffer<float>(n);
  if (arrays_.second_moment) {
    second_moment_ = AlignedBuffer<float>::Uninitialized(n);
    std::fill(second_moment_.begin(), second_moment_.end(), InitialSecondMoment(tau_));
  }
  AlignedBuffer<float> broadcast;
  if (rounded_broadcast_) {
    broadcast = RoundedToBf16(model, kernels_, pool_);
  } else {
    std::swap(broadcast, model);  // v is 0: looking ahead changes nothing, and an empty model is the broadcast.
  }
  auto version = std::make_shared<const Version>(ModelVersion(0), layout_, std::move(broadcast), std::move(model),
                                                 std::move(auxiliary), pool_);
  accumulator_.Reset();
  absl::MutexLock lock(&mu_);
  versions_.clear();
  versions_.push_back(version);
  return version;
}

absl::Status JobModel::Fold(const Staging& staging, float max_abs, double weight, double scale, uint32_t rank) {
  return accumulator_.Fold(kernels_, pool_, staging, max_abs, weight, scale, rank);
}

absl::StatusOr<PreparedCommit> JobModel::Prepare(RoundId round, const v1::OuterOptimizer& outer, uint32_t trajectories,
                                                 double momentum_rescale) {
  if (!(accumulator_.total_weight() > 0)) {
    return Error(v1::REASON_INTERNAL, "the total weight is 0: there is no mean to apply");
  }
  const std::shared_ptr<const Version> before = Newest();
  const FilterStep step = ResolveStep(outer, trajectories, momentum_rescale);
  const FilterArrays used = ArraysOf(step.variant);
  const size_t n = layout_->bmuf_elements();

  PreparedCommit commit;
  commit.round = round;
  commit.mean = accumulator_.Mean(kernels_, pool_);
  commit.mean_norm = std::sqrt(kernels_.sum_of_squares(commit.mean.data(), n));
  AlignedBuffer<float> model = AlignedBuffer<float>::Uninitialized(n);
  AlignedBuffer<float> broadcast;
  if (used.look_ahead) broadcast = AlignedBuffer<float>::Uninitialized(n);
  // A warm-up round (plain averaging) leaves the state of the job's own rule as it is.
  if (used.momentum) commit.momentum = AlignedBuffer<float>::Uninitialized(n);
  if (used.second_moment) commit.second_moment = AlignedBuffer<float>::Uninitialized(n);

  OuterArrays arrays;
  arrays.mean = commit.mean.data();
  arrays.model_in = before->model().data();
  arrays.model_out = model.data();
  arrays.v_in = momentum_.data();
  arrays.v_out = commit.momentum.data();
  arrays.u_in = second_moment_.data();
  arrays.u_out = commit.second_moment.data();
  arrays.broadcast_out = broadcast.data();
  std::atomic<bool> finite{true};
  pool_.ParallelFor(n, kShareElements, [&](size_t begin, size_t end) {
    // A piece is checked while it is still in cache.
    for (size_t at = begin; at < end; at += kShareElements) {
      const size_t to = std::min(end, at + kShareElements);
      ApplyFilter(kernels_, step, arrays, at, to);
      for (const AlignedBuffer<float>* made : {&model, &broadcast, &commit.momentum, &commit.second_moment}) {
        if (!made->empty() && kernels_.first_non_finite(made->data() + at, to - at) < to - at) finite = false;
      }
    }
  });
  if (!finite) {
    return Error(v1::REASON_INTERNAL,
                 absl::StrCat("the outer update of round ", round.value(),
                              " gives a number that is not finite; lower the block learning rate or momentum"));
  }
  if (rounded_broadcast_) {
    broadcast = RoundedToBf16(used.look_ahead ? broadcast : model, kernels_, pool_);
    // The largest numbers of F32 round up to infinity.
    if (kernels_.first_non_finite(broadcast.data(), n) < n) {
      return Error(v1::REASON_INTERNAL,
                   absl::StrCat("the outer update of round ", round.value(),
                                " gives a number beyond the pull codec's range; lower the block learning rate"));
    }
  } else if (!used.look_ahead) {
    std::swap(broadcast, model);  // An empty model is the broadcast.
  }
  commit.version =
      std::make_shared<const Version>(CommittedVersionOf(round), layout_, std::move(broadcast), std::move(model),
                                      accumulator_.Auxiliary(before->auxiliary()), pool_);
  return commit;
}

void JobModel::Publish(PreparedCommit commit) {
  if (!commit.momentum.empty()) momentum_ = std::move(commit.momentum);
  if (!commit.second_moment.empty()) second_moment_ = std::move(commit.second_moment);
  std::shared_ptr<const Version> oldest;  // Freed after the lock.
  absl::MutexLock lock(&mu_);
  versions_.push_back(std::move(commit.version));
  if (versions_.size() > kKeptVersions) {
    oldest = std::move(versions_.front());
    versions_.pop_front();
  }
}

std::shared_ptr<const Version> JobModel::Newest() const {
  absl::MutexLock lock(&mu_);
  return versions_.empty() ? nullptr : versions_.back();
}

absl::StatusOr<std::shared_ptr<const Version>> JobModel::Get(std::optional<ModelVersion> version) const {
  absl::MutexLock lock(&mu_);
  if (versions_.empty()) return Error(v1::REASON_NO_MODEL, "there is no model yet; watch round 0");
  if (!version.has_value()) return versions_.back();
  for (const auto& kept : versions_) {
    if (kept->id() == *version) return kept;
  }
  return Error(v1::REASON_NOT_KEPT, absl::StrCat("version ", version->value(), " is not kept; the newest is ",
                                                 versions_.back()->id().value()))
      .With("version", versions_.back()->id().value());
}

}  // namespace bmuf
