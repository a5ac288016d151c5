#include "server/model/safetensors.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/model/test_payload.h"

namespace bmuf {
namespace {

using nlohmann::json;

// The whole file, read in pieces of at most `most` bytes.
std::string ReadAll(const SafetensorsView& view, uint64_t most) {
  std::string file;
  while (file.size() < view.size()) {
    const absl::Span<const uint8_t> piece = view.At(file.size(), most);
    EXPECT_FALSE(piece.empty());
    EXPECT_LE(piece.size(), most);
    if (piece.empty()) break;
    file.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return file;
}

struct Entry {
  std::string dtype;
  std::vector<uint64_t> shape;
  std::string data;
};
struct File {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Entry> tensors;
};

// A reader of the format as it is published, written for this test alone.
File Parse(const std::string& file) {
  File result;
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  EXPECT_EQ(length % 8, 0u) << "the data is aligned";
  EXPECT_LE(8 + length, file.size());
  const std::string data = file.substr(8 + length);
  const json header = json::parse(file.substr(8, length));
  std::map<uint64_t, uint64_t> runs;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      result.metadata = value.get<std::map<std::string, std::string>>();
      continue;
    }
    const uint64_t begin = value.at("data_offsets").at(0), end = value.at("data_offsets").at(1);
    EXPECT_LE(begin, end);
    EXPECT_LE(end, data.size());
    EXPECT_TRUE(runs.emplace(begin, end).second);
    Entry entry{value.at("dtype"), value.at("shape"), data.substr(begin, end - begin)};
    uint64_t elements = 1;
    for (uint64_t dimension : entry.shape) elements *= dimension;
    EXPECT_EQ(entry.data.size(), elements * (entry.dtype == "I64" ? 8 : 4)) << name;
    result.tensors[name] = entry;
  }
  uint64_t at = 0;
  for (const auto& [begin, end] : runs) {
    EXPECT_EQ(begin, at) << "no gap and no overlap";
    at = end;
  }
  EXPECT_EQ(at, data.size());
  return result;
}

template <typename T>
std::vector<T> Values(const Entry& entry) {
  std::vector<T> values(entry.data.size() / sizeof(T));
  std::memcpy(values.data(), entry.data.data(), entry.data.size());
  return values;
}

class SafetensorsTest : public testing::Test {
 protected:
  std::shared_ptr<const Version> Make(const v1::Manifest& manifest, std::vector<float> broadcast,
                                      std::vector<float> model, const std::vector<uint8_t>& auxiliary) {
    const auto buffer = [](const auto& values) {
      using T = typename std::decay_t<decltype(values)>::value_type;
      AlignedBuffer<T> b(values.size());
      std::copy(values.begin(), values.end(), b.begin());
      return b;
    };
    return std::make_shared<const Version>(ModelVersion(7), LayoutOf(manifest), buffer(broadcast), buffer(model),
                                           buffer(auxiliary), pool_);
  }
  ThreadPool pool_{"test", 1};
};

TEST_F(SafetensorsTest, AnIndependentReaderSeesEveryTensor) {
  v1::Manifest manifest;
  AddTensor(manifest, "net.0.weight", {2, 3});
  AddTensor(manifest, "mean", {2}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  AddTensor(manifest, "count", {}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  AddTensor(manifest, "scratch", {9}, v1::DTYPE_I32, v1::TENSOR_ROLE_LOCAL);
  AddTensor(manifest, "half", {2}, v1::DTYPE_BF16);
  AddTensor(manifest, "seed", {1}, v1::DTYPE_I32, v1::TENSOR_ROLE_FIRST);
  std::vector<uint8_t> auxiliary;
  AppendValues<float>(auxiliary, {0.5f, 0.25f});
  AppendValues<int64_t>(auxiliary, {int64_t{1} << 60});
  AppendValues<int32_t>(auxiliary, {-4});
  const auto version = Make(manifest, {1, 2, 3, 4, 5, 6, 7, 8}, {10, 20, 30, 40, 50, 60, 70, 80}, auxiliary);
  const SafetensorsView view("lm", version, v1::MODEL_KIND_MODEL, ScalarKernels());
  const std::string whole = ReadAll(view, 1 << 20);
  for (uint64_t most : {1, 7, 64}) EXPECT_EQ(ReadAll(view, most), whole);

  const File file = Parse(whole);
  ASSERT_EQ(file.tensors.size(), 5u) << "all but the local one";
  const Entry& weight = file.tensors.at("net.0.weight");
  EXPECT_EQ(weight.dtype, "F32");
  EXPECT_EQ(weight.shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(Values<float>(weight), (std::vector<float>{10, 20, 30, 40, 50, 60}));
  EXPECT_EQ(file.tensors.at("half").dtype, "F32") << "kept in F32";
  EXPECT_EQ(Values<float>(file.tensors.at("half")), (std::vector<float>{70, 80}));
  EXPECT_EQ(Values<float>(file.tensors.at("mean")), (std::vector<float>{0.5f, 0.25f}));
  EXPECT_EQ(file.tensors.at("count").dtype, "I64");
  EXPECT_TRUE(file.tensors.at("count").shape.empty());
  EXPECT_EQ(Values<int64_t>(file.tensors.at("count")), std::vector<int64_t>{int64_t{1} << 60});
  EXPECT_EQ(Values<int32_t>(file.tensors.at("seed")), std::vector<int32_t>{-4});
  EXPECT_EQ(file.metadata.at("job"), "lm");
  EXPECT_EQ(file.metadata.at("version"), "7");
  EXPECT_EQ(file.metadata.at("kind"), "model");

  const SafetensorsView other("lm", version, v1::MODEL_KIND_BROADCAST, ScalarKernels());
  const File broadcast = Parse(ReadAll(other, 1 << 20));
  EXPECT_EQ(broadcast.metadata.at("kind"), "broadcast");
  EXPECT_EQ(Values<float>(broadcast.tensors.at("half")), (std::vector<float>{7, 8}));
}

TEST_F(SafetensorsTest, NamesThatNeedEscapesComeBackAsTheyWere) {
  v1::Manifest manifest;
  const std::string name = "a\"b\\c\n\xc3\xa9";
  AddTensor(manifest, name, {1});
  const SafetensorsView view("lm", Make(manifest, {1}, {}, {}), v1::MODEL_KIND_MODEL, ScalarKernels());
  EXPECT_EQ(Parse(ReadAll(view, 100)).tensors.count(name), 1u);
}

}  // namespace
}  // namespace bmuf
