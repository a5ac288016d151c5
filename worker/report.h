// What a person sees of a worker: a progress bar on a terminal, plain lines otherwise.
#ifndef BMUF_WORKER_REPORT_H_
#define BMUF_WORKER_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace bmuf::worker {

// Where training stands after a round.
struct Standing {
  uint64_t round = 0;
  uint64_t round_limit = 0;  // 0: none.
  uint32_t size = 0;         // Trajectories of the round.
  double loss = 0;
  double samples_per_second = 0;
  absl::Duration waited;  // Of the round, for the others and the coordinator.
};

// "[=====>    ] 12/40", `width` characters between the brackets; without a limit just the round.
std::string ProgressBar(uint64_t round, uint64_t round_limit, int width);
// One line, without a newline.
std::string Describe(const Standing& standing);

// Thread-safe.
class Report {
 public:
  // `out` stays the caller's. `terminal`: redraw one line instead of adding lines.
  Report(std::FILE* out, bool terminal) : terminal_(terminal), out_(out) {}
  // Ends an open bar with a newline.
  ~Report();

  void Line(const std::string& text) ABSL_LOCKS_EXCLUDED(mu_);
  // On a terminal redraws the bar, else one line in at most every `kPlainRounds` rounds and the last.
  void Round(const Standing& standing) ABSL_LOCKS_EXCLUDED(mu_);

  static constexpr uint64_t kPlainRounds = 10;

 private:
  void LineLocked(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const bool terminal_;
  absl::Mutex mu_;
  std::FILE* const out_ ABSL_PT_GUARDED_BY(mu_);
  bool bar_open_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_REPORT_H_
