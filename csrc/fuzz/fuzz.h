// What the fuzz targets share: the C interface, inputs cut into arguments, and checks.
//
// A target is one file with LLVMFuzzerTestOneInput. It makes arguments of any bytes, keeps to what
// api.h asks of a caller (types and lengths), and gives every array a block of the heap that ends
// where the array ends, so that AddressSanitizer sees the first byte beyond it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../cpu/api.h"

extern "C" {
int32_t hvds_set_isa(int32_t isa);
int32_t hvds_gap_encode(const int32_t* indices, int64_t nnz, int32_t start, uint8_t* code,
                        int64_t* bytes);
int32_t hvds_gap_decode(const uint8_t* code, int64_t bytes, int64_t nnz, int32_t start,
                        int32_t stop, int32_t* indices);
int32_t hvds_qsgd_quantize(const float* x, int64_t n, int32_t bits, int64_t bucket_numel,
                           uint64_t seed, int32_t threads, uint8_t* codes, float* scales);
int32_t hvds_qsgd_dequantize(const uint8_t* codes, const float* scales, int64_t n, int32_t bits,
                             int64_t bucket_numel, int32_t threads, float* x);
int32_t hvds_merge_sum(const int64_t* streams, int64_t stream_count, int64_t numel, int32_t threads,
                       int32_t* indices, float* values, int64_t* nnz);
int32_t hvds_difference(const int32_t* indices, const float* values, int64_t nnz_in,
                        const int32_t* other, int64_t other_count, int32_t* out_indices,
                        float* out_values, int64_t* nnz);
int32_t hvds_threshold_stream(const int32_t* indices, const float* values, int64_t nnz_in,
                              uint32_t key, int32_t* out_indices, float* out_values, int64_t* nnz);
int32_t hvds_scatter_add(float* x, int64_t n, const int32_t* indices, const float* values,
                         int64_t nnz, int32_t threads);
int32_t hvds_decode(void* out, int32_t dtype, int64_t n, const int32_t* indices,
                    const float* values, int64_t nnz, int32_t threads);
int32_t hvds_take_at(float* x, int64_t n, const int32_t* indices, int64_t nnz, int32_t threads,
                     float* values);
}

#define HVDS_EXPECT(condition)                                                      \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

namespace hvds::fuzz {

// Reads an input from its front; past its end there are zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}

  size_t left() const { return left_; }

  template <typename T>
  T Take() {
    T value{};
    const size_t bytes = std::min(sizeof value, left_);
    if (bytes > 0) std::memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }
  uint32_t Byte() { return Take<uint8_t>(); }

  // In [low, high].
  int64_t Within(int64_t low, int64_t high) {
    const auto span = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(Take<uint32_t>() % span);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// The first byte picks the instruction set; one that the processor lacks leaves the last.
inline void TakeIsa(Input& input) { hvds_set_isa(static_cast<int32_t>(input.Byte() % 3)); }

inline int32_t TakeThreads(Input& input) { return static_cast<int32_t>(1 + input.Byte() % 3); }

// Indices as a list of moves: anywhere, a little on, far on, or a run with a step.
inline std::vector<int32_t> TakeIndices(Input& input) {
  constexpr size_t kMost = size_t{1} << 16;
  std::vector<int32_t> indices;
  int64_t at = -1;
  for (uint32_t moves = input.Byte(); moves > 0 && indices.size() < kMost; --moves) {
    const uint32_t move = input.Byte();
    size_t length = 1;
    int64_t step = 1;
    if (move == 255) {
      at = input.Take<int32_t>() - step;
    } else if (move == 254) {
      step = 1 + input.Byte();
      length = input.Take<uint16_t>();
    } else if (move == 253) {
      step = input.Take<int32_t>() & INT32_MAX;
    } else {
      step = 1 + move;
    }
    for (; length > 0; --length) {
      at += step;
      if (at > INT32_MAX) at = INT32_MAX;  // out of order from here on
      indices.push_back(static_cast<int32_t>(at));
    }
  }
  return std::vector<int32_t>(indices.begin(), indices.end());  // without room to spare
}

// Values of every kind, drawn from a seed.
inline std::vector<float> Values(uint32_t seed, size_t count) {
  constexpr uint32_t kPatterns[] = {0,           0x80000000u, 1,           0x3f800000u,
                                    0xbf800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00001u};
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t kind = seed >> 28;
    value = FloatOf(kind < 8 ? kPatterns[kind] : (seed & 0x81ffffffu) + 0x3f000000u);
  }
  return values;
}

inline bool Ascends(const std::vector<int32_t>& indices, int64_t start, int64_t stop) {
  int64_t next = start;
  for (const int32_t index : indices) {
    if (index < next) return false;
    next = int64_t{index} + 1;
  }
  return next <= stop;
}

inline bool AllWithin(const std::vector<int32_t>& indices, int64_t numel) {
  return std::all_of(indices.begin(), indices.end(),
                     [&](int32_t index) { return index >= 0 && index < numel; });
}

// The same bits, or NaN both.
inline bool Same(float a, float b) { return BitsOf(a) == BitsOf(b) || (a != a && b != b); }

inline int64_t Size(size_t count) { return static_cast<int64_t>(count); }

}  // namespace hvds::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
