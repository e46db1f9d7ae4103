#include "passes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "pool.h"

namespace hvds {
namespace {

constexpr size_t kBlock = 4096;  // elements between two looks at a part's capacity
constexpr size_t kTaskNumel = size_t{1} << 16;
constexpr int kTasksPerThread = 4;  // so that a thread that is held up holds up little

void AccumulateRange(Part& part, const Accumulation& accumulation, size_t begin, size_t end,
                     const Search& search, Mode mode) {
  const Kernels& kernels = ActiveKernels();
  SpoiledList* const spoiled = mode == Mode::kTake ? &part.spoiled : nullptr;
  uint32_t key = search.key;
  const auto pass_over = [&](size_t from, size_t to, bool inside) {
    accumulation.ForEachSpan(from, to, kBlock, [&](const Span& span, Dtype dtype) {
      const PassFn pass =
          mode == Mode::kTake ? kernels.take[accumulation.rule][dtype] : kernels.read;
      part.Reserve(part.count + span.n);
      part.count += pass(span, inside ? key : kNonFiniteKey, part.indices.data() + part.count,
                         part.values.data() + part.count, spoiled);
      if (part.count > search.limit) {
        key = search.raised_key;
        part.over_limit = true;
      }
    });
  };
  const size_t from = std::clamp(search.begin, begin, end);
  const size_t to = std::clamp(search.end, from, end);
  pass_over(begin, from, false);
  pass_over(from, to, true);
  pass_over(to, end, false);
  if (accumulation.streamed()) kernels.stream_fence();
}

}  // namespace

size_t TaskBegin(size_t n, int t, int tasks, size_t grain) {
  return t == tasks ? n : n / tasks * t / grain * grain;
}

int TaskCount(size_t n, int threads) {
  if (threads <= 1) return 1;
  const size_t useful = std::max<size_t>(1, n / kTaskNumel);
  return static_cast<int>(std::min<size_t>(useful, static_cast<size_t>(threads) * kTasksPerThread));
}

Workspace& ThreadWorkspace() {
  static thread_local Workspace workspace;
  return workspace;
}

size_t Gradients::Find(size_t at) const {
  const auto after = std::upper_bound(
      segments.begin(), segments.end(), at,
      [](size_t position, const Segment& segment) { return position < segment.begin; });
  return static_cast<size_t>(after - segments.begin()) - 1;
}

void Accumulate(Workspace& workspace, const Accumulation& accumulation, const Search& search,
                Mode mode, int threads) {
  const size_t n = accumulation.numel();
  const int tasks = TaskCount(n, threads);
  workspace.Use(tasks);
  Run(tasks, threads, [&](int t) {
    AccumulateRange(workspace.parts[t], accumulation, TaskBegin(n, t, tasks),
                    TaskBegin(n, t + 1, tasks), search, mode);
  });
}

void RestoreSpoiled(Workspace& workspace, const Accumulation& accumulation) {
  for (const SpoiledList& list : workspace.TakeSpoiled()) {
    list.Restore(accumulation.residual, accumulation.buffer);
  }
}

void PutBack(const Part& part, float* residual) {
  constexpr size_t kAhead = 16;  // enough to hide a memory's latency
  const int32_t* const indices = part.indices.data();
  for (size_t i = 0; i < part.count; ++i) {
    if (i + kAhead < part.count) __builtin_prefetch(residual + indices[i + kAhead], 1);
    residual[indices[i]] = part.values.data()[i];
  }
}

void SumRange(const Accumulation& accumulation, size_t begin, size_t end, float* sums) {
  const Kernels& kernels = ActiveKernels();
  accumulation.ForEachSpan(begin, end, SIZE_MAX, [&](const Span& span, Dtype dtype) {
    kernels.sum[accumulation.rule][dtype](span, sums);
    sums += span.n;
  });
}

void CopyOut(const Workspace& workspace, int32_t* indices, float* values, int threads) {
  std::vector<size_t> offsets(workspace.part_count, 0);
  for (int p = 1; p < workspace.part_count; ++p) {
    offsets[p] = offsets[p - 1] + workspace.parts[p - 1].count;
  }
  Run(workspace.part_count, threads, [&](int p) {
    const Part& part = workspace.parts[p];
    std::copy_n(part.indices.data(), part.count, indices + offsets[p]);
    std::copy_n(part.values.data(), part.count, values + offsets[p]);
  });
}

uint32_t ExactKey(const float* x, size_t n, size_t k, int threads) {
  // Three digits of the key, from the top: 11, 10 and 10 bits. Each round counts, among the keys
  // that share the digits found so far, and descends into the digit that holds rank k.
  constexpr int kShifts[] = {20, 10, 0};
  constexpr size_t kBins = 2048;
  const int tasks = TaskCount(n, threads);
  std::vector<std::array<size_t, kBins>> counts(tasks);
  uint32_t prefix = 0, prefix_mask = 0;
  for (const int shift : kShifts) {
    const uint32_t digit_mask = shift == 20 ? 0x7ff : 0x3ff;
    Run(tasks, threads, [&](int t) {
      std::array<size_t, kBins>& count = counts[t];
      count.fill(0);
      const size_t end = TaskBegin(n, t + 1, tasks);
      for (size_t i = TaskBegin(n, t, tasks); i < end; ++i) {
        const uint32_t key = KeyOf(x[i]);
        if ((key & prefix_mask) == prefix) ++count[key >> shift & digit_mask];
      }
    });
    uint32_t digit = digit_mask;
    for (;; --digit) {
      size_t count = 0;
      for (const auto& task_counts : counts) count += task_counts[digit];
      if (count >= k || digit == 0) break;
      k -= count;
    }
    prefix |= digit << shift;
    prefix_mask |= digit_mask << shift;
  }
  return prefix;
}

}  // namespace hvds
