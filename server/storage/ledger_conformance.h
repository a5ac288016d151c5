// What every ledger must do, whatever it keeps its rows in. Usage, in an implementation's test:
//   INSTANTIATE_TEST_SUITE_P(Memory, LedgerConformanceTest, testing::Values([] { return std::make_unique<...>(); }));
#ifndef BMUF_SERVER_STORAGE_LEDGER_CONFORMANCE_H_
#define BMUF_SERVER_STORAGE_LEDGER_CONFORMANCE_H_

#include <functional>
#include <memory>

#include "gtest/gtest.h"
#include "server/storage/ledger.h"

namespace bmuf::storage {

// Makes an empty ledger.
using LedgerFactory = std::function<std::unique_ptr<Ledger>()>;

class LedgerConformanceTest : public testing::TestWithParam<LedgerFactory> {
 protected:
  void SetUp() override { ledger_ = GetParam()(); }
  std::unique_ptr<Ledger> ledger_;
};

}  // namespace bmuf::storage

#endif  // BMUF_SERVER_STORAGE_LEDGER_CONFORMANCE_H_
