// Other ways out of an accumulator than everything above a threshold. What is selected goes to the
// workspace's parts, as with a pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "passes.h"
#include "workspace.h"

namespace hvds {

// Where an index belongs.
struct BucketHash {
  uint64_t seed, buckets;

  uint64_t operator()(int32_t index) const {
    return Scaled(Mixed(static_cast<uint32_t>(index), seed), buckets);
  }
};

// Adds the gradients; of what reaches the key, each bucket takes the `slots_per_bucket` largest
// magnitudes, of equal ones the lower indices, and the rest stays. Non-finite sums need no slot.
void HashSelect(Workspace& workspace, const Accumulation& accumulation, uint32_t key,
                const BucketHash& hash, uint32_t slots_per_bucket, int threads);

// Adds the gradients; of every `group_numel` consecutive elements, the min(k, nonzeros) largest
// magnitudes go out, ties to the lower index.
void GroupTopk(Workspace& workspace, const Accumulation& accumulation, size_t k, size_t group_numel,
               int threads);

}  // namespace hvds
