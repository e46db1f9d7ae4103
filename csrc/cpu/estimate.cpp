#include "estimate.h"

#include <algorithm>

#include "pool.h"

namespace hvds {

size_t SampleNumel(size_t n, size_t start, size_t stride, size_t run) {
  if (start >= n) return 0;
  const size_t before_last = (n - start - 1) / stride;
  return before_last * run + std::min(run, n - start - before_last * stride);
}

void Sample(const Source& source, size_t start, size_t stride, size_t run, int threads,
            float* sample) {
  const size_t n = source.numel();
  const size_t runs = start >= n ? 0 : (n - start - 1) / stride + 1;
  const SumFn* const sum = ElementSums(source.rule);
  const int tasks = TaskCount(runs * std::min<size_t>(stride, 64), threads);
  Run(tasks, threads, [&](int t) {
    const size_t first = runs * t / tasks, last = runs * (t + 1) / tasks;
    Cursor here(source.gradients), ahead(source.gradients);
    for (size_t r = first; r < last; ++r) {
      if (r + kSamplesAhead < last) {
        const size_t at = start + (r + kSamplesAhead) * stride;
        Prefetch(source.SpanOf(ahead.MoveTo(at), at, run));
      }
      size_t begin = start + r * stride;
      const size_t end = std::min(n, begin + run);
      for (float* out = sample + r * run; begin < end;) {
        const Segment& segment = here.MoveTo(begin);
        const size_t length = std::min(end, segment.begin + segment.numel) - begin;
        sum[segment.dtype](source.SpanOf(segment, begin, length), out);
        for (size_t i = 0; i < length; ++i) out[i] = FloatOf(KeyOf(out[i]));
        begin += length;
        out += length;
      }
    }
  });
}

}  // namespace hvds
