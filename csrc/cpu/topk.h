// Exact selection of the largest magnitudes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "passes.h"
#include "workspace.h"

namespace hvds {

// Adds the gradients; moves the min(k, nonzeros) largest magnitudes to the output, ties to the
// lower index, ascending by index. Returns the number of entries; `kth_key` is the k-th largest
// key, 0 with fewer than k nonzeros and infinity's for k = 0.
size_t AccumulateTopk(Workspace& workspace, const Accumulation& accumulation, size_t k, int threads,
                      int32_t* indices, float* values, uint32_t* kth_key);

}  // namespace hvds
