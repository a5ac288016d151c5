// The exchange over the C++ client: one worker's connection to a real coordinator.
#ifndef BMUF_WORKER_CLIENT_EXCHANGE_H_
#define BMUF_WORKER_CLIENT_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "client/link.h"
#include "core/base/aligned_buffer.h"
#include "core/codec/codec.h"
#include "core/kernels/kernels.h"
#include "worker/exchange.h"

namespace bmuf::worker {

// As Exchange. Lossy codecs send with error feedback.
class ClientExchange : public Exchange {
 public:
  // No network yet. Errors: INVALID_ARGUMENT (a name or manifest that the coordinator would refuse).
  static absl::StatusOr<std::unique_ptr<ClientExchange>> Create(client::LinkOptions options, v1::Manifest manifest,
                                                                v1::Codec codec);

  Event Join() override;
  Event UploadInitial(const ModelState& model) override;
  Event AwaitRound(uint64_t round) override;
  Event Pull(std::optional<uint64_t> version, ModelState* out) override;
  Event Push(uint64_t round, const ModelState& base, const ModelState& local, const v1::BlockFacts& facts) override;
  Event AwaitCommit(uint64_t round) override;
  Event Leave(const std::string& reason) override;
  void Interrupt() override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  ClientExchange(std::unique_ptr<client::Link> link, const Kernels& kernels, v1::Codec codec)
      : link_(std::move(link)), kernels_(kernels), codec_(codec) {}

  // Runs one of the link's waiting calls so that Interrupt ends it.
  template <typename Call>
  auto Waiting(Call call) ABSL_LOCKS_EXCLUDED(mu_) -> decltype(call());
  Joined JoinedFrom(const v1::JoinResponse& answer);
  absl::Status Encode(const ModelState& base, const ModelState& local);

  const std::unique_ptr<client::Link> link_;
  const Kernels& kernels_;
  const v1::Codec codec_;

  // Confined to the calling thread.
  uint32_t base_digest_ = 0;  // Of the version pulled last.
  uint64_t newest_version_ = 0;
  bool initial_delivered_ = false;         // The coordinator took this worker's initial model.
  std::optional<uint64_t> payload_round_;  // payload_ is the delta for it; pushed again as it is.
  AlignedBuffer<uint8_t> payload_;
  AlignedBuffer<float> delta_;
  ErrorFeedback feedback_;

  absl::Mutex mu_;
  bool interrupted_ ABSL_GUARDED_BY(mu_) = false;
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_CLIENT_EXCHANGE_H_
