#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/dataset.h"
#include "worker/data/sample_stream.h"

namespace bmuf::worker {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string Big(uint32_t v) {
  return {static_cast<char>(v >> 24), static_cast<char>(v >> 16), static_cast<char>(v >> 8), static_cast<char>(v)};
}
std::string Images(uint32_t count, uint32_t rows, uint32_t columns) {
  std::string s = Big(0x803) + Big(count) + Big(rows) + Big(columns);
  for (uint32_t i = 0; i < count * rows * columns; ++i) s.push_back(static_cast<char>(i));
  return s;
}
std::string Labels(uint32_t count) {
  std::string s = Big(0x801) + Big(count);
  for (uint32_t i = 0; i < count; ++i) s.push_back(static_cast<char>(i % 3));
  return s;
}

class DatasetTest : public ::testing::Test {
 protected:
  DatasetTest() {
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  std::string Plain(const std::string& name, const std::string& content) {
    std::ofstream(dir_ + name, std::ios::binary) << content;
    return dir_ + name;
  }
  std::string Gzip(const std::string& name, const std::string& content) {
    gzFile f = gzopen((dir_ + name).c_str(), "wb");
    EXPECT_EQ(gzwrite(f, content.data(), content.size()), static_cast<int>(content.size()));
    gzclose(f);
    return dir_ + name;
  }
  void ExpectRefused(const std::string& images, const std::string& labels, absl::StatusCode code,
                     const std::vector<std::string>& words) {
    const absl::Status status = LoadIdx(images, labels).status();
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& word : words) EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
  const std::string dir_ =
      absl::StrCat(getenv("TEST_TMPDIR"), "/", ::testing::UnitTest::GetInstance()->current_test_info()->name(), "/");
};

TEST_F(DatasetTest, ReadsCompressedAndPlainFilesAlike) {
  for (bool gzip : {true, false}) {
    const std::string images = gzip ? Gzip("i.gz", Images(5, 2, 3)) : Plain("i", Images(5, 2, 3));
    const std::string labels = gzip ? Gzip("l.gz", Labels(5)) : Plain("l", Labels(5));
    auto data = LoadIdx(images, labels);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(data->size(), 5u);
    EXPECT_EQ(data->rows, 2u);
    EXPECT_EQ(data->columns, 3u);
    EXPECT_EQ(data->classes, 3u);
    EXPECT_EQ(data->pixels[29], 29);
    EXPECT_EQ(data->labels, (std::vector<uint8_t>{0, 1, 2, 0, 1}));
  }
}

TEST_F(DatasetTest, NamesTheMissingFileAndThePackageThatBringsIt) {
  const absl::Status status = LoadImageData(dir_ + "nowhere").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("nowhere/train-images-idx3-ubyte"), HasSubstr("dataset-fashion-mnist")));
  ExpectRefused(dir_ + "none", dir_ + "none", absl::StatusCode::kNotFound, {"none", "No such file"});
}

TEST_F(DatasetTest, RefusesTruncatedFiles) {
  const std::string whole = Images(5, 2, 3);
  const std::string labels = Plain("l", Labels(5));
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    ExpectRefused(Plain("cut", whole.substr(0, cut)), labels, absl::StatusCode::kDataLoss, {"cut", "truncated"});
  }
  ExpectRefused(Plain("i", whole), Plain("cut", Labels(5).substr(0, 12)), absl::StatusCode::kDataLoss,
                {"cut", "truncated"});
}

TEST_F(DatasetTest, RefusesATruncatedOrDamagedGzipStream) {
  const std::string labels = Plain("l", Labels(500));
  const std::string path = Gzip("i.gz", Images(500, 8, 8));
  ASSERT_TRUE(LoadIdx(path, labels).ok());
  const auto size = std::filesystem::file_size(path);
  for (auto cut : {size - 1, size - 8, size / 2}) {
    std::filesystem::resize_file(Gzip("i.gz", Images(500, 8, 8)), cut);
    ExpectRefused(path, labels, absl::StatusCode::kDataLoss, {"i.gz", "truncated"});
  }
  Gzip("i.gz", Images(500, 8, 8));
  {
    std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(static_cast<std::streamoff>(size) - 8);  // The CRC of the content.
    f.write("\0\0\0\0", 4);
  }
  ExpectRefused(path, labels, absl::StatusCode::kDataLoss, {"i.gz", "damaged"});
}

TEST_F(DatasetTest, RefusesWhatDoesNotBelongTogether) {
  const std::string images = Plain("i", Images(5, 2, 3));
  ExpectRefused(images, Plain("l", Labels(4)), absl::StatusCode::kInvalidArgument, {"5 images", "4 labels"});
  ExpectRefused(images, images, absl::StatusCode::kInvalidArgument, {"labels", "0x00000803"});
  ExpectRefused(Plain("l", Labels(5)), images, absl::StatusCode::kInvalidArgument, {"images", "0x00000801"});
  ExpectRefused(Plain("i", Images(5, 2, 3) + "x"), Plain("l", Labels(5)), absl::StatusCode::kDataLoss, {"longer"});
}

TEST_F(DatasetTest, RefusesImpossibleHeadersWithoutAllocatingForThem) {
  const std::string labels = Plain("l", Labels(5));
  ExpectRefused(Plain("i", Images(0, 2, 3)), labels, absl::StatusCode::kInvalidArgument, {"0 images"});
  ExpectRefused(Plain("i", Big(0x803) + Big(5) + Big(0xffffffff) + Big(2)), labels, absl::StatusCode::kInvalidArgument,
                {"4294967295"});
  ExpectRefused(Plain("i", Big(0x803) + Big(0xffffffff) + Big(28) + Big(28)), labels,
                absl::StatusCode::kInvalidArgument, {"above the limit"});
  ExpectRefused(Plain("i", Big(0x803) + Big(5000000) + Big(28) + Big(28)), labels, absl::StatusCode::kDataLoss,
                {"truncated"});
}

TEST_F(DatasetTest, ChecksThatBothPartsFit) {
  Gzip("train-images-idx3-ubyte.gz", Images(6, 2, 3));
  Gzip("train-labels-idx1-ubyte.gz", Labels(6));
  Gzip("t10k-images-idx3-ubyte.gz", Images(2, 2, 3));
  Gzip("t10k-labels-idx1-ubyte.gz", Labels(2));
  auto data = LoadImageData(dir_);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train.size(), 6u);
  EXPECT_EQ(data->test.size(), 2u);
  EXPECT_EQ(data->test.classes, 3u);  // As the training set, though it has two labels only.
  Gzip("t10k-images-idx3-ubyte.gz", Images(2, 3, 2));
  EXPECT_EQ(LoadImageData(dir_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PixelsTest, MeanAndDeviationAreThoseOfTheTrainingPixels) {
  ImageData data;
  data.train.pixels = {0, 0, 10, 10};
  data.test.pixels = {255};
  MeasurePixels(&data);
  EXPECT_EQ(data.pixel_mean, 5);
  EXPECT_EQ(data.pixel_deviation, 5);
  data.train.pixels = {7, 7};
  MeasurePixels(&data);
  EXPECT_EQ(data.pixel_deviation, 1);
}

// How often each sample occurs in what `size` trajectories take in one round.
void Take(SampleStream& stream, uint64_t& position, int size, uint64_t block, std::vector<int>& seen) {
  for (int rank = 0; rank < size; ++rank) {
    for (uint32_t i : stream.Slice(position + rank * block, block)) ++seen.at(i);
  }
  position += size * block;
}

TEST(SampleStreamTest, CoversEverySampleOncePerPassWhoeverJoinsOrLeaves) {
  SampleStream stream(7, 1000);
  std::vector<int> seen(1000);
  uint64_t position = 0;
  for (int size : {4, 4, 3, 8, 1}) Take(stream, position, size, 50, seen);
  ASSERT_EQ(position, 1000u);
  EXPECT_THAT(seen, Each(1));
  for (int size : {16, 4}) Take(stream, position, size, 50, seen);
  EXPECT_THAT(seen, Each(2));
}

TEST(SampleStreamTest, SlicesOfARoundAreDisjointAndOneWorkersSlicesAreNeighbours) {
  SampleStream stream(7, 1000);
  std::set<uint32_t> all;
  for (int rank = 0; rank < 8; ++rank) {
    for (uint32_t i : stream.Slice(rank * 100, 100)) all.insert(i);
  }
  EXPECT_THAT(all, SizeIs(800));
  std::vector<uint32_t> two = stream.Slice(200, 100);
  const std::vector<uint32_t> second = stream.Slice(300, 100);
  two.insert(two.end(), second.begin(), second.end());
  EXPECT_EQ(two, stream.Slice(200, 200));
}

TEST(SampleStreamTest, IsTheSameForEveryWorkerAndOtherForAnotherSeedOrPass) {
  SampleStream a(7, 100), b(7, 100), c(8, 100);
  b.Slice(100'000, 10);  // What was asked before has no influence.
  EXPECT_EQ(a.Slice(30, 100), b.Slice(30, 100));
  EXPECT_NE(a.Slice(0, 100), c.Slice(0, 100));
  EXPECT_NE(a.Slice(0, 100), a.Slice(100, 100));
  // Pinned: another build or machine must draw the same order.
  EXPECT_EQ(a.Slice(0, 5), (std::vector<uint32_t>{19, 74, 21, 59, 41}));
}

TEST(SampleStreamTest, ASliceMaySpanManyPassesOfATinyDataSet) {
  SampleStream stream(1, 3);
  std::vector<int> seen(3);
  for (uint32_t i : stream.Slice(3, 300)) ++seen.at(i);
  EXPECT_THAT(seen, Each(100));
}

}  // namespace
}  // namespace bmuf::worker
