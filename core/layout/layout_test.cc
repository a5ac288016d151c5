#include "core/layout/layout.h"

#include <string>

#include "core/base/error.h"
#include "core/base/limits.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

v1::TensorSpec* Add(v1::Manifest& manifest, const std::string& name, std::initializer_list<uint64_t> shape,
                    v1::DType dtype = v1::DTYPE_F32, v1::TensorRole role = v1::TENSOR_ROLE_BMUF) {
  v1::TensorSpec* spec = manifest.add_tensors();
  spec->set_name(name);
  for (uint64_t d : shape) spec->add_shape(d);
  spec->set_dtype(dtype);
  spec->set_role(role);
  return spec;
}

v1::Manifest Typical() {
  v1::Manifest m;
  Add(m, "conv.weight", {8, 3, 3, 3});
  Add(m, "bn.running_mean", {8}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  Add(m, "bn.batches", {}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  Add(m, "rng", {5}, v1::DTYPE_I32, v1::TENSOR_ROLE_LOCAL);
  Add(m, "fc.weight", {10, 8}, v1::DTYPE_BF16);
  return m;
}

TEST(LayoutTest, PutsEachRoleInItsSection) {
  auto layout = *Layout::Create(Typical());
  EXPECT_EQ(layout->bmuf_elements(), 216u + 80u);
  EXPECT_EQ(layout->auxiliary_bytes(), 32u + 8u);
  EXPECT_EQ(layout->model_bytes(), 296u * 4 + 40);
  EXPECT_EQ(layout->tensors()[4].offset, 216u);
  EXPECT_EQ(layout->tensors()[2].offset, 32u);
  EXPECT_EQ(layout->NameOfElement(0), "conv.weight[0]");
  EXPECT_EQ(layout->NameOfElement(215), "conv.weight[215]");
  EXPECT_EQ(layout->NameOfElement(216), "fc.weight[0]");
  EXPECT_EQ(layout->NameOfAuxiliaryByte(31), "bn.running_mean[7]");
  EXPECT_EQ(layout->NameOfAuxiliaryByte(32), "bn.batches[0]");
}

TEST(LayoutTest, NamesTheFirstDifference) {
  auto layout = *Layout::Create(Typical());
  EXPECT_TRUE(layout->CheckSame(Typical()).ok());
  v1::Manifest other = Typical();
  other.mutable_tensors(4)->set_shape(1, 9);
  absl::Status status = layout->CheckSame(other);
  EXPECT_EQ(ReasonOf(status), v1::REASON_MANIFEST_MISMATCH);
  EXPECT_NE(status.message().find("fc.weight"), absl::string_view::npos);
  EXPECT_NE(status.message().find("[10,9]"), absl::string_view::npos);
  other = Typical();
  Add(other, "more", {1});
  EXPECT_NE(layout->CheckSame(other).message().find("more"), absl::string_view::npos);
  other = Typical();
  other.mutable_tensors()->RemoveLast();
  EXPECT_NE(layout->CheckSame(other).message().find("fc.weight"), absl::string_view::npos);
  other = Typical();
  other.mutable_tensors()->SwapElements(0, 4);
  EXPECT_FALSE(layout->CheckSame(other).ok());
}

TEST(LayoutTest, RefusesWhatAHostileManifestCouldTry) {
  const auto refused = [](const v1::Manifest& m) {
    auto layout = Layout::Create(m);
    return !layout.ok() && ReasonOf(layout.status()) == v1::REASON_INVALID_REQUEST;
  };
  v1::Manifest m;
  EXPECT_TRUE(refused(m));
  Add(m, "a", {2});
  EXPECT_FALSE(refused(m));
  const v1::Manifest good = m;
  Add(m = good, "a", {2});
  EXPECT_TRUE(refused(m)) << "twice";
  Add(m = good, "", {2});
  EXPECT_TRUE(refused(m)) << "no name";
  Add(m = good, "__metadata__", {2});
  EXPECT_TRUE(refused(m)) << "reserved in exported files";
  Add(m = good, std::string(limits::kMaxTensorNameBytes + 1, 'x'), {2});
  EXPECT_TRUE(refused(m)) << "long name";
  Add(m = good, "b", {2, 0});
  EXPECT_TRUE(refused(m)) << "zero dimension";
  Add(m = good, "b", {uint64_t{1} << 40, uint64_t{1} << 40});
  EXPECT_TRUE(refused(m)) << "overflow in a product";
  m = good;
  for (int i = 0; i < 40; ++i) Add(m, std::string("t") + std::to_string(i), {uint64_t{1} << 57});
  EXPECT_TRUE(refused(m)) << "overflow in a sum";
  Add(m = good, "b", {2}, v1::DTYPE_I64, v1::TENSOR_ROLE_BMUF);
  EXPECT_TRUE(refused(m)) << "integers are not trained";
  Add(m = good, "b", {2}, v1::DTYPE_I64, v1::TENSOR_ROLE_MEAN);
  EXPECT_TRUE(refused(m)) << "integers have no mean";
  Add(m = good, "b", {2}, static_cast<v1::DType>(77));
  EXPECT_TRUE(refused(m)) << "unknown dtype";
  Add(m = good, "b", {2}, v1::DTYPE_F32, static_cast<v1::TensorRole>(77));
  EXPECT_TRUE(refused(m)) << "unknown role";
  v1::TensorSpec* deep = Add(m = good, "b", {});
  for (int i = 0; i < 17; ++i) deep->add_shape(1);
  EXPECT_TRUE(refused(m)) << "too many dimensions";
  m.Clear();
  Add(m, "c", {2}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  EXPECT_TRUE(refused(m)) << "nothing to train";
}

}  // namespace
}  // namespace bmuf
