#include "worker/data/dataset.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status_macros.h"

namespace bmuf::worker {
namespace {

constexpr uint32_t kImagesMagic = 0x00000803;
constexpr uint32_t kLabelsMagic = 0x00000801;
// A header that asks for more is damaged: no data set of this format comes near it.
constexpr uint64_t kMaxBodyBytes = uint64_t{4} << 30;
constexpr size_t kReadBytes = size_t{1} << 20;

struct Close {
  void operator()(gzFile_s* file) const { gzclose(file); }
};

// One IDX file, plain or gzip. Confined to one thread.
class IdxFile {
 public:
  static absl::StatusOr<IdxFile> Open(const std::string& path) {
    IdxFile f;
    errno = 0;
    f.file_.reset(gzopen(path.c_str(), "rb"));
    if (f.file_ == nullptr) {
      return absl::NotFoundError(
          absl::StrCat(path, ": cannot open: ", errno != 0 ? std::strerror(errno) : "no memory"));
    }
    f.path_ = path;
    return f;
  }

  absl::StatusOr<uint32_t> ReadU32(const char* what) {
    uint8_t b[4];
    ASSIGN_OR_RETURN(const size_t got, ReadSome(b, sizeof(b)));
    if (got != sizeof(b)) return absl::DataLossError(absl::StrCat(path_, ": truncated before its ", what));
    return uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | b[3];
  }

  absl::Status ExpectMagic(uint32_t expected, const char* what) {
    ASSIGN_OR_RETURN(const uint32_t magic, ReadU32("magic number"));
    if (magic == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: no IDX file of %s: its magic number is 0x%08x, not 0x%08x", path_, what, magic, expected));
  }

  // Reads the rest of the file, which must be exactly `size_bytes` long.
  absl::StatusOr<std::vector<uint8_t>> ReadBody(uint64_t size_bytes) {
    if (size_bytes > kMaxBodyBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": its header asks for ", size_bytes, " bytes, above the limit of ", kMaxBodyBytes));
    }
    std::vector<uint8_t> body;
    while (body.size() < size_bytes) {
      // Grown as data arrives: a false header must not cost memory.
      const size_t at = body.size();
      body.resize(at + std::min<uint64_t>(kReadBytes, size_bytes - at));
      ASSIGN_OR_RETURN(const size_t got, ReadSome(body.data() + at, body.size() - at));
      if (at + got < body.size()) {
        return absl::DataLossError(
            absl::StrCat(path_, ": truncated: ", at + got, " bytes of data, its header says ", size_bytes));
      }
    }
    uint8_t extra = 0;
    ASSIGN_OR_RETURN(const size_t got, ReadSome(&extra, 1));  // Also makes zlib check the end of the stream.
    if (got != 0) {
      return absl::DataLossError(absl::StrCat(path_, ": longer than the ", size_bytes, " bytes its header says"));
    }
    return body;
  }

 private:
  // Up to `size` bytes; fewer only at the end of the file.
  absl::StatusOr<size_t> ReadSome(uint8_t* out, size_t size) {
    const int got = gzread(file_.get(), out, static_cast<unsigned>(size));
    int code = Z_OK;
    const char* text = gzerror(file_.get(), &code);
    if (got < 0 || (code != Z_OK && code != Z_STREAM_END)) {
      if (code == Z_BUF_ERROR) return absl::DataLossError(absl::StrCat(path_, ": truncated inside its gzip stream"));
      return absl::DataLossError(absl::StrCat(path_, ": damaged: ", text));
    }
    return static_cast<size_t>(got);
  }

  std::unique_ptr<gzFile_s, Close> file_;
  std::string path_;
};

// The existing one of `stem`.gz and `stem`.
absl::StatusOr<std::string> Find(const std::string& directory, const char* stem) {
  for (const char* suffix : {".gz", ""}) {
    const std::string path = absl::StrCat(directory, "/", stem, suffix);
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) return path;
  }
  return absl::NotFoundError(absl::StrCat(directory, "/", stem,
                                          "[.gz]: no such file. Install the Debian package "
                                          "dataset-fashion-mnist (apt-get install dataset-fashion-mnist), which puts "
                                          "it into ",
                                          kFashionMnistDirectory, ", or name another directory."));
}

}  // namespace

absl::StatusOr<Dataset> LoadIdx(const std::string& images_path, const std::string& labels_path) {
  Dataset data;
  ASSIGN_OR_RETURN(IdxFile images, IdxFile::Open(images_path));
  RETURN_IF_ERROR(images.ExpectMagic(kImagesMagic, "images"));
  ASSIGN_OR_RETURN(const uint32_t count, images.ReadU32("count"));
  ASSIGN_OR_RETURN(data.rows, images.ReadU32("rows"));
  ASSIGN_OR_RETURN(data.columns, images.ReadU32("columns"));
  if (count == 0 || data.rows == 0 || data.columns == 0 || data.rows > 4096 || data.columns > 4096) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: holds %u images of %u x %u; need at least one image with "
                        "sides of 1 to 4096",
                        images_path, count, data.rows, data.columns));
  }
  ASSIGN_OR_RETURN(data.pixels, images.ReadBody(uint64_t{count} * data.image_size()));

  ASSIGN_OR_RETURN(IdxFile labels, IdxFile::Open(labels_path));
  RETURN_IF_ERROR(labels.ExpectMagic(kLabelsMagic, "labels"));
  ASSIGN_OR_RETURN(const uint32_t label_count, labels.ReadU32("count"));
  if (label_count != count) {
    return absl::InvalidArgumentError(absl::StrCat(images_path, " holds ", count, " images, but ", labels_path,
                                                   " holds ", label_count, " labels: they do not belong together"));
  }
  ASSIGN_OR_RETURN(data.labels, labels.ReadBody(label_count));
  data.classes = uint32_t{*std::max_element(data.labels.begin(), data.labels.end())} + 1;
  return data;
}

void MeasurePixels(ImageData* data) {
  uint64_t sum = 0, squares = 0;  // Exact: 2^32 pixels of 2^16 fit.
  for (const uint64_t p : data->train.pixels) {
    sum += p;
    squares += p * p;
  }
  const auto count = static_cast<double>(std::max<size_t>(data->train.pixels.size(), 1));
  data->pixel_mean = static_cast<double>(sum) / count;
  const double variance = static_cast<double>(squares) / count - data->pixel_mean * data->pixel_mean;
  data->pixel_deviation = variance > 0 ? std::sqrt(variance) : 1;
}

absl::StatusOr<ImageData> LoadImageData(const std::string& directory) {
  ImageData data;
  for (auto [part, prefix] : {std::pair(&data.train, "train"), std::pair(&data.test, "t10k")}) {
    ASSIGN_OR_RETURN(const std::string images, Find(directory, absl::StrCat(prefix, "-images-idx3-ubyte").c_str()));
    ASSIGN_OR_RETURN(const std::string labels, Find(directory, absl::StrCat(prefix, "-labels-idx1-ubyte").c_str()));
    ASSIGN_OR_RETURN(*part, LoadIdx(images, labels));
  }
  if (data.train.rows != data.test.rows || data.train.columns != data.test.columns) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: training images are %u x %u, test images %u x %u: they do not belong together", directory,
                        data.train.rows, data.train.columns, data.test.rows, data.test.columns));
  }
  if (data.test.classes > data.train.classes) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: the test set has %u classes, the training set only %u",
                                                      directory, data.test.classes, data.train.classes));
  }
  data.test.classes = data.train.classes;
  MeasurePixels(&data);
  return data;
}

}  // namespace bmuf::worker
