#include "extract.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "pool.h"

namespace hvds {
namespace {

// Orders the entries of a bucket: the larger magnitude first, of equal ones the lower index.
uint64_t RankOf(float value, int32_t index) {
  return uint64_t{KeyOf(value)} << 32 | ~static_cast<uint32_t>(index);
}

// Calls `entry(index, value)` for everything finite in the parts.
template <typename Entry>
void ForEachFinite(const Workspace& workspace, const Entry& entry) {
  for (int p = 0; p < workspace.part_count; ++p) {
    const Part& part = workspace.parts[p];
    for (size_t i = 0; i < part.count; ++i) {
      if (KeyOf(part.values.data()[i]) < kNonFiniteKey) {
        entry(part.indices.data()[i], part.values.data()[i]);
      }
    }
  }
}

// The buckets that more entries hash to than they have slots for, and which entries win there.
class Contest {
 public:
  Contest(const Workspace& workspace, const BucketHash& hash, uint32_t slots_per_bucket)
      : hash_(hash), slots_(slots_per_bucket), places_(hash.buckets) {
    ForEachFinite(workspace, [&](int32_t index, float) { ++places_[hash_(index)]; });
    uint32_t contested = 0;
    for (uint32_t& place : places_) place = place > slots_ ? contested++ : kFree;
    ranks_.resize(size_t{contested} * slots_);
    if (contested == 0) return;
    ForEachFinite(workspace, [&](int32_t index, float value) {
      const uint32_t place = places_[hash_(index)];
      if (place != kFree) Enter(&ranks_[size_t{place} * slots_], RankOf(value, index));
    });
  }

  bool Wins(int32_t index, float value) const {
    const uint32_t place = places_[hash_(index)];
    return place == kFree || RankOf(value, index) >= ranks_[size_t{place} * slots_ + slots_ - 1];
  }

 private:
  static constexpr uint32_t kFree = UINT32_MAX;

  // Keeps the highest ranks of a bucket, descending.
  void Enter(uint64_t* bucket, uint64_t rank) const {
    uint32_t slot = slots_;
    if (rank < bucket[slot - 1]) return;
    for (--slot; slot > 0 && bucket[slot - 1] < rank; --slot) bucket[slot] = bucket[slot - 1];
    bucket[slot] = rank;
  }

  const BucketHash hash_;
  const uint32_t slots_;
  std::vector<uint32_t> places_;  // by bucket: where its ranks are, or that all its entries win
  std::vector<uint64_t> ranks_;
};

// Leaves in the parts what wins a slot; the rest goes to `losers`.
void KeepWinners(Workspace& workspace, std::vector<Part>& losers, const Contest& contest) {
  for (int p = 0; p < workspace.part_count; ++p) {
    Part& part = workspace.parts[p];
    int32_t* const indices = part.indices.data();
    float* const values = part.values.data();
    Part& lost = losers[p];
    lost.Reserve(part.count);
    int32_t* const lost_indices = lost.indices.data();
    float* const lost_values = lost.values.data();
    size_t kept = 0;
    for (size_t i = 0; i < part.count; ++i) {
      // Written to both ends, of which one advances: a branch would be mispredicted at every loser.
      const int32_t index = indices[i];
      const float value = values[i];
      const bool wins = KeyOf(value) >= kNonFiniteKey || contest.Wins(index, value);
      indices[kept] = lost_indices[i - kept] = index;
      values[kept] = lost_values[i - kept] = value;
      kept += wins;
    }
    lost.count = part.count - kept;
    part.count = kept;
  }
}

// Of the entries from `first` on, leaves the k largest in the part, the first among equals, and
// puts back the others.
void KeepLargest(Part& part, size_t first, size_t k, float* residual, std::vector<uint32_t>& keys) {
  int32_t* const indices = part.indices.data();
  float* const values = part.values.data();
  keys.clear();
  for (size_t i = first; i < part.count; ++i) keys.push_back(KeyOf(values[i]));
  std::nth_element(keys.begin(), keys.begin() + k - 1, keys.end(), std::greater<uint32_t>());
  const uint32_t kth_key = keys[k - 1];
  size_t ties = k - static_cast<size_t>(std::count_if(keys.begin(), keys.begin() + k,
                                                      [&](uint32_t key) { return key > kth_key; }));
  size_t kept = first;
  for (size_t i = first; i < part.count; ++i) {
    const uint32_t key = KeyOf(values[i]);
    if (key < kth_key || (key == kth_key && ties == 0)) {
      residual[indices[i]] = values[i];
      continue;
    }
    ties -= key == kth_key;
    indices[kept] = indices[i];
    values[kept++] = values[i];
  }
  part.count = kept;
}

void GroupTopkRange(Part& part, const Accumulation& accumulation, size_t begin, size_t end,
                    size_t k, size_t group_numel) {
  const Kernels& kernels = ActiveKernels();
  const PassFn* const take = kernels.take[accumulation.rule];
  Buffer<float> sums;
  sums.Reserve(std::min(group_numel, end - begin));
  std::vector<uint32_t> keys;
  for (; begin < end; begin += group_numel) {
    const size_t group_end = std::min(end, begin + group_numel);
    SumRange(accumulation, begin, group_end, sums.data());
    const uint32_t pivot = kernels.pivot(sums.data(), group_end - begin, k);
    const size_t first = part.count;
    part.Reserve(first + group_end - begin);
    // Non-finite sums have to be noted, whatever the pivot.
    accumulation.ForEachSpan(begin, group_end, SIZE_MAX, [&](const Span& span, Dtype dtype) {
      part.count +=
          take[dtype](span, std::min(pivot, kNonFiniteKey), part.indices.data() + part.count,
                      part.values.data() + part.count, &part.spoiled);
    });
    if (part.count - first > k) KeepLargest(part, first, k, accumulation.residual, keys);
  }
  if (accumulation.streamed()) kernels.stream_fence();
}

}  // namespace

void HashSelect(Workspace& workspace, const Accumulation& accumulation, uint32_t key,
                const BucketHash& hash, uint32_t slots_per_bucket, int threads) {
  Accumulate(workspace, accumulation, {key}, Mode::kTake, threads);
  std::vector<Part>& losers = workspace.Losers();
  KeepWinners(workspace, losers, Contest(workspace, hash, slots_per_bucket));
  Run(workspace.part_count, threads, [&](int p) { PutBack(losers[p], accumulation.residual); });
  RestoreSpoiled(workspace, accumulation);
}

void GroupTopk(Workspace& workspace, const Accumulation& accumulation, size_t k, size_t group_numel,
               int threads) {
  const size_t n = accumulation.numel();
  const int tasks = TaskCount(n, threads);
  workspace.Use(tasks);
  Run(tasks, threads, [&](int t) {
    GroupTopkRange(workspace.parts[t], accumulation, TaskBegin(n, t, tasks, group_numel),
                   TaskBegin(n, t + 1, tasks, group_numel), k, group_numel);
  });
  RestoreSpoiled(workspace, accumulation);
}

}  // namespace hvds
