// One element of an accumulator, in plain C++: what the vector kernels do to many.
#pragma once

#include "kernels.h"

namespace hvds {

template <Dtype kDtype>
inline float GradientAt(const void* gradient, size_t i) {
  if constexpr (kDtype == kFloat32) return static_cast<const float*>(gradient)[i];
  if constexpr (kDtype == kFloat16) return WidenFloat16(static_cast<const uint16_t*>(gradient)[i]);
  if constexpr (kDtype == kBFloat16) {
    return WidenBFloat16(static_cast<const uint16_t*>(gradient)[i]);
  }
  return 0.0f;
}

// Element `i` of a span, before and after the gradient has come in; the buffers are 0 for kPlain.
template <Rule kRule, Dtype kDtype>
struct Element {
  float before, sum;
  float buffer_before = 0.0f, buffer = 0.0f;

  Element(const Span& span, size_t i) : before(span.before[i]), sum(before) {
    if constexpr (kDtype != kNoGradient) {
      const float g = GradientAt<kDtype>(span.gradient, i);
      if constexpr (kRule == kPlain) {
        sum = before + g;
      } else {
        buffer_before = span.buffer_before[i];
        if constexpr (kRule == kMomentum) {
          buffer = span.factor * buffer_before + g;
          sum = before + buffer;
        } else {
          buffer = span.factor * (buffer_before + g);
          sum = before + buffer + g;
        }
      }
    }
  }
};

}  // namespace hvds
