// What the ranks of one host do in memory that they share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace hvds {

// out[i] = ((v0[i] + v1[i]) + v2[i]) + …, in float32, of `count` >= 1 vectors of one type.
void SumVectors(float* out, size_t n, const void* const* vectors, size_t count, Dtype dtype,
                int threads);

}  // namespace hvds
