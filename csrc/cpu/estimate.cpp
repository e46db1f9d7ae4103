#include "estimate.h"

#include <algorithm>

#include "pool.h"

namespace hvds {
namespace {

constexpr size_t kChunk = 64;  // elements that are summed at once
constexpr size_t kLine = 16;   // elements of a cache line
constexpr size_t kVector = 8;  // fewer are summed best one by one

}  // namespace

void Sample(const Accumulation& accumulation, const Sampling& sampling, int threads,
            float* sample) {
  const size_t runs = sampling.runs, run_numel = sampling.run_numel;
  const size_t places = accumulation.numel() / run_numel;
  const auto place = [&](size_t r) {
    const size_t first = r * places / runs, after = (r + 1) * places / runs;
    return (first + Scaled(Mixed(static_cast<uint32_t>(r), sampling.seed), after - first)) *
           run_numel;
  };
  const SumFn* const sum =
      run_numel < kVector ? ElementSums(accumulation.rule) : ActiveKernels().sum[accumulation.rule];
  const int tasks = TaskCount(runs * kLine, threads);
  Run(tasks, threads, [&](int t) {
    const size_t first = runs * t / tasks, last = runs * (t + 1) / tasks;
    float sums[kChunk];  // rather than in the sample, whose lines are not in the cache yet
    Cursor here(accumulation.gradients), ahead(accumulation.gradients);
    for (size_t r = first; r < last; ++r) {
      if (r + kSamplesAhead < last) {
        const size_t at = place(r + kSamplesAhead);
        Prefetch(accumulation.SpanOf(ahead.MoveTo(at), at, run_numel));
      }
      size_t begin = place(r);
      const size_t end = begin + run_numel;
      for (float* out = sample + r * run_numel; begin < end;) {
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
