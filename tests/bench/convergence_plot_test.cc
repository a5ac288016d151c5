#include "tests/bench/convergence_plot.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bmuf::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(PlotSvgTest, DrawsEveryLineOfEveryPanelWithItsLabelAndLastValue) {
  const std::string svg = PlotSvg("A & B", "x", "y",
                                  {{"left", {{"a<b", {{10, 0.5}, {100, 0.8}}, false}, {"base", {{20, 0.6}}, true}}},
                                   {"right", {{"c", {{10, 0.7}}, false}}}});
  EXPECT_EQ(Count(svg, "<polyline"), 3u);
  EXPECT_THAT(svg, HasSubstr("A &amp; B"));
  EXPECT_THAT(svg, HasSubstr("a&lt;b  (0.8000)"));
  EXPECT_THAT(svg, HasSubstr(">left<"));
  EXPECT_THAT(svg, HasSubstr(">right<"));
  EXPECT_EQ(Count(svg, "<g"), Count(svg, "</g>"));
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

TEST(PlotSvgTest, ValuesThatCannotBeDrawnAreLeftOut) {
  const std::string svg =
      PlotSvg("t", "x", "y", {{"p", {{"a", {{10, std::nan("")}, {20, INFINITY}, {0, 1}, {30, 0.5}}, false}}}});
  EXPECT_THAT(svg, Not(HasSubstr("nan,")));
  EXPECT_THAT(svg, Not(HasSubstr(",nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  EXPECT_THAT(PlotSvg("t", "x", "y", {}), HasSubstr("</svg>"));
}

TEST(PlotSvgTest, ManyLinesDifferInColourOrDash) {
  Panel panel;
  for (int i = 0; i < 12; ++i) panel.lines.push_back({"l", {{1, 0.1 * i}, {2, 0.2}}, false});
  const std::string svg = PlotSvg("t", "x", "y", {panel});
  EXPECT_EQ(Count(svg, "<polyline class=\"curve\" stroke=\"#0072b2\" points"), 1u);
  EXPECT_EQ(Count(svg, "<polyline class=\"curve\" stroke=\"#0072b2\" stroke-dasharray"), 1u);
}

}  // namespace
}  // namespace bmuf::bench
