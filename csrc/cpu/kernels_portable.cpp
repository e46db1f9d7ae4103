// Plain C++: what runs where no vector variant does, and what the others are tested against.
#include <cstring>

#include "element.h"
#include "kernels.h"
#include "pivot_loop.h"

namespace hvds {
namespace {

// Blocks of kBlock elements: a straight loop that the compiler can vectorise adds and notes whether
// anything reaches the key; only then is the block looked at element by element.
template <Rule kRule, Dtype kDtype, bool kTake>
size_t Pass(const Span& span, uint32_t key, int32_t* indices, float* values, SpoiledList* spoiled) {
  constexpr size_t kBlock = 32;
  size_t count = 0;
  for (size_t begin = 0; begin < span.n; begin += kBlock) {
    const size_t length = span.n - begin < kBlock ? span.n - begin : kBlock;
    float* const r = span.residual + begin;
    float sums[kBlock], buffer[kBlock];
    uint32_t hit = 0;
    for (size_t i = 0; i < length; ++i) {
      const Element<kRule, kDtype> element(span, begin + i);
      sums[i] = element.sum;
      buffer[i] = element.buffer;
      hit |= KeyOf(sums[i]) >= key;
    }
    if (hit) {
      for (size_t i = 0; i < length; ++i) {
        if (KeyOf(sums[i]) < key) continue;
        const int32_t index = span.first_index + static_cast<int32_t>(begin + i);
        if (KeyOf(sums[i]) >= kNonFiniteKey && spoiled != nullptr) {
          spoiled->Add(index, span.before[begin + i],
                       kRule == kPlain ? 0.0f : span.buffer_before[begin + i]);
        }
        indices[count] = index;
        values[count++] = sums[i];
        if (kTake) sums[i] = 0.0f;
      }
    }
    if (kDtype != kNoGradient || (kTake && hit)) std::memcpy(r, sums, length * sizeof(float));
    if (kRule != kPlain) std::memcpy(span.buffer + begin, buffer, length * sizeof(float));
  }
  return count;
}

template <Rule kRule, Dtype kDtype>
void Sums(const Span& span, float* sums) {
  for (size_t i = 0; i < span.n; ++i) sums[i] = Element<kRule, kDtype>(span, i).sum;
}

template <bool kAtLeast>
size_t Filter(const int32_t* indices, const float* values, size_t n, uint32_t key,
              int32_t* out_indices, float* out_values) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if ((KeyOf(values[i]) >= key) != kAtLeast) continue;
    out_indices[count] = indices[i];
    out_values[count++] = values[i];
  }
  return count;
}

uint32_t Pivot(const float* sums, size_t n, size_t k) { return PivotLoop(sums, n, k); }

void StreamOut(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

void StreamFence() {}

template <uint16_t (*kNarrow)(float)>
void Narrow(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = kNarrow(from[i]);
}

}  // namespace

const Kernels kPortableKernels = {
    HVDS_BY_RULE_AND_DTYPE(HVDS_TAKE),
    Pass<kPlain, kNoGradient, false>,
    HVDS_BY_RULE_AND_DTYPE(HVDS_SUMS),
    Filter<true>,
    Filter<false>,
    Pivot,
    StreamOut,
    StreamFence,
    {nullptr, Narrow<NarrowFloat16>, Narrow<NarrowBFloat16>, nullptr},
};

}  // namespace hvds
