// Passes over a residual and the gradients that lie side by side over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "workspace.h"

namespace hvds {

struct Segment {
  const void* data;  // null for kNoGradient
  size_t begin;      // of its first element in the flat vector
  size_t numel;
  Dtype dtype;
};

// The segments in order, without the empty ones; together they cover [0, numel).
struct Gradients {
  std::vector<Segment> segments;
  size_t numel = 0;

  // A vector to which nothing is added.
  static Gradients None(size_t numel) {
    return Gradients{{{nullptr, 0, numel, kNoGradient}}, numel};
  }
  // The segment that holds flat position `at` < numel.
  size_t Find(size_t at) const;
};

// What a pass looks for. A task that has found more than `limit` entries goes on with `raised_key`.
struct Search {
  uint32_t key;
  size_t limit = SIZE_MAX;
  uint32_t raised_key = 0;
};

enum class Mode {
  kTake,  // adds the gradients, and leaves zero where an entry went out
  kScan,  // adds the gradients
  kRead,  // like kScan, and non-finite values are not news
};

// residual += gradients; what reaches the key goes to the workspace's parts: ascending within a
// part, and from part to part.
void Accumulate(Workspace& workspace, float* residual, const Gradients& gradients,
                const Search& search, Mode mode, int threads);

// Copies the parts' entries, one after the other, to the output.
void CopyOut(const Workspace& workspace, int32_t* indices, float* values, int threads);

// A key with probably at least k entries at or above it and not many more, from a sample of
// residual + gradients; 1 if everything that is not zero has to be looked at.
uint32_t EstimatePivot(Workspace& workspace, const float* residual, const Gradients& gradients,
                       size_t k, int threads);

// The k-th largest key of x, by counting; 1 <= k <= n.
uint32_t ExactKey(const float* x, size_t n, size_t k, int threads);

// How many tasks a pass over `n` elements is cut into.
int TaskCount(size_t n, int threads);

}  // namespace hvds
