// The k-th largest magnitude is found among candidates: the entries at or above a pivot, compacted
// by the pass that adds the gradients. The pivot comes from a sample. Where that leaves too few or
// too many (of long ties, say), the k-th key is counted out exactly, and another pass takes what
// reaches it.
#include "topk.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "estimate.h"
#include "pool.h"

namespace hvds {
namespace {

// A key with probably at least k entries at or above it and not many more, from a sample of what
// the accumulation comes to; 1 if everything that is not zero has to be looked at.
//
// The sample is of short runs, since its time goes by the places in memory. Neighbours resemble
// each other, so the margin is four standard deviations by the runs' own counts.
uint32_t EstimatePivot(Workspace& workspace, const Accumulation& accumulation, size_t k,
                       int threads) {
  constexpr size_t kRunNumel = 8, kMinSample = size_t{1} << 12, kMaxSample = size_t{3} << 13;
  const size_t n = accumulation.numel();
  if (n <= 8 * kMinSample) return 1;
  const size_t runs = std::clamp(n / 128, kMinSample, kMaxSample) / kRunNumel;
  const size_t sample = runs * kRunNumel;
  const size_t rank = sample * k / n + 1;  // of the sample's k-th
  const auto deeper = [&](double variance) {
    return rank + static_cast<size_t>(4.0 * std::sqrt(variance)) + 4;
  };
  if (deeper(static_cast<double>(rank)) >= sample) return 1;

  workspace.sample.Reserve(sample);
  float* const magnitudes = workspace.sample.data();
  Sample(accumulation, {runs, kRunNumel, 0}, threads, magnitudes);
  workspace.keys.Reserve(sample);
  uint32_t* const keys = workspace.keys.data();
  std::transform(magnitudes, magnitudes + sample, keys, KeyOf);
  std::nth_element(keys, keys + rank - 1, keys + sample, std::greater<uint32_t>());
  const float level = FloatOf(keys[rank - 1]);
  size_t squares = 0;
  for (size_t run = 0; run < sample; run += kRunNumel) {
    size_t count = 0;
    for (size_t i = 0; i < kRunNumel; ++i) count += magnitudes[run + i] >= level;
    squares += count * count;
  }
  const size_t deep = deeper(static_cast<double>(std::max(squares, rank)));
  if (deep >= sample) return 1;
  std::nth_element(keys + rank, keys + deep, keys + sample, std::greater<uint32_t>());
  return std::clamp(keys[deep], 1u, kNonFiniteKey);
}

size_t CandidateLimit(size_t k) { return std::max<size_t>(8 * k, size_t{1} << 16); }

// Whether the parts hold everything at or above `pivot`, and the largest k are among that.
bool Sufficient(const Workspace& workspace, uint32_t pivot, size_t k) {
  for (int p = 0; p < workspace.part_count; ++p) {
    if (workspace.parts[p].over_limit) return false;
  }
  return pivot <= 1 || workspace.TotalCount() >= k;
}

// The k-th largest key among the candidates, all at or above `pivot`; needs at least k of them.
// One histogram between the pivot and the maximum, then a selection within one of its bins.
uint32_t KthCandidateKey(Workspace& workspace, uint32_t pivot, size_t k, int threads) {
  constexpr int kBinBits = 12;
  using Histogram = std::array<uint32_t, 1 << kBinBits>;
  const int part_count = workspace.part_count;

  std::vector<uint32_t> highest(part_count, pivot);
  Run(part_count, threads, [&](int p) {
    const Part& part = workspace.parts[p];
    const float* const values = part.values.data();
    uint32_t top = pivot;
    for (size_t i = 0; i < part.count; ++i) top = std::max(top, KeyOf(values[i]));
    highest[p] = top;
  });
  const uint32_t range = *std::max_element(highest.begin(), highest.end()) - pivot;
  int shift = 0;
  while (range >> shift >> kBinBits != 0) ++shift;

  std::vector<Histogram> counts(part_count);
  Run(part_count, threads, [&](int p) {
    const Part& part = workspace.parts[p];
    const float* const values = part.values.data();
    Histogram& histogram = counts[p];
    histogram.fill(0);
    for (size_t i = 0; i < part.count; ++i) ++histogram[(KeyOf(values[i]) - pivot) >> shift];
  });
  uint32_t bin = 1 << kBinBits;
  size_t in_bin = 0;
  do {
    k -= in_bin;
    --bin;
    in_bin = 0;
    for (const Histogram& histogram : counts) in_bin += histogram[bin];
  } while (in_bin < k);

  workspace.keys.Reserve(in_bin);
  uint32_t* const keys = workspace.keys.data();
  size_t found = 0;
  for (int p = 0; p < part_count; ++p) {
    if (counts[p][bin] == 0) continue;
    const Part& part = workspace.parts[p];
    for (size_t i = 0; i < part.count; ++i) {
      const uint32_t key = KeyOf(part.values.data()[i]);
      if ((key - pivot) >> shift == bin) keys[found++] = key;
    }
  }
  std::nth_element(keys, keys + k - 1, keys + found, std::greater<uint32_t>());
  return keys[k - 1];
}

// Leaves in the parts what reaches `kth_key`, and of what equals it, the first, so that k remain.
// The others go to `losers`, in any order.
void KeepLargest(Workspace& workspace, std::vector<Part>& losers, uint32_t kth_key, size_t k,
                 int threads) {
  const Kernels& kernels = ActiveKernels();
  Run(workspace.part_count, threads, [&](int p) {
    Part& part = workspace.parts[p];
    Part& below = losers[p];
    below.Reserve(part.count);
    below.count = kernels.below(part.indices.data(), part.values.data(), part.count, kth_key,
                                below.indices.data(), below.values.data());
    part.count = kernels.at_least(part.indices.data(), part.values.data(), part.count, kth_key,
                                  part.indices.data(), part.values.data());
  });
  size_t surplus = workspace.TotalCount() - k;
  for (int p = workspace.part_count - 1; surplus > 0; --p) {
    // From the back: ties leave while there is a surplus, and the others close up.
    Part& part = workspace.parts[p];
    Part& below = losers[p];
    int32_t* const indices = part.indices.data();
    float* const values = part.values.data();
    size_t to = part.count;
    for (size_t from = part.count; from-- > 0;) {
      if (surplus > 0 && KeyOf(values[from]) == kth_key) {
        --surplus;
        below.indices.data()[below.count] = indices[from];
        below.values.data()[below.count++] = values[from];
        continue;
      }
      --to;
      indices[to] = indices[from];
      values[to] = values[from];
    }
    part.count -= to;
    std::copy_n(indices + to, part.count, indices);
    std::copy_n(values + to, part.count, values);
  }
}

// Fills the parts with the candidates out of `x` that reach its k-th key, and returns that.
uint32_t CountOut(Workspace& workspace, float* x, size_t n, size_t k, int threads) {
  // k entries from the front of a part are enough of it once its later ties are left out.
  const uint32_t exact = std::max(1u, ExactKey(x, n, std::min(k, n), threads));
  Accumulate(workspace, {x, Gradients::None(n)}, {exact, k, exact + 1}, Mode::kRead, threads);
  return exact;
}

}  // namespace

size_t AccumulateTopk(Workspace& workspace, const Accumulation& accumulation, size_t k, int threads,
                      int32_t* indices, float* values, uint32_t* kth_key) {
  float* const residual = accumulation.residual;
  uint32_t pivot = EstimatePivot(workspace, accumulation, k, threads);
  // The pivot lets few through that are not wanted: the pass takes all out while it has them at
  // hand, and the losers are put back. Beyond the limit only non-finite sums are of interest: they
  // have to be noted.
  Accumulate(workspace, accumulation, {pivot, CandidateLimit(k), kNonFiniteKey}, Mode::kTake,
             threads);
  bool taken = true;
  const std::vector<SpoiledList> spoiled = workspace.TakeSpoiled();
  const auto put_back = [&](std::vector<Part>& parts) {
    Run(workspace.part_count, threads, [&](int p) { PutBack(parts[p], residual); });
  };
  if (k > 0 && !Sufficient(workspace, pivot, k)) {
    put_back(workspace.parts);
    taken = false;
    pivot = CountOut(workspace, residual, accumulation.numel(), k, threads);
  }

  *kth_key = 0;
  if (k == 0) {
    *kth_key = kNonFiniteKey;
    put_back(workspace.parts);
    workspace.Use(0);
  } else if (workspace.TotalCount() >= k) {
    *kth_key = KthCandidateKey(workspace, pivot, k, threads);
    if (workspace.TotalCount() > k) {
      std::vector<Part>& losers = workspace.Losers();
      KeepLargest(workspace, losers, *kth_key, k, threads);
      if (taken) put_back(losers);
    }
  }
  if (!taken) {
    Run(workspace.part_count, threads, [&](int p) {
      const Part& part = workspace.parts[p];
      for (size_t i = 0; i < part.count; ++i) residual[part.indices.data()[i]] = 0.0f;
    });
  }
  CopyOut(workspace, indices, values, threads);
  for (const SpoiledList& list : spoiled) list.Restore(residual, accumulation.buffer);
  return workspace.TotalCount();
}

}  // namespace hvds
