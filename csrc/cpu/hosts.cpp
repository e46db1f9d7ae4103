// The sum of a few long vectors, at the pace of the memory: each tile is summed in the first-level
// cache, and whole lines of the result go past the caches.
#include "hosts.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "passes.h"
#include "pool.h"

namespace hvds {
namespace {

constexpr size_t kTileNumel = 2048;

const void* At(const void* vector, size_t i, Dtype dtype) {
  const size_t bytes = dtype == kFloat32 ? sizeof(float) : sizeof(uint16_t);
  return static_cast<const char*>(vector) + i * bytes;
}

void SumTile(float* tile, size_t begin, size_t length, const void* const* vectors, size_t count,
             Dtype dtype) {
  const SumFn sum = ActiveKernels().sum[kPlain][dtype];
  std::fill_n(tile, length, 0.0f);
  for (size_t v = 0; v < count; ++v) {
    Span span{};
    span.residual = tile;
    span.before = tile;
    span.gradient = At(vectors[v], begin, dtype);
    span.n = length;
    sum(span, tile);
  }
}

}  // namespace

void SumVectors(float* out, size_t n, const void* const* vectors, size_t count, Dtype dtype,
                int threads) {
  const bool streamed = n * sizeof(float) >= kStreamedBytes;
  // Tiles begin on a line; what is before the first one goes by itself.
  const size_t past_line = reinterpret_cast<uintptr_t>(out) % kLineBytes / sizeof(float);
  const size_t head = std::min(n, past_line == 0 ? 0 : kLineBytes / sizeof(float) - past_line);
  const size_t tiles = (n - head + kTileNumel - 1) / kTileNumel;
  SumTile(out, 0, head, vectors, count, dtype);
  const int tasks = static_cast<int>(std::min<size_t>(tiles, TaskCount(n, threads)));
  Run(tasks, threads, [&](int t) {
    const Kernels& kernels = ActiveKernels();
    alignas(kLineBytes) float tile[kTileNumel];
    for (size_t at = tiles * t / tasks; at < tiles * (t + 1) / tasks; ++at) {
      const size_t begin = head + at * kTileNumel;
      const size_t length = std::min(kTileNumel, n - begin);
      SumTile(tile, begin, length, vectors, count, dtype);
      const size_t lines = streamed ? length * sizeof(float) / kLineBytes * kLineBytes : 0;
      if (lines != 0) kernels.stream_out(out + begin, tile, lines);
      std::memcpy(reinterpret_cast<char*>(out + begin) + lines,
                  reinterpret_cast<const char*>(tile) + lines, length * sizeof(float) - lines);
    }
    if (streamed) kernels.stream_fence();
  });
}

}  // namespace hvds
