// From a stream to a dense vector.
#include <algorithm>

#include "passes.h"
#include "pool.h"
#include "streams.h"

namespace hvds {
namespace {

// The stream's values in the type of the output: as they are, or narrowed a chunk ahead.
template <typename T>
class OutputValues;

template <>
class OutputValues<float> {
 public:
  OutputValues(const Stream& stream, Dtype) : values_(stream.values) {}
  float At(size_t i) { return values_[i]; }

 private:
  const float* values_;
};

template <>
class OutputValues<uint16_t> {
 public:
  OutputValues(const Stream& stream, Dtype dtype)
      : stream_(stream), narrow_(ActiveKernels().narrow[dtype]) {}

  // Called with ascending positions.
  uint16_t At(size_t i) {
    if (i >= begin_ + kChunk || begin_ == kNothing) {
      begin_ = i;
      narrow_(stream_.values + i, std::min(kChunk, stream_.nnz - i), chunk_);
    }
    return chunk_[i - begin_];
  }

 private:
  static constexpr size_t kChunk = 256;
  static constexpr size_t kNothing = SIZE_MAX - kChunk;
  const Stream& stream_;
  void (*const narrow_)(const float*, size_t, uint16_t*);
  size_t begin_ = kNothing;
  uint16_t chunk_[kChunk];
};

// Plain stores, for a range that stays in the cache or does not fill whole lines.
template <typename T>
void DecodePlain(T* out, Dtype dtype, size_t begin, size_t end, const Stream& stream) {
  std::fill(out + begin, out + end, T{});
  OutputValues<T> values(stream, dtype);
  for (size_t i = 0; i < stream.nnz; ++i) {
    const auto at = static_cast<size_t>(static_cast<uint32_t>(stream.indices[i]));
    if (at < begin || at >= end) throw BadIndex();
    out[at] = values.At(i);
  }
}

// Whole lines: each tile is put together in the first-level cache and streamed past the others,
// so that memory sees one write per line and no read.
template <typename T>
void DecodeStreamed(T* out, Dtype dtype, size_t begin, size_t end, const Stream& stream) {
  constexpr size_t kTileNumel = 8192 / sizeof(T);
  alignas(kLineBytes) T tile[kTileNumel] = {};
  const Kernels& kernels = ActiveKernels();
  OutputValues<T> values(stream, dtype);
  size_t i = 0;
  for (size_t base = begin; base < end; base += kTileNumel) {
    const size_t length = std::min(kTileNumel, end - base);
    const size_t first = i;
    for (; i < stream.nnz; ++i) {
      const size_t at = static_cast<uint32_t>(stream.indices[i]) - base;
      if (at >= length) break;
      tile[at] = values.At(i);
    }
    kernels.stream_out(out + base, tile, length * sizeof(T));
    for (size_t j = first; j < i; ++j) tile[static_cast<uint32_t>(stream.indices[j]) - base] = T{};
  }
  kernels.stream_fence();
  if (i != stream.nnz) throw BadIndex();
}

template <typename T>
void DecodeAs(T* out, Dtype dtype, size_t n, const Stream& stream, int threads) {
  constexpr size_t kLineNumel = kLineBytes / sizeof(T);
  if (n * sizeof(T) < kStreamedBytes) {
    DecodePlain(out, dtype, 0, n, stream);
    return;
  }
  // Together the parts below hold every entry, whatever the order (CheckEnds has seen to it), and
  // each of them looks at its own.
  const auto part_of = [&](size_t begin, size_t end) {
    const size_t from = LowerBound(stream, static_cast<int64_t>(begin));
    const size_t to = std::max(from, LowerBound(stream, static_cast<int64_t>(end)));
    return Stream{stream.indices + from, stream.values + from, to - from};
  };
  // Lines [head, tail) whole, and what is before and after plain.
  const size_t past_line = reinterpret_cast<uintptr_t>(out) % kLineBytes / sizeof(T);
  const size_t head = past_line == 0 ? 0 : kLineNumel - past_line;
  const size_t lines = (n - head) / kLineNumel;
  const size_t tail = head + lines * kLineNumel;
  DecodePlain(out, dtype, 0, head, part_of(0, head));
  DecodePlain(out, dtype, tail, n, part_of(tail, n));
  const int tasks = TaskCount(n, threads);
  Run(tasks, threads, [&](int t) {
    const size_t begin = head + lines * t / tasks * kLineNumel;
    const size_t end = head + lines * (t + 1) / tasks * kLineNumel;
    DecodeStreamed(out, dtype, begin, end, part_of(begin, end));
  });
}

// Calls use(i, indices[i]) for every i, each index checked to lie in [0, n). The elements of `x`
// there are fetched some entries ahead: they are far apart, so that each would wait for memory.
template <typename Use>
void ForEachIndex(const float* x, const int32_t* indices, size_t nnz, size_t n, int threads,
                  Use use) {
  constexpr size_t kTaskEntries = size_t{1} << 15;
  constexpr size_t kAhead = 32;
  const size_t useful = std::max<size_t>(1, nnz / kTaskEntries);
  const int tasks =
      threads <= 1 ? 1 : static_cast<int>(std::min(useful, 4 * static_cast<size_t>(threads)));
  Run(tasks, threads, [&](int t) {
    const size_t end = nnz * (t + 1) / tasks;
    for (size_t i = nnz * t / tasks; i < end; ++i) {
      if (i + kAhead < end) {
        const size_t next = static_cast<uint32_t>(indices[i + kAhead]);
        if (next < n) __builtin_prefetch(x + next, 1);
      }
      const size_t at = static_cast<uint32_t>(indices[i]);
      if (at >= n) throw BadIndex();
      use(i, at);
    }
  });
}

}  // namespace

void ScatterAdd(float* x, size_t n, const Stream& stream, int threads) {
  ForEachIndex(x, stream.indices, stream.nnz, n, threads,
               [&](size_t i, size_t at) { x[at] += stream.values[i]; });
}

void TakeAt(float* x, size_t n, const int32_t* indices, size_t nnz, int threads, float* values) {
  ForEachIndex(x, indices, nnz, n, threads, [&](size_t i, size_t at) {
    values[i] = x[at];
    x[at] = 0.0f;
  });
}

void Decode(void* out, Dtype dtype, size_t n, const Stream& stream, int threads) {
  CheckEnds(stream, n);
  if (dtype == kFloat32) {
    DecodeAs(static_cast<float*>(out), dtype, n, stream, threads);
  } else {
    DecodeAs(static_cast<uint16_t*>(out), dtype, n, stream, threads);
  }
}

}  // namespace hvds
