#include "tests/bench/convergence_plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace bmuf::bench {
namespace {

// Okabe and Ito's palette: distinct for the colour-blind too.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};
constexpr size_t kColourCount = sizeof(kColours) / sizeof(kColours[0]);
constexpr const char* kDashes[] = {"", "6 3", "2 3", "8 3 2 3"};
constexpr size_t kDashCount = sizeof(kDashes) / sizeof(kDashes[0]);

constexpr double kPanelWidth = 340, kPanelHeight = 300, kGap = 30, kLeft = 70, kTop = 80, kLineHeight = 18;

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

// 1, 2 or 5 times a power of ten, so that about `count` of them cover `range`.
double NiceStep(double range, int count) {
  const double rough = range / count, power = std::pow(10, std::floor(std::log10(rough)));
  for (double m : {1.0, 2.0, 5.0}) {
    if (m * power >= rough) return m * power;
  }
  return 10 * power;
}

std::string ShortNumber(double x) {
  if (x >= 1e6) return absl::StrFormat("%gM", x / 1e6);
  if (x >= 1e3) return absl::StrFormat("%gk", x / 1e3);
  return absl::StrFormat("%g", x);
}

struct Range {
  double low, high;
};

struct Axes {
  Range x, y;
  double y_step;
  double X(double v) const {
    return (std::log(v) - std::log(x.low)) / (std::log(x.high) - std::log(x.low)) * kPanelWidth;
  }
  double Y(double v) const { return (y.high - v) / (y.high - y.low) * kPanelHeight; }
};

Axes AxesFor(const std::vector<Panel>& panels) {
  std::vector<double> xs, ys;
  for (const Panel& panel : panels) {
    for (const Line& line : panel.lines) {
      for (const auto& [x, y] : line.curve) {
        if (x > 0 && std::isfinite(y)) {
          xs.push_back(x);
          ys.push_back(y);
        }
      }
    }
  }
  if (xs.empty()) return {{1, 10}, {0, 1}, 0.2};
  std::sort(ys.begin(), ys.end());
  const auto [x_low, x_high] = std::minmax_element(xs.begin(), xs.end());
  const double low = ys[ys.size() / 5], high = ys.back();
  const double step = NiceStep(std::max(high - low, 1e-3), 6);
  return {{*x_low / 1.05, *x_high * 1.05}, {std::floor(low / step) * step, std::ceil(high / step) * step}, step};
}

void DrawFrame(const Axes& axes, const Panel& panel, bool with_y_numbers, std::string* out) {
  absl::StrAppendFormat(out, "<text x=\"%g\" y=\"-12\" text-anchor=\"middle\" font-weight=\"bold\">%s</text>\n",
                        kPanelWidth / 2, Escape(panel.title));
  const int y_ticks = static_cast<int>(std::lround((axes.y.high - axes.y.low) / axes.y_step));
  for (int i = 0; i <= y_ticks; ++i) {
    const double value = axes.y.low + i * axes.y_step;
    absl::StrAppendFormat(out, "<line class=\"grid\" x1=\"0\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>\n", kPanelWidth,
                          axes.Y(value), axes.Y(value));
    if (with_y_numbers) {
      absl::StrAppendFormat(out, "<text x=\"-8\" y=\"%.1f\" text-anchor=\"end\">%.3g</text>\n", axes.Y(value) + 4,
                            value);
    }
  }
  for (double power = std::pow(10, std::floor(std::log10(axes.x.low))); power <= axes.x.high; power *= 10) {
    for (int m = 1; m <= 9; ++m) {
      const double value = m * power;
      if (value < axes.x.low || value > axes.x.high) continue;
      absl::StrAppendFormat(out, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"0\" y2=\"%g\"/>\n", axes.X(value),
                            axes.X(value), kPanelHeight);
      if (m == 1 || m == 2 || m == 5) {
        absl::StrAppendFormat(out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%s</text>\n", axes.X(value),
                              kPanelHeight + 18, ShortNumber(value));
      }
    }
  }
}

std::string Style(const Line& line, size_t index) {
  if (line.reference) return "stroke=\"#777\" stroke-dasharray=\"4 3\"";
  const char* dash = kDashes[index / kColourCount % kDashCount];
  return absl::StrCat("stroke=\"", kColours[index % kColourCount], "\"",
                      *dash != 0 ? absl::StrCat(" stroke-dasharray=\"", dash, "\"") : "");
}

void DrawPanel(const Axes& axes, const Panel& panel, bool first, const std::string& x_label, std::string* out) {
  DrawFrame(axes, panel, first, out);
  absl::StrAppendFormat(out, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%s</text>\n", kPanelWidth / 2,
                        kPanelHeight + 40, Escape(x_label));
  absl::StrAppend(out, "<g clip-path=\"url(#frame)\">\n");
  for (size_t i = 0; i < panel.lines.size(); ++i) {
    const Line& line = panel.lines[i];
    absl::StrAppend(out, "<polyline class=\"curve\" ", Style(line, i), " points=\"");
    for (const auto& [x, y] : line.curve) {
      if (x > 0 && std::isfinite(y)) absl::StrAppendFormat(out, "%.1f,%.1f ", axes.X(x), axes.Y(y));
    }
    absl::StrAppend(out, "\"/>\n");
  }
  absl::StrAppendFormat(out, "</g>\n<rect class=\"frame\" width=\"%g\" height=\"%g\"/>\n", kPanelWidth, kPanelHeight);
  for (size_t i = 0; i < panel.lines.size(); ++i) {
    const Line& line = panel.lines[i];
    const double y = kPanelHeight + 66 + static_cast<double>(i) * kLineHeight;
    const std::string final = line.curve.empty() ? "" : absl::StrFormat("  (%.4f)", line.curve.back().second);
    absl::StrAppendFormat(out, "<line class=\"curve\" %s x1=\"0\" x2=\"26\" y1=\"%g\" y2=\"%g\"/>\n", Style(line, i),
                          y - 4, y - 4);
    absl::StrAppendFormat(out, "<text x=\"34\" y=\"%g\">%s</text>\n", y, Escape(line.label + final));
  }
}

}  // namespace

std::string PlotSvg(const std::string& title, const std::string& x_label, const std::string& y_label,
                    const std::vector<Panel>& panels) {
  const Axes axes = AxesFor(panels);
  size_t most_lines = 0;
  for (const Panel& panel : panels) most_lines = std::max(most_lines, panel.lines.size());
  const double width = kLeft + static_cast<double>(panels.size()) * (kPanelWidth + kGap);
  const double height = kTop + kPanelHeight + 70 + static_cast<double>(most_lines) * kLineHeight;
  std::string out = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\">\n"
      "<style>text{font:12px sans-serif;fill:#222}.title{font:bold 16px sans-serif}.grid{stroke:#e4e4e4}"
      ".frame{fill:none;stroke:#888}.curve{fill:none;stroke-width:2;stroke-linejoin:round}</style>\n"
      "<defs><clipPath id=\"frame\"><rect width=\"%g\" height=\"%g\"/></clipPath></defs>\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text class=\"title\" x=\"%g\" y=\"30\">%s</text>\n"
      "<text transform=\"translate(18 %g) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
      width, height, width, height, kPanelWidth, kPanelHeight, kLeft, Escape(title), kTop + kPanelHeight / 2,
      Escape(y_label));
  for (size_t i = 0; i < panels.size(); ++i) {
    absl::StrAppendFormat(&out, "<g transform=\"translate(%g %g)\">\n",
                          kLeft + static_cast<double>(i) * (kPanelWidth + kGap), kTop);
    DrawPanel(axes, panels[i], i == 0, x_label, &out);
    absl::StrAppend(&out, "</g>\n");
  }
  absl::StrAppend(&out, "</svg>\n");
  return out;
}

}  // namespace bmuf::bench
