#include "worker/report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bmuf::worker {
namespace {
constexpr int kBarWidth = 24;
constexpr char kEraseLine[] = "\r\x1b[2K";
}  // namespace

std::string ProgressBar(uint64_t round, uint64_t round_limit, int width) {
  if (round_limit == 0) return absl::StrCat("round ", round);
  const double fraction = std::min(1.0, static_cast<double>(round) / static_cast<double>(round_limit));
  const int filled = static_cast<int>(fraction * width);
  std::string bar(static_cast<size_t>(filled), '=');
  if (filled < width) bar.push_back('>');
  bar.resize(static_cast<size_t>(width), ' ');
  return absl::StrCat("[", bar, "] ", round, "/", round_limit);
}

std::string Describe(const Standing& s) {
  std::string round = absl::StrCat("round ", s.round);
  if (s.round_limit > 0) absl::StrAppend(&round, "/", s.round_limit);
  return absl::StrFormat("%s  loss %.4f  %.0f samples/s  waited %.1f s  %d trajectories", round, s.loss,
                         s.samples_per_second, absl::ToDoubleSeconds(s.waited), s.size);
}

Report::~Report() {
  absl::MutexLock lock(&mu_);
  if (bar_open_) std::fputc('\n', out_);
}

void Report::Line(const std::string& text) {
  absl::MutexLock lock(&mu_);
  LineLocked(text);
}

void Report::LineLocked(const std::string& text) {
  if (bar_open_) std::fputs(kEraseLine, out_);
  bar_open_ = false;
  std::fprintf(out_, "%s\n", text.c_str());
  std::fflush(out_);
}

void Report::Round(const Standing& s) {
  absl::MutexLock lock(&mu_);
  if (terminal_) {
    std::fprintf(out_, "%s%s  loss %.4f  %.0f samples/s  waited %.1f s", kEraseLine,
                 ProgressBar(s.round, s.round_limit, kBarWidth).c_str(), s.loss, s.samples_per_second,
                 absl::ToDoubleSeconds(s.waited));
    std::fflush(out_);
    bar_open_ = true;
  } else if (s.round <= 1 || s.round % kPlainRounds == 0 || s.round == s.round_limit) {
    LineLocked(Describe(s));
  }
}

}  // namespace bmuf::worker
