#include "server/model/memory_budget.h"

#include <utility>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

TEST(MemoryBudgetTest, RefusesWithBothNumbersAndTakesNothing) {
  MemoryBudget budget(100);
  auto first = budget.Reserve(60, "a job");
  ASSERT_TRUE(first.ok());
  for (uint64_t bytes : {uint64_t{41}, ~uint64_t{0}}) {
    const absl::Status refused = budget.Reserve(bytes, "another").status();
    EXPECT_EQ(ReasonOf(refused), v1::REASON_MODEL_TOO_LARGE);
    EXPECT_EQ(MetadataOf(refused, "required_bytes"), std::to_string(bytes));
    EXPECT_EQ(MetadataOf(refused, "limit_bytes"), "100");
  }
  EXPECT_EQ(budget.used_bytes(), 60u);
  EXPECT_TRUE(budget.Reserve(40, "the rest").ok());
}

TEST(MemoryBudgetTest, AReservationIsGivenBackOnce) {
  MemoryBudget budget(100);
  {
    MemoryBudget::Reservation outer;
    {
      MemoryBudget::Reservation inner = *budget.Reserve(30, "x");
      outer = std::move(inner);
    }
    EXPECT_EQ(budget.used_bytes(), 30u) << "moved, not given back";
    outer = *budget.Reserve(50, "y");
    EXPECT_EQ(budget.used_bytes(), 50u) << "the first one went when the second took its place";
  }
  EXPECT_EQ(budget.used_bytes(), 0u);
}

}  // namespace
}  // namespace bmuf
