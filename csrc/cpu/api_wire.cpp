// The C interface to what goes over the wire.
#include "api.h"
#include "wire.h"

using hvds::BadArgument;
using hvds::Guarded;

namespace {

hvds::QsgdForm FormOf(int32_t bits, int64_t bucket_numel) {
  if ((bits != 2 && bits != 4 && bits != 8) || (bucket_numel != 512 && bucket_numel != 1024)) {
    throw BadArgument();
  }
  return {bits, static_cast<size_t>(bucket_numel)};
}

}  // namespace

// `code` has room for a byte per kGapBlock indices, and four per index.
HVDS_API int32_t hvds_gap_encode(const int32_t* indices, int64_t nnz, int32_t start, uint8_t* code,
                                 int64_t* bytes) {
  return Guarded([&] {
    *bytes = static_cast<int64_t>(hvds::GapEncode(indices, static_cast<size_t>(nnz), start, code));
  });
}

HVDS_API int32_t hvds_gap_decode(const uint8_t* code, int64_t bytes, int64_t nnz, int32_t start,
                                 int32_t stop, int32_t* indices) {
  return Guarded([&] {
    hvds::GapDecode(code, static_cast<size_t>(bytes), static_cast<size_t>(nnz), start, stop,
                    indices);
  });
}

// `codes` has room for `bits` bits per element, `scales` for one float per bucket.
HVDS_API int32_t hvds_qsgd_quantize(const float* x, int64_t n, int32_t bits, int64_t bucket_numel,
                                    uint64_t seed, int32_t threads, uint8_t* codes, float* scales) {
  return Guarded([&] {
    hvds::QsgdQuantize(x, static_cast<size_t>(n), FormOf(bits, bucket_numel), seed, threads, codes,
                       scales);
  });
}

HVDS_API int32_t hvds_qsgd_dequantize(const uint8_t* codes, const float* scales, int64_t n,
                                      int32_t bits, int64_t bucket_numel, int32_t threads,
                                      float* x) {
  return Guarded([&] {
    hvds::QsgdDequantize(codes, scales, static_cast<size_t>(n), FormOf(bits, bucket_numel), threads,
                         x);
  });
}
