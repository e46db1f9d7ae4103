// Copies of what an accumulation changes, made block by block just before a pass comes to it: the
// pass then finds the block in the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "passes.h"

namespace hvds {

// Of one pass, which must be over when the keeper goes. Whatever the pass has not come to by then,
// because a task threw, is copied last: the copy is whole wherever the pass has begun.
class Keeper {
 public:
  // What one task keeps: [at, end) is still to come.
  class alignas(kLineBytes) Range {
   public:
    Range(const Accumulation& accumulation, size_t begin, size_t end)
        : accumulation_(accumulation), at_(begin), end_(end) {}

    // Keeps at least what lies before `end`; nothing where nothing is to be kept.
    void KeepTo(size_t end) {
      if (accumulation_.kept.complete == nullptr) return;
      for (end = std::min(end, end_); at_ < end;) {
        const size_t n = std::min(kBlock, end_ - at_);
        Copy(accumulation_.kept.residual + at_, accumulation_.residual + at_, n);
        if (accumulation_.buffer != nullptr) {
          Copy(accumulation_.kept.buffer + at_, accumulation_.buffer + at_, n);
        }
        at_ += n;
        if (at_ == end_) ActiveKernels().stream_fence();
      }
    }
    void KeepRest() { KeepTo(end_); }

   private:
    static constexpr size_t kBlock = 4096;  // elements: what the first-level cache holds

    // Past the caches if nobody will find it there.
    void Copy(float* to, const float* from, size_t n) const {
      const auto unaligned = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
      size_t streamed = 0;
      if (accumulation_.numel() * sizeof(float) >= kStreamedBytes && unaligned % kLineBytes == 0) {
        streamed = n - n % (kLineBytes / sizeof(float));
        ActiveKernels().stream_out(to, from, streamed * sizeof(float));
      }
      std::memcpy(to + streamed, from + streamed, (n - streamed) * sizeof(float));
    }

    const Accumulation& accumulation_;
    size_t at_;
    const size_t end_;
  };

  // The ranges are those of TaskBegin.
  Keeper(const Accumulation& accumulation, int tasks, size_t grain = 64)
      : complete_(accumulation.kept.complete) {
    const size_t n = accumulation.numel();
    ranges_.reserve(static_cast<size_t>(tasks));
    for (int t = 0; t < tasks; ++t) {
      ranges_.emplace_back(accumulation, TaskBegin(n, t, tasks, grain),
                           TaskBegin(n, t + 1, tasks, grain));
    }
  }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  ~Keeper() {
    if (complete_ == nullptr) return;
    for (Range& range : ranges_) range.KeepRest();
    *complete_ = 1;
  }

  Range& Of(int task) { return ranges_[static_cast<size_t>(task)]; }

 private:
  std::vector<Range> ranges_;
  int32_t* const complete_;
};

}  // namespace hvds
