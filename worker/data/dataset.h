// Labelled images from IDX files, the format of MNIST and Fashion-MNIST.
//
// Problem: a truncated download or images with the labels of another file train a model on nonsense without a word.
// Idea: check everything the format lets one check before the first sample is used, and say which file is wrong and
// what to install. Usage: ASSIGN_OR_RETURN(ImageData data, LoadImageData("/usr/share/datasets/fashion-mnist"));
//
// The format (integers big-endian): images: u32 0x00000803, u32 count, u32 rows, u32 columns, then count*rows*columns
// bytes; labels: u32 0x00000801, u32 count, then count bytes. Files may be compressed with gzip.
#ifndef BMUF_WORKER_DATA_DATASET_H_
#define BMUF_WORKER_DATA_DATASET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace bmuf::worker {

inline constexpr char kFashionMnistDirectory[] = "/usr/share/datasets/fashion-mnist";

// Greyscale images of one size with one label each. Immutable after loading, hence safe to share between threads.
struct Dataset {
  uint32_t rows = 0;
  uint32_t columns = 0;
  uint32_t classes = 0;         // One more than the largest label.
  std::vector<uint8_t> pixels;  // size() * rows * columns, row-major, 0 = background.
  std::vector<uint8_t> labels;  // size(), each below `classes`.

  size_t size() const { return labels.size(); }
  size_t image_size() const { return size_t{rows} * columns; }
};

struct ImageData {
  Dataset train;
  Dataset test;
  // Of the training pixels, for standardising both parts.
  double pixel_mean = 0;
  double pixel_deviation = 1;
};

// Sets pixel_mean and pixel_deviation from `data->train`; a deviation of 0 (all pixels equal) becomes 1.
void MeasurePixels(ImageData* data);

// Reads one pair of files, each plain or gzip. Blocks on the disk. Statuses: NOT_FOUND (a file is missing or cannot
// be opened), DATA_LOSS (truncated, damaged or longer than its header says), INVALID_ARGUMENT (not this format, or
// images and labels that do not belong together). Every text names the file.
absl::StatusOr<Dataset> LoadIdx(const std::string& images_path, const std::string& labels_path);

// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz] below `directory` and checks that both parts have images of
// one size. Statuses as LoadIdx; NOT_FOUND says which Debian package brings the files.
absl::StatusOr<ImageData> LoadImageData(const std::string& directory);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_DATA_DATASET_H_
