#include "gtest/gtest.h"
#include "worker/trainer/node_reducer.h"

namespace bmuf::worker {
namespace {

constexpr Device Gpu(int index) { return {Device::Kind::kCuda, index}; }

TEST(NcclNodeReducerTest, RefusesWhatIsNoGpu) {
  for (const std::vector<Device>& devices : {std::vector<Device>{}, {Device{}}, {Gpu(4000)}}) {
    const absl::Status status = NewNcclNodeReducer(devices).status();
    EXPECT_FALSE(status.ok());
    EXPECT_FALSE(std::string(status.message()).empty());
  }
}

}  // namespace
}  // namespace bmuf::worker
