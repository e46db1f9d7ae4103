// The inner loops that differ by instruction set, and the table that picks among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bits.h"

namespace hvds {

constexpr size_t kLineBytes = 64;

// From so many on, what a call writes for later is streamed; less is found in a cache.
constexpr size_t kStreamedBytes = size_t{4} << 20;

// How gradients enter an accumulator: r += g, or through a momentum u with factor m (DGC):
// u = m * u + g; r = r + u, and in Nesterov's form u = m * (u + g); r = (r + u) + g.
enum Rule : int32_t { kPlain = 0, kMomentum = 1, kNesterov = 2, kRules = 3 };

// `n` consecutive elements of an accumulator, from flat position `first_index` on.
//
// What was before is read from `before` and `buffer_before`; sums go to `residual` and `buffer`.
// The two are the same where a pass works in place, as it always does with kNoGradient.
struct Span {
  float* residual;
  const float* before;
  float* buffer;               // u, unused for kPlain
  const float* buffer_before;  // unused for kPlain
  float factor;                // m, unused for kPlain
  const void* gradient;        // of the dtype that a table names, unused for kNoGradient
  size_t n;
  int32_t first_index;
  bool streamed;  // whole lines go past the caches; residual and buffer are aligned alike
};

// Entries that became non-finite, with what the accumulator held before.
struct SpoiledList {
  std::vector<int32_t> indices;
  std::vector<float> residual_before;
  std::vector<float> buffer_before;

  void Add(int32_t index, float residual, float buffer) {
    indices.push_back(index);
    residual_before.push_back(residual);
    buffer_before.push_back(buffer);
  }
  // Puts back what was there before, or 0 where that was not finite itself: after every operation
  // the residual is finite. `buffer` may be null.
  void Restore(float* residual, float* buffer) const {
    const auto finite = [](float x) { return KeyOf(x) < kNonFiniteKey ? x : 0.0f; };
    for (size_t i = 0; i < indices.size(); ++i) {
      residual[indices[i]] = finite(residual_before[i]);
      if (buffer != nullptr) buffer[indices[i]] = finite(buffer_before[i]);
    }
  }
};

// Adds the gradient to the residual; whatever sum reaches `key` goes, in ascending order, to
// `indices` and `values`. A `take` pass leaves zero where an entry went out; a `read` pass, which
// has no gradient, writes nothing to the residual.
//
// Preconditions: 1 <= key; room for n entries, of which only those that are emitted get written; no
// alignment beyond the element's. kNoGradient goes with kPlain alone. Non-finite sums are noted in
// `spoiled` if it is not null, provided that key <= kNonFiniteKey. Returns the number of entries.
using PassFn = size_t (*)(const Span& span, uint32_t key, int32_t* indices, float* values,
                          SpoiledList* spoiled);

// Writes to `sums` what a pass would make of the residual, and changes nothing else.
using SumFn = void (*)(const Span& span, float* sums);

// Copies the entries at or above, or else below, `key` >= 1, in order; in place is allowed. Room
// for n entries. Returns their number.
using FilterFn = size_t (*)(const int32_t* indices, const float* values, size_t n, uint32_t key,
                            int32_t* out_indices, float* out_values);

struct Kernels {
  PassFn take[kRules][kDtypes];
  PassFn read;
  SumFn sum[kRules][kDtypes];

  FilterFn at_least;
  FilterFn below;

  // A key >= 1 that at least k of the sums reach and, for small k, not many more; 1 if fewer than k
  // are above 0.
  uint32_t (*pivot)(const float* sums, size_t n, size_t k);

  // Copies `bytes`, a multiple of kLineBytes, past the caches. Both ends are aligned to that.
  void (*stream_out)(void* to, const void* from, size_t bytes);
  // Orders streamed stores before whatever follows.
  void (*stream_fence)();

  // Nearest-even narrowing, for kFloat16 and kBFloat16; the other entries are null.
  void (*narrow[kDtypes])(const float* from, size_t n, uint16_t* to);
};

// A table by rule and dtype of what macro `F` makes of them; kNoGradient goes with kPlain alone.
#define HVDS_BY_RULE_AND_DTYPE(F)                                                             \
  {                                                                                           \
    {F(kPlain, kFloat32), F(kPlain, kFloat16), F(kPlain, kBFloat16), F(kPlain, kNoGradient)}, \
        {F(kMomentum, kFloat32), F(kMomentum, kFloat16), F(kMomentum, kBFloat16), nullptr}, { \
      F(kNesterov, kFloat32), F(kNesterov, kFloat16), F(kNesterov, kBFloat16), nullptr        \
    }                                                                                         \
  }
#define HVDS_TAKE(rule, dtype) Pass<rule, dtype, true>
#define HVDS_SUMS(rule, dtype) Sums<rule, dtype>

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
