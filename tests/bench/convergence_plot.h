// A small line chart as SVG text: panels side by side with one logarithmic x axis and one y axis for all.
#ifndef BMUF_TESTS_BENCH_CONVERGENCE_PLOT_H_
#define BMUF_TESTS_BENCH_CONVERGENCE_PLOT_H_

#include <string>
#include <utility>
#include <vector>

namespace bmuf::bench {

using Curve = std::vector<std::pair<double, double>>;  // (x > 0, y), x rising.

struct Line {
  std::string label;  // UTF-8.
  Curve curve;
  bool reference = false;  // Drawn grey and dashed, behind the others.
};

struct Panel {
  std::string title;
  std::vector<Line> lines;
};

// The whole file. The y axis shows the upper part of the values (from the 20th percentile on, widened to round
// numbers), where the curves differ; what lies below runs out of the frame. Text is escaped.
std::string PlotSvg(const std::string& title, const std::string& x_label, const std::string& y_label,
                    const std::vector<Panel>& panels);

}  // namespace bmuf::bench

#endif  // BMUF_TESTS_BENCH_CONVERGENCE_PLOT_H_
