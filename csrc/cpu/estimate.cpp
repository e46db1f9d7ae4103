#include "estimate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"

namespace hvds {
namespace {

constexpr size_t kBlock = kMomentsNumel;  // sums that are looked at in the first-level cache

// Calls use(sums, n, number of the block) for every kBlock sums of [begin, end).
template <typename Use>
void ForEachBlock(const Source& source, size_t begin, size_t end, Use use) {
  alignas(64) float sums[kBlock];
  for (; begin < end; begin += kBlock) {
    const size_t n = std::min(kBlock, end - begin);
    SumRange(source, begin, begin + n, sums);
    use(sums, n, begin / kBlock);
  }
}

}  // namespace

size_t SampleNumel(size_t n, size_t start, size_t stride, size_t run) {
  if (start >= n) return 0;
  const size_t before_last = (n - start - 1) / stride;
  return before_last * run + std::min(run, n - start - before_last * stride);
}

void Sample(const Source& source, size_t start, size_t stride, size_t run, int threads,
            float* sample) {
  constexpr size_t kAhead = 16;  // runs: enough to hide a memory's latency
  const size_t n = source.numel();
  const size_t runs = start >= n ? 0 : (n - start - 1) / stride + 1;
  const int tasks = TaskCount(runs * std::min<size_t>(stride, 64), threads);
  Run(tasks, threads, [&](int t) {
    const size_t first = runs * t / tasks, last = runs * (t + 1) / tasks;
    const std::vector<Segment>& segments = source.gradients.segments;
    size_t ahead_segment = first < last ? source.gradients.Find(start + first * stride) : 0;
    const auto prefetch = [&](size_t at) {
      while (at >= segments[ahead_segment].begin + segments[ahead_segment].numel) ++ahead_segment;
      const Span span = source.SpanOf(segments[ahead_segment], at, 1);
      __builtin_prefetch(span.residual);
      if (span.buffer != nullptr) __builtin_prefetch(span.buffer);
      if (span.gradient != nullptr) __builtin_prefetch(span.gradient);
    };
    for (size_t r = first; r < last; ++r) {
      if (r + kAhead < last) prefetch(start + (r + kAhead) * stride);
      const size_t begin = start + r * stride, end = std::min(n, begin + run);
      float* const out = sample + r * run;
      SumRange(source, begin, end, out);
      for (size_t i = 0; i < end - begin; ++i) out[i] = FloatOf(KeyOf(out[i]));
    }
  });
}

MomentSums Moments(const Source& source, uint32_t key, int threads) {
  const size_t n = source.numel();
  const Kernels& kernels = ActiveKernels();
  std::vector<MomentSums> blocks((n + kBlock - 1) / kBlock);
  const int tasks = TaskCount(n, threads);
  Run(tasks, threads, [&](int t) {
    ForEachBlock(source, TaskBegin(n, t, tasks, kBlock), TaskBegin(n, t + 1, tasks, kBlock),
                 [&](const float* sums, size_t count, size_t block) {
                   kernels.moments(sums, count, key, &blocks[block]);
                 });
  });
  MomentSums total;
  for (const MomentSums& block : blocks) {
    total.count += block.count;
    total.sum += block.sum;
    total.of_squares += block.of_squares;
    total.of_magnitudes += block.of_magnitudes;
    total.of_logs += block.of_logs;
    total.largest = std::max(total.largest, block.largest);
  }
  return total;
}

void CountAtLeast(const Source& source, const uint32_t* keys, size_t key_count, int threads,
                  uint64_t* counts) {
  const size_t n = source.numel();
  const Kernels& kernels = ActiveKernels();
  const int tasks = TaskCount(n, threads);
  std::vector<std::vector<uint64_t>> found(tasks, std::vector<uint64_t>(key_count));
  Run(tasks, threads, [&](int t) {
    ForEachBlock(source, TaskBegin(n, t, tasks), TaskBegin(n, t + 1, tasks),
                 [&](const float* sums, size_t count, size_t) {
                   kernels.count(sums, count, keys, key_count, found[t].data());
                 });
  });
  std::fill_n(counts, key_count, 0);
  for (const std::vector<uint64_t>& of_task : found) {
    for (size_t k = 0; k < key_count; ++k) counts[k] += of_task[k];
  }
}

}  // namespace hvds
