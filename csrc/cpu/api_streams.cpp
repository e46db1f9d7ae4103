// The C interface to streams, and their way back to a dense vector.
#include <vector>

#include "api.h"
#include "streams.h"

using hvds::BadArgument;
using hvds::Guarded;
using hvds::Stream;
using hvds::ThreadWorkspace;
using hvds::Workspace;

// `streams`: `stream_count` triples (indices' address, values' address, nnz). The output has room
// for the sum of the nnz.
HVDS_API int32_t hvds_merge_sum(const int64_t* streams, int64_t stream_count, int64_t numel,
                                int32_t threads, int32_t* indices, float* values, int64_t* nnz) {
  return Guarded([&] {
    std::vector<Stream> list;
    for (int64_t s = 0; s < stream_count; ++s) {
      list.push_back({reinterpret_cast<const int32_t*>(streams[3 * s]),
                      reinterpret_cast<const float*>(streams[3 * s + 1]),
                      static_cast<size_t>(streams[3 * s + 2])});
    }
    Workspace& workspace = ThreadWorkspace();
    *nnz = static_cast<int64_t>(hvds::MergeSum(
        workspace, list.data(), list.size(), static_cast<size_t>(numel), threads, indices, values));
    workspace.Trim();
  });
}

// The output has room for `nnz_in`.
HVDS_API int32_t hvds_difference(const int32_t* indices, const float* values, int64_t nnz_in,
                                 const int32_t* other, int64_t other_count, int32_t* out_indices,
                                 float* out_values, int64_t* nnz) {
  return Guarded([&] {
    *nnz = static_cast<int64_t>(hvds::Difference({indices, values, static_cast<size_t>(nnz_in)},
                                                 other, static_cast<size_t>(other_count),
                                                 out_indices, out_values));
  });
}

// The output has room for `nnz_in`.
HVDS_API int32_t hvds_threshold_stream(const int32_t* indices, const float* values, int64_t nnz_in,
                                       uint32_t key, int32_t* out_indices, float* out_values,
                                       int64_t* nnz) {
  return Guarded([&] {
    *nnz = static_cast<int64_t>(hvds::ActiveKernels().at_least(
        indices, values, static_cast<size_t>(nnz_in), key, out_indices, out_values));
  });
}

HVDS_API int32_t hvds_scatter_add(float* x, int64_t n, const int32_t* indices, const float* values,
                                  int64_t nnz, int32_t threads) {
  return Guarded([&] {
    hvds::ScatterAdd(x, static_cast<size_t>(n), {indices, values, static_cast<size_t>(nnz)},
                     threads);
  });
}

HVDS_API int32_t hvds_decode(void* out, int32_t dtype, int64_t n, const int32_t* indices,
                             const float* values, int64_t nnz, int32_t threads) {
  return Guarded([&] {
    if (dtype < hvds::kFloat32 || dtype > hvds::kBFloat16) throw BadArgument();
    hvds::Decode(out, static_cast<hvds::Dtype>(dtype), static_cast<size_t>(n),
                 {indices, values, static_cast<size_t>(nnz)}, threads);
  });
}

// What is at x[index] goes to `values`; 0 stays there. Indices unique.
HVDS_API int32_t hvds_take_at(float* x, int64_t n, const int32_t* indices, int64_t nnz,
                              int32_t threads, float* values) {
  return Guarded([&] {
    hvds::TakeAt(x, static_cast<size_t>(n), indices, static_cast<size_t>(nnz), threads, values);
  });
}
