// Two streams are merged by two cursors without branches on the data. More are summed tile by tile:
// a tile of the dense vector that fits a cache, a bitmap of what it holds, and a summary of the
// bitmap, so that the cost follows the entries and not the vector's length.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "passes.h"
#include "pool.h"
#include "streams.h"

namespace hvds {
namespace {

// -0.0 + x == x for every x, -0.0 among them: the neutral element of a float sum.
constexpr float kNeutral = -0.0f;

// A dense window of the vector, all kNeutral and unmarked between two uses.
class Tile {
 public:
  static constexpr size_t kNumel = size_t{1} << 16;

  Tile() { std::fill_n(sums_, kNumel, kNeutral); }

  void Add(uint32_t at, float value) {
    sums_[at] += value;
    marks_[at / 64] |= uint64_t{1} << at % 64;
    summary_[at / 4096] |= uint64_t{1} << at / 64 % 64;
  }

  // Moves the entries out in ascending order, and returns their number.
  size_t Drain(int32_t first_index, int32_t* indices, float* values) {
    size_t count = 0;
    for (size_t s = 0; s < kNumel / 4096; ++s) {
      for (uint64_t words = summary_[s]; words != 0; words &= words - 1) {
        const size_t word = s * 64 + static_cast<size_t>(__builtin_ctzll(words));
        for (uint64_t marks = marks_[word]; marks != 0; marks &= marks - 1) {
          const size_t at = word * 64 + static_cast<size_t>(__builtin_ctzll(marks));
          indices[count] = first_index + static_cast<int32_t>(at);
          values[count++] = sums_[at];
          sums_[at] = kNeutral;
        }
        marks_[word] = 0;
      }
      summary_[s] = 0;
    }
    return count;
  }

 private:
  float sums_[kNumel];
  uint64_t marks_[kNumel / 64] = {};
  uint64_t summary_[kNumel / 4096] = {};
};

Tile& ThreadTile() {
  static thread_local std::unique_ptr<Tile> tile = std::make_unique<Tile>();
  return *tile;
}

// condition ? a : b, by masks: compilers make a branch of the plain form, and half of the time it
// would be predicted wrong.
float Choose(bool condition, float a, float b) {
  const uint32_t mask = 0u - condition;
  return FloatOf((BitsOf(a) & mask) | (BitsOf(b) & ~mask));
}

float IfUsed(bool used, float value) { return Choose(used, value, kNeutral); }

// The merge of two streams as far as it has come.
struct TwoWayMerge {
  Stream a, b;
  int32_t* indices;
  float* values;
  size_t i = 0, j = 0, count = 0;

  bool BothLeft() const { return i < a.nnz && j < b.nnz; }

  // Emits the lower of the two heads, or their sum, and moves past what it used.
  void Step() {
    const int32_t at_a = a.indices[i], at_b = b.indices[j];
    const bool use_a = at_a <= at_b, use_b = at_b <= at_a;
    indices[count] = std::min(at_a, at_b);
    values[count++] = IfUsed(use_a, a.values[i]) + IfUsed(use_b, b.values[j]);
    i += use_a;
    j += use_b;
  }

  void Finish() {
    while (BothLeft()) Step();
    const Stream& rest = i < a.nnz ? a : b;
    const size_t from = i < a.nnz ? i : j;
    std::copy(rest.indices + from, rest.indices + rest.nnz, indices + count);
    std::copy(rest.values + from, rest.values + rest.nnz, values + count);
    count += rest.nnz - from;
  }
};

// A step waits for the loads of the one before, so two merges take turns: below the middle of `a`,
// and from there on, where the result is moved down to the end of the first afterwards.
size_t MergeTwo(const Stream& a, const Stream& b, int32_t* indices, float* values) {
  const size_t a_low = a.nnz / 2;
  const size_t b_low = a.nnz == 0 ? 0 : std::min(b.nnz, LowerBound(b, a.indices[a_low]));
  const size_t room = a_low + b_low;
  TwoWayMerge low{{a.indices, a.values, a_low}, {b.indices, b.values, b_low}, indices, values};
  TwoWayMerge high{{a.indices + a_low, a.values + a_low, a.nnz - a_low},
                   {b.indices + b_low, b.values + b_low, b.nnz - b_low},
                   indices + room,
                   values + room};
  while (low.BothLeft() && high.BothLeft()) {
    low.Step();
    high.Step();
  }
  low.Finish();
  high.Finish();
  std::copy_n(high.indices, high.count, indices + low.count);
  std::copy_n(high.values, high.count, values + low.count);
  return low.count + high.count;
}

size_t TotalNnz(const std::vector<Stream>& streams) {
  size_t total = 0;
  for (const Stream& stream : streams) total += stream.nnz;
  return total;
}

size_t MergeByTile(std::vector<Stream>& streams, size_t span, int32_t* indices, float* values) {
  // Dense streams do better with a tile in the first-level cache, thin ones with few tiles.
  const size_t tile_numel = TotalNnz(streams) > span / 64 ? Tile::kNumel / 4 : Tile::kNumel;
  Tile& tile = ThreadTile();
  size_t count = 0;
  int64_t floor = 0;  // what is below has been drained
  for (;;) {
    int64_t first = INT64_MAX;
    for (const Stream& stream : streams) {
      if (stream.nnz > 0) first = std::min<int64_t>(first, stream.indices[0]);
    }
    if (first == INT64_MAX) return count;
    if (first < floor) throw BadIndex();
    const auto base = static_cast<int32_t>(first / tile_numel * tile_numel);
    for (Stream& stream : streams) {
      size_t i = 0;
      for (; i < stream.nnz; ++i) {
        // Unsigned arithmetic: an index out of order may be anywhere, and shows as a large offset.
        const uint32_t at = static_cast<uint32_t>(stream.indices[i]) - static_cast<uint32_t>(base);
        if (at >= tile_numel) break;
        tile.Add(at, stream.values[i]);
      }
      stream = {stream.indices + i, stream.values + i, stream.nnz - i};
    }
    count += tile.Drain(base, indices + count, values + count);
    floor = int64_t{base} + static_cast<int64_t>(tile_numel);
  }
}

// Writes streams that follow one another in some order, where they do; returns whether they do.
bool Concatenate(std::vector<Stream> streams, int32_t* indices, float* values) {
  const auto is_before = [](const Stream& a, const Stream& b) {
    return a.indices[0] < b.indices[0];
  };
  std::sort(streams.begin(), streams.end(), is_before);
  for (size_t s = 1; s < streams.size(); ++s) {
    if (streams[s - 1].indices[streams[s - 1].nnz - 1] >= streams[s].indices[0]) return false;
  }
  for (const Stream& stream : streams) {
    indices = std::copy_n(stream.indices, stream.nnz, indices);
    values = std::copy_n(stream.values, stream.nnz, values);
  }
  return true;
}

// What the streams hold in [begin, end), without the streams that hold nothing there.
std::vector<Stream> Slices(const Stream* streams, size_t count, int64_t begin, int64_t end) {
  std::vector<Stream> slices;
  for (size_t s = 0; s < count; ++s) {
    const size_t from = LowerBound(streams[s], begin), to = LowerBound(streams[s], end);
    if (from >= to) continue;
    slices.push_back({streams[s].indices + from, streams[s].values + from, to - from});
  }
  return slices;
}

size_t Merge(std::vector<Stream> streams, int64_t span, int32_t* indices, float* values) {
  if (streams.empty()) return 0;
  if (streams.size() == 1) streams.push_back({nullptr, nullptr, 0});
  if (streams.size() == 2) return MergeTwo(streams[0], streams[1], indices, values);
  return MergeByTile(streams, static_cast<size_t>(span), indices, values);
}

// The first position from `from` on whose index is not below `bound`, found in doubling steps.
size_t Gallop(const int32_t* indices, size_t count, size_t from, int32_t bound) {
  size_t step = 1;
  size_t below = from;  // everything before is below the bound
  while (below + step <= count && indices[below + step - 1] < bound) {
    below += step;
    step *= 2;
  }
  const size_t end = std::min(count, below + step);
  return static_cast<size_t>(std::lower_bound(indices + below, indices + end, bound) - indices);
}

}  // namespace

void CheckEnds(const Stream& stream, size_t n) {
  if (stream.nnz == 0) return;
  if (stream.indices[0] < 0 || stream.indices[stream.nnz - 1] < stream.indices[0] ||
      static_cast<size_t>(stream.indices[stream.nnz - 1]) >= n ||
      LowerBound(stream, static_cast<int64_t>(n)) != stream.nnz) {
    throw BadIndex();
  }
}

size_t LowerBound(const Stream& stream, int64_t bound) {
  if (bound <= 0) return 0;
  if (bound > INT32_MAX) return stream.nnz;
  return static_cast<size_t>(
      std::lower_bound(stream.indices, stream.indices + stream.nnz, static_cast<int32_t>(bound)) -
      stream.indices);
}

size_t MergeSum(Workspace& workspace, const Stream* streams, size_t count, size_t numel,
                int threads, int32_t* indices, float* values) {
  size_t total = 0;
  const Stream* longest = nullptr;
  for (size_t s = 0; s < count; ++s) {
    CheckEnds(streams[s], numel);
    total += streams[s].nnz;
    if (longest == nullptr || streams[s].nnz > longest->nnz) longest = &streams[s];
  }
  if (total == 0) return 0;
  const auto end = static_cast<int64_t>(numel);
  std::vector<Stream> filled = Slices(streams, count, 0, end);
  if (Concatenate(filled, indices, values)) return total;

  constexpr size_t kTaskEntries = size_t{1} << 14;
  const int tasks =
      static_cast<int>(std::min({threads > 1 ? 4 * static_cast<size_t>(threads) : 1,
                                 std::max<size_t>(1, total / kTaskEntries), longest->nnz}));
  if (tasks == 1) return Merge(std::move(filled), end, indices, values);

  // Cut where the longest stream falls into equal pieces: the entries may be anywhere.
  const auto boundary = [&](int t) -> int64_t {
    if (t == 0) return 0;
    return t == tasks ? end : longest->indices[longest->nnz * t / tasks];
  };
  workspace.Use(tasks);
  Run(tasks, threads, [&](int t) {
    Part& part = workspace.parts[t];
    const int64_t from = boundary(t), to = boundary(t + 1);
    std::vector<Stream> slices = Slices(streams, count, from, to);
    part.Reserve(TotalNnz(slices));
    part.count = Merge(std::move(slices), to - from, part.indices.data(), part.values.data());
  });
  const size_t nnz = workspace.TotalCount();
  if (nnz > total) throw BadIndex();
  CopyOut(workspace, indices, values, threads);
  return nnz;
}

size_t Difference(const Stream& stream, const int32_t* other, size_t other_count, int32_t* indices,
                  float* values) {
  size_t i = 0, j = 0, count = 0;
  const auto emit_until = [&](size_t end) {
    std::copy(stream.indices + i, stream.indices + end, indices + count);
    std::copy(stream.values + i, stream.values + end, values + count);
    count += end - i;
    i = end;
  };
  // Where one side is far longer, search it in doubling steps; else walk both without branches.
  constexpr size_t kLopsided = 16;
  if (other_count > kLopsided * stream.nnz) {
    for (; i < stream.nnz; ++i) {
      j = Gallop(other, other_count, j, stream.indices[i]);
      indices[count] = stream.indices[i];
      values[count] = stream.values[i];
      count += j == other_count || other[j] != stream.indices[i];
    }
    return count;
  }
  if (stream.nnz > kLopsided * other_count) {
    for (; j < other_count; ++j) {
      emit_until(Gallop(stream.indices, stream.nnz, i, other[j]));
      i += i < stream.nnz && stream.indices[i] == other[j];
    }
  }
  while (i < stream.nnz && j < other_count) {
    const int32_t at = stream.indices[i], against = other[j];
    indices[count] = at;
    values[count] = stream.values[i];
    count += at < against;
    i += at <= against;
    j += against <= at;
  }
  emit_until(stream.nnz);
  return count;
}

}  // namespace hvds
