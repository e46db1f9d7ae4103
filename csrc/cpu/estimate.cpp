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
  std::fill_n(counts, key_count, 0);
  if (key_count == 0) return;
  const size_t n = source.numel();
  const Kernels& kernels = ActiveKernels();
  const uint32_t lowest = *std::min_element(keys, keys + key_count);
  const int tasks = TaskCount(n, threads);
  std::vector<std::vector<uint64_t>> found(tasks, std::vector<uint64_t>(key_count));
  Run(tasks, threads, [&](int t) {
    // Only what reaches the lowest key is compared with the others.
    int32_t unused[kBlock] = {};
    float reaching[kBlock];
    ForEachBlock(source, TaskBegin(n, t, tasks), TaskBegin(n, t + 1, tasks),
                 [&](const float* sums, size_t length, size_t) {
                   const size_t nnz =
                       kernels.at_least(unused, sums, length, lowest, unused, reaching);
                   for (size_t k = 0; k < key_count; ++k) {
                     const auto key = static_cast<int32_t>(keys[k]);
                     int32_t count = 0;
                     for (size_t i = 0; i < nnz; ++i) {
                       count += static_cast<int32_t>(KeyOf(reaching[i])) >= key;
                     }
                     found[t][k] += static_cast<uint64_t>(count);
                   }
                 });
  });
  for (const std::vector<uint64_t>& of_task : found) {
    for (size_t k = 0; k < key_count; ++k) counts[k] += of_task[k];
  }
}

}  // namespace hvds
