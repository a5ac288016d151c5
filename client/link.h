// One worker's connection to a coordinator: the calls of CoordinatorService, each blocking until there is news.
//
// Problem: links break, coordinators restart, pushes stop half-way; a training loop should hear only what it must
// decide. Idea: each call retries, resumes and waits by itself and returns one of few outcomes. If the coordinator had
// to be joined again, the call says so (Rejoined) instead of guessing what that means for the block. Most programs want
// Session (bmuf.h), which is built on this.
#ifndef BMUF_CLIENT_LINK_H_
#define BMUF_CLIENT_LINK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "bmuf/v1/coordinator_service.grpc.pb.h"
#include "core/base/aligned_buffer.h"
#include "core/base/clock.h"
#include "core/kernels/kernels.h"
#include "core/layout/layout.h"
#include "grpcpp/grpcpp.h"

namespace bmuf::client {

struct LinkOptions {
  std::string target;  // "host:port" or any gRPC target, for instance "dns:///coordinator:7070".
  std::string job;
  std::string worker;  // Unique in the job.
  uint32_t trajectories = 1;
  std::string client_info;  // For people.
  // How long a coordinator that is not there, or no longer there, is waited for.
  absl::Duration patience = absl::Minutes(10);
  // Called with one line when something a person may want to know happens. From any thread of the link; must not block.
  std::function<void(const std::string&)> log;
  bool use_http_proxy = false;
};

// The coordinator was joined again: it was restarted, or the lease had run out. The answer says where the job stands.
struct Rejoined {
  v1::JoinResponse answer;
};
// This worker is the initialiser now.
struct Elected {};

using RoundNews =
    std::variant<v1::RoundStarted, v1::RoundCommitted, v1::RoundRestarted, v1::RoundEnded, Elected, Rejoined>;

// The delta does not count (too late, or from another model): go on with `round` from `version`.
struct Stale {
  uint64_t round = 0;
  uint64_t version = 0;
  std::string reason;
};
using PushNews = std::variant<v1::PushDeltaResponse, Stale, Rejoined>;

struct PulledModel {
  v1::PullHeader header;
  AlignedBuffer<float> bmuf;
  AlignedBuffer<uint8_t> auxiliary;
};

// Join, AwaitRound, Push, Pull and Leave are called by one thread at a time; Cancel, set_steps_done and newest are
// thread-safe. All errors returned are permanent; CANCELLED after Cancel.
class Link {
 public:
  // No network yet. Errors: INVALID_REQUEST for a manifest or name the coordinator would refuse.
  static absl::StatusOr<std::unique_ptr<Link>> Create(LinkOptions options, v1::Manifest manifest);
  // Cancels what runs; does not say Leave.
  ~Link();

  // Becomes a member, waiting for a coordinator that is not there yet; heartbeats run from then on.
  absl::StatusOr<v1::JoinResponse> Join();

  // Blocks until there is news of `round` that a worker acts on. RoundStarted means: this worker is asked for a delta;
  // after an accepted push, that the delta is not in after all and is to be pushed again.
  absl::StatusOr<RoundNews> AwaitRound(uint64_t round);

  // Delivers a payload; retries and resumes until it is answered. `base_digest`: of the version the block started from.
  absl::StatusOr<PushNews> Push(v1::PayloadKind kind, uint64_t round, uint32_t base_digest, v1::Codec codec,
                                absl::Span<const uint8_t> payload, const v1::BlockFacts& facts);

  // Reads a version (unset, or no longer kept: the newest) and checks digest and finiteness.
  absl::StatusOr<PulledModel> Pull(std::optional<uint64_t> version);

  // Ends membership if the coordinator can be reached within a unary timeout; OK if it was no member.
  absl::Status Leave(const std::string& reason);

  // Makes blocking calls return CANCELLED, now and later.
  void Cancel();

  // Shown by `bmufctl status`.
  void set_steps_done(uint64_t steps) { steps_done_ = steps; }

  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  // The newest answer to a Join.
  v1::JoinResponse joined() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Link(LinkOptions options, std::shared_ptr<const Layout> layout);

  class Call;   // A running stream that Cancel and the watchdog can end.
  class Unary;  // A running unary call that Cancel can end.

  struct PullProgress {
    bool started = false;
    v1::PullHeader header;
    AlignedBuffer<uint8_t> payload;
    uint64_t received = 0;
  };

  void Log(const std::string& text) const {
    if (options_.log) options_.log(text);
  }
  v1::Session session() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<v1::JoinResponse> JoinOnce() ABSL_LOCKS_EXCLUDED(mu_);
  // True if the session is another one than the caller was last told of.
  bool TakeRejoined(v1::JoinResponse* answer) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes what the caller learns from a Join's answer, so that it is not told again.
  void Told() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // UNAVAILABLE if a reply comes from an older life of the coordinator than one that was heard.
  absl::Status CheckEpoch(uint64_t epoch) const ABSL_LOCKS_EXCLUDED(mu_);
  // After a failure: OK to try the call again (the delay is over; joined again if that was the remedy), else the error
  // to return. `silent_since`: when the coordinator was last heard.
  absl::Status Recover(const absl::Status& error, int attempt, MonotonicTime* silent_since) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Wait(absl::Duration delay) ABSL_LOCKS_EXCLUDED(mu_);
  void Background() ABSL_LOCKS_EXCLUDED(mu_);
  void Beat(absl::Duration period) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status PushOnce(const v1::PushHeader& header, absl::Span<const uint8_t> payload, v1::PushDeltaResponse* answer);
  // Bytes of this very payload that the coordinator kept from a push that broke off.
  uint64_t KeptBytes(uint64_t round, absl::Span<const uint8_t> payload);
  absl::Status PullOnce(const v1::PullModelRequest& request, PullProgress* progress);
  absl::StatusOr<PulledModel> Unpack(const PullProgress& progress) const;

  const LinkOptions options_;
  const std::shared_ptr<const Layout> layout_;
  const std::string instance_;
  const Kernels& kernels_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::CoordinatorService::Stub> stub_;
  std::atomic<uint64_t> steps_done_{0};
  // The calling thread's.
  absl::BitGen random_;
  std::string known_token_;  // Session the caller was last told of.

  mutable absl::Mutex mu_;
  v1::JoinResponse joined_ ABSL_GUARDED_BY(mu_);
  bool is_member_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t highest_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool elected_ ABSL_GUARDED_BY(mu_) = false;       // The coordinator waits for this worker's model.
  bool elected_told_ ABSL_GUARDED_BY(mu_) = false;  // The caller knows.
  bool beating_ ABSL_GUARDED_BY(mu_) = false;
  Call* call_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::vector<grpc::ClientContext*> unary_ ABSL_GUARDED_BY(mu_);

  std::thread background_;  // Heartbeats and the watchdog of transfers.
};

}  // namespace bmuf::client

#endif  // BMUF_CLIENT_LINK_H_
