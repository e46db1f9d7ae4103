// Operations on sparse streams: int32 indices, strictly ascending, with float32 values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "workspace.h"

namespace hvds {

struct Stream {
  const int32_t* indices;
  const float* values;
  size_t nnz;
};

// Thrown where a stream's indices leave [0, n) or are found out of order.
struct BadIndex {};

// Throws BadIndex unless the first and the last index lie in [0, n) and a search for n ends behind
// the last: then searches for ascending bounds cut the stream into pieces that leave nothing out,
// even where it is out of order.
void CheckEnds(const Stream& stream, size_t n);

// The position of the first index that is not below `bound`.
size_t LowerBound(const Stream& stream, int64_t bound);

// Sums `count` streams over [0, numel); at one index, values are added in the order of the streams,
// starting from the first that has it. Room for the sum of the nnz. Returns the number of entries.
size_t MergeSum(Workspace& workspace, const Stream* streams, size_t count, size_t numel,
                int threads, int32_t* indices, float* values);

// The entries of `stream` whose index is not among `other`, in order. Room for stream.nnz.
size_t Difference(const Stream& stream, const int32_t* other, size_t other_count, int32_t* indices,
                  float* values);

// x[index] += value; indices unique.
void ScatterAdd(float* x, size_t n, const Stream& stream, int threads);

// values = x[indices], and x[indices] = 0; indices unique.
void TakeAt(float* x, size_t n, const int32_t* indices, size_t nnz, int threads, float* values);

// out = 0 but for out[index] = value, narrowed to `dtype`.
void Decode(void* out, Dtype dtype, size_t n, const Stream& stream, int threads);

}  // namespace hvds
