// Passes over a residual and the gradients that lie side by side over it.
#pragma once

#include <algorithm>
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

// Walks over segments in ascending order.
class Cursor {
 public:
  explicit Cursor(const Gradients& gradients) : segments_(gradients.segments) {}

  // The segment that holds `at`, which must not be below that of the call before.
  const Segment& MoveTo(size_t at) {
    while (at >= segments_[s_].begin + segments_[s_].numel) ++s_;
    return segments_[s_];
  }

 private:
  const std::vector<Segment>& segments_;
  size_t s_ = 0;
};

// What is accumulated: gradients into a residual, directly or through a momentum. Where `before` is
// not null, the first pass reads from there (and from `buffer_before`), and writes everything to
// the residual and the buffer: what was before stays as it is.
struct Accumulation {
  float* residual;
  Gradients gradients;
  Rule rule = kPlain;
  float* buffer = nullptr;
  float factor = 0.0f;
  const float* before = nullptr;
  const float* buffer_before = nullptr;

  size_t numel() const { return gradients.numel; }

  // Whether sums go past the caches: nobody will find them there, and a line that is written whole
  // need not be read.
  bool streamed() const {
    const auto apart = reinterpret_cast<uintptr_t>(residual) ^
                       reinterpret_cast<uintptr_t>(buffer == nullptr ? residual : buffer);
    return before != nullptr && numel() * sizeof(float) >= kStreamedBytes &&
           apart % kLineBytes == 0;
  }

  // Calls use(span, dtype) for [begin, end) in order, in pieces of at most `most` elements and of
  // one segment.
  template <typename Use>
  void ForEachSpan(size_t begin, size_t end, size_t most, Use use) const {
    if (begin >= end) return;
    for (size_t s = gradients.Find(begin); begin < end; ++s) {
      const Segment& segment = gradients.segments[s];
      const size_t segment_end = std::min(end, segment.begin + segment.numel);
      for (size_t n; begin < segment_end; begin += n) {
        n = std::min(most, segment_end - begin);
        use(SpanOf(segment, begin, n), segment.dtype);
      }
    }
  }
  Span SpanOf(const Segment& segment, size_t begin, size_t n) const {
    const size_t item_bytes = segment.dtype == kFloat32 ? 4 : 2;
    const auto* data = static_cast<const char*>(segment.data);
    const float* const from = before == nullptr ? residual : before;
    const float* const buffer_from = before == nullptr ? buffer : buffer_before;
    return {residual + begin,
            from + begin,
            buffer == nullptr ? nullptr : buffer + begin,
            buffer == nullptr ? nullptr : buffer_from + begin,
            factor,
            data == nullptr ? nullptr : data + (begin - segment.begin) * item_bytes,
            n,
            static_cast<int32_t>(begin),
            streamed()};
  }
};

// What a pass looks for. Below `begin` and from `end` on, only non-finite sums are found. A task
// that has found more than `limit` entries goes on with `raised_key`.
struct Search {
  uint32_t key;
  size_t limit = SIZE_MAX;
  uint32_t raised_key = 0;
  size_t begin = 0;
  size_t end = SIZE_MAX;
};

enum class Mode {
  kTake,  // adds the gradients, and leaves zero where an entry went out
  kRead,  // changes nothing: there are no gradients, and non-finite values are not news
};

// Adds the gradients; what reaches the key goes to the workspace's parts: ascending within a part,
// and from part to part.
void Accumulate(Workspace& workspace, const Accumulation& accumulation, const Search& search,
                Mode mode, int threads);

// Puts back what the accumulator held where a sum came out non-finite.
void RestoreSpoiled(Workspace& workspace, const Accumulation& accumulation);

// Writes a part's entries, whose places are seldom in a cache, back to the residual.
void PutBack(const Part& part, float* residual);

// Copies the parts' entries, one after the other, to the output.
void CopyOut(const Workspace& workspace, int32_t* indices, float* values, int threads);

// The k-th largest key of x, by counting; 1 <= k <= n.
uint32_t ExactKey(const float* x, size_t n, size_t k, int threads);

// The kernels that sum a few elements best, by dtype: a vector register would reach into lines and
// pages that are not asked for.
inline const SumFn* ElementSums(Rule rule) { return kPortableKernels.sum[rule]; }

// How far ahead of its use a sampled place is prefetched: enough to hide a memory's latency.
constexpr size_t kSamplesAhead = 16;

// Prefetches a span, which may lie beyond its segment: nothing is read. Inlined always, since GCC
// takes a call that does nothing else for one without effect, and leaves it out.
inline __attribute__((always_inline)) void Prefetch(const Span& span) {
  constexpr size_t kLine = 16;  // elements
  for (size_t i = 0; i < span.n + kLine - 1; i += kLine) {
    const size_t at = std::min(i, span.n - 1);
    __builtin_prefetch(span.before + at);
    if (span.buffer_before != nullptr) __builtin_prefetch(span.buffer_before + at);
    if (span.gradient != nullptr) __builtin_prefetch(static_cast<const float*>(span.gradient) + at);
  }
}

// Writes to `sums` what a pass over [begin, end) would make of the residual.
void SumRange(const Accumulation& accumulation, size_t begin, size_t end, float* sums);

// How many tasks a pass over `n` elements is cut into, and the first element of task `t`: at a
// multiple of `grain`.
int TaskCount(size_t n, int threads);
size_t TaskBegin(size_t n, int t, int tasks, size_t grain = 64);

}  // namespace hvds
