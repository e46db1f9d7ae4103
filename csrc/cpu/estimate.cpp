#include "estimate.h"

#include <algorithm>

#include "pool.h"

namespace hvds {
namespace {

constexpr size_t kChunk = 64;  // elements that are summed at once

}  // namespace

size_t SampleNumel(size_t n, size_t start, size_t stride, size_t run) {
  if (start >= n) return 0;
  const size_t before_last = (n - start - 1) / stride;
  return before_last * run + std::min(run, n - start - before_last * stride);
}

void Sample(const Accumulation& accumulation, size_t start, size_t stride, size_t run, int threads,
            float* sample) {
  const size_t n = accumulation.numel();
  const size_t runs = start >= n ? 0 : (n - start - 1) / stride + 1;
  const SumFn* const sum = ActiveKernels().sum[accumulation.rule];
  const int tasks = TaskCount(runs * std::min<size_t>(stride, 64), threads);
  Run(tasks, threads, [&](int t) {
    const size_t first = runs * t / tasks, last = runs * (t + 1) / tasks;
    float sums[kChunk];  // rather than in the sample, whose lines are not in the cache yet
    Cursor here(accumulation.gradients), ahead(accumulation.gradients);
    for (size_t r = first; r < last; ++r) {
      if (r + kSamplesAhead < last) {
        const size_t at = start + (r + kSamplesAhead) * stride;
        Prefetch(accumulation.SpanOf(ahead.MoveTo(at), at, run));
      }
      size_t begin = start + r * stride;
      const size_t end = std::min(n, begin + run);
      for (float* out = sample + r * run; begin < end;) {
        const Segment& segment = here.MoveTo(begin);
        const size_t length =
            std::min({end, segment.begin + segment.numel, begin + kChunk}) - begin;
        sum[segment.dtype](accumulation.SpanOf(segment, begin, length), sums);
        for (size_t i = 0; i < length; ++i) out[i] = FloatOf(KeyOf(sums[i]));
        begin += length;
        out += length;
      }
    }
  });
}

}  // namespace hvds
