// Plain C++: what runs where no vector variant does, and what the others are tested against.
#include <cstring>

#include "kernels.h"

namespace hvds {
namespace {

template <Dtype kDtype>
float Gradient(const void* gradient, size_t i) {
  if constexpr (kDtype == kFloat32) return static_cast<const float*>(gradient)[i];
  if constexpr (kDtype == kFloat16) return WidenFloat16(static_cast<const uint16_t*>(gradient)[i]);
  if constexpr (kDtype == kBFloat16) {
    return WidenBFloat16(static_cast<const uint16_t*>(gradient)[i]);
  }
}

// Blocks of kBlock elements: a straight loop that the compiler can vectorise adds and notes whether
// anything reaches the key; only then is the block looked at element by element.
template <Dtype kDtype, bool kTake>
size_t Pass(float* residual, const void* gradient, size_t n, int32_t first_index, uint32_t key,
            int32_t* indices, float* values, SpoiledList* spoiled) {
  constexpr size_t kBlock = 32;
  size_t count = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t length = n - begin < kBlock ? n - begin : kBlock;
    float* const r = residual + begin;
    float sums[kBlock];
    uint32_t hit = 0;
    for (size_t i = 0; i < length; ++i) {
      if constexpr (kDtype == kNoGradient) {
        sums[i] = r[i];
      } else {
        sums[i] = r[i] + Gradient<kDtype>(gradient, begin + i);
      }
      hit |= KeyOf(sums[i]) >= key;
    }
    if (hit) {
      for (size_t i = 0; i < length; ++i) {
        if (KeyOf(sums[i]) < key) continue;
        const int32_t index = first_index + static_cast<int32_t>(begin + i);
        if (KeyOf(sums[i]) >= kNonFiniteKey && spoiled != nullptr) spoiled->Add(index, r[i]);
        indices[count] = index;
        values[count++] = sums[i];
        if (kTake) sums[i] = 0.0f;
      }
    }
    if (kDtype != kNoGradient || (kTake && hit)) std::memcpy(r, sums, length * sizeof(float));
  }
  return count;
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

void StreamOut(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

void StreamFence() {}

template <uint16_t (*kNarrow)(float)>
void Narrow(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = kNarrow(from[i]);
}

}  // namespace

const Kernels kPortableKernels = {
    {Pass<kFloat32, true>, Pass<kFloat16, true>, Pass<kBFloat16, true>, Pass<kNoGradient, true>},
    {Pass<kFloat32, false>, Pass<kFloat16, false>, Pass<kBFloat16, false>,
     Pass<kNoGradient, false>},
    Filter<true>,
    Filter<false>,
    StreamOut,
    StreamFence,
    {nullptr, Narrow<NarrowFloat16>, Narrow<NarrowBFloat16>, nullptr},
};

}  // namespace hvds
