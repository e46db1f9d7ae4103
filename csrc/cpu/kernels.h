// The inner loops that differ by instruction set, and the table that picks among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bits.h"

namespace hvds {

// Entries that became non-finite, with what the residual held before.
struct SpoiledList {
  std::vector<int32_t> indices;
  std::vector<float> before;

  void Add(int32_t index, float value) {
    indices.push_back(index);
    before.push_back(value);
  }
  // Puts back what was there before, or 0 where that was not finite itself: after every operation
  // the residual is finite.
  void Restore(float* residual) const {
    for (size_t i = 0; i < indices.size(); ++i) {
      residual[indices[i]] = KeyOf(before[i]) < kNonFiniteKey ? before[i] : 0.0f;
    }
  }
};

// residual[i] += gradient[i] for i in [0, n); whatever reaches `key` goes, in ascending order, to
// `indices` (as first_index + i) and `values`. A `take` pass leaves zero where an entry went out, a
// `scan` pass leaves the sum.
//
// Preconditions: 1 <= key; room for n entries, of which only those that are emitted get written; no
// alignment beyond the element's. `gradient` is of the dtype that the table names, and unused for
// kNoGradient, where a scan writes nothing to `residual`. Non-finite sums are noted in `spoiled` if
// it is not null, provided that key <= kNonFiniteKey. Returns the number of entries.
using PassFn = size_t (*)(float* residual, const void* gradient, size_t n, int32_t first_index,
                          uint32_t key, int32_t* indices, float* values, SpoiledList* spoiled);

// Copies the entries at or above, or else below, `key` >= 1, in order; in place is allowed. Room
// for n entries. Returns their number.
using FilterFn = size_t (*)(const int32_t* indices, const float* values, size_t n, uint32_t key,
                            int32_t* out_indices, float* out_values);

struct Kernels {
  PassFn take[kDtypes];
  PassFn scan[kDtypes];

  FilterFn at_least;
  FilterFn below;

  // Copies `bytes`, a multiple of 64, past the caches. Both ends are aligned to 64 bytes.
  void (*stream_out)(void* to, const void* from, size_t bytes);
  // Orders streamed stores before whatever follows.
  void (*stream_fence)();

  // Nearest-even narrowing, for kFloat16 and kBFloat16; the other entries are null.
  void (*narrow[kDtypes])(const float* from, size_t n, uint16_t* to);
};

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
#define HVDS_X86 1
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The best instruction set that the processor has, capped by HVD_SPARSE_ISA if that is set.
Isa ActiveIsa();
bool SetIsa(int32_t isa);  // false: the processor lacks it
const Kernels& ActiveKernels();

}  // namespace hvds
