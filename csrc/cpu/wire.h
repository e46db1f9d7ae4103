// What goes over the wire: indices as bit-packed gaps, values as a few bits each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvds {

// Gap coding. The gaps of ascending indices, first - start and then each less its predecessor less
// one, are packed in blocks of kGapBlock, each with the width of its largest gap. The code is the
// blocks' widths, a byte each, then the blocks' bits from the lowest up, each from a new byte on.
constexpr size_t kGapBlock = 128;

// Returns the code's bytes, at most one per block and four per index. Indices strictly ascending
// from `start` on, or BadIndex is thrown.
size_t GapEncode(const int32_t* indices, size_t nnz, int32_t start, uint8_t* code);

// Reads `nnz` indices; throws BadIndex unless they lie in [start, stop) and fill `bytes` exactly.
void GapDecode(const uint8_t* code, size_t bytes, size_t nnz, int32_t start, int32_t stop,
               int32_t* indices);

// QSGD (Alistarh et al., NIPS 2017), with the largest magnitude of a bucket as its scale, and
// L = 2^(bits-1) - 1 levels on either side of zero. x becomes the level |x| / scale * L, rounded up
// with the probability of its fraction, and its sign; codes are level + L, packed from a byte's low
// bits up. A bucket with a non-finite value has scale NaN; one whose L / scale would be infinite,
// scale 0.
//
// Random bits come from a hash of (seed, position), so every implementation draws the same.
struct QsgdForm {
  int bits;             // 2, 4 or 8
  size_t bucket_numel;  // a multiple of 8
};

void QsgdQuantize(const float* x, size_t n, const QsgdForm& form, uint64_t seed, int threads,
                  uint8_t* codes, float* scales);
void QsgdDequantize(const uint8_t* codes, const float* scales, size_t n, const QsgdForm& form,
                    int threads, float* x);

}  // namespace hvds
