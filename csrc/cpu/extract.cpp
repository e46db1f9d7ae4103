#include "extract.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "pool.h"

namespace hvds {
namespace {

// Which slots are taken: a bit for each bucket of one slot, else a count for each bucket.
class SingleSlots {
 public:
  explicit SingleSlots(uint64_t buckets) : taken_(buckets / 64 + 1) {}

  bool Claim(uint64_t bucket) {
    const uint64_t bit = uint64_t{1} << bucket % 64;
    const bool free = (taken_[bucket / 64] & bit) == 0;
    taken_[bucket / 64] |= bit;
    return free;
  }

 private:
  std::vector<uint64_t> taken_;
};

class SharedSlots {
 public:
  SharedSlots(uint64_t buckets, uint32_t slots_per_bucket)
      : taken_(buckets), slots_per_bucket_(slots_per_bucket) {}

  bool Claim(uint64_t bucket) {
    const bool free = taken_[bucket] < slots_per_bucket_;
    taken_[bucket] += free;
    return free;
  }

 private:
  std::vector<uint8_t> taken_;
  const uint32_t slots_per_bucket_;
};

// Leaves in the parts what finds a slot; the rest goes to `losers`.
template <typename Slots>
void KeepClaimed(Workspace& workspace, std::vector<Part>& losers, const BucketHash& hash,
                 Slots slots) {
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
      const bool wins = KeyOf(value) >= kNonFiniteKey || slots.Claim(hash(index));
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
  if (slots_per_bucket == 1) {
    KeepClaimed(workspace, losers, hash, SingleSlots(hash.buckets));
  } else {
    KeepClaimed(workspace, losers, hash, SharedSlots(hash.buckets, slots_per_bucket));
  }
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
