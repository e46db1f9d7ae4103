// Scratch memory that calls leave to the next call of the same thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"

namespace hvds {

// A growing array whose new elements are not written (std::vector would clear them).
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t capacity_bytes() const { return capacity_ * sizeof(T); }

  // Makes room for `count` elements; what is there stays.
  void Reserve(size_t count) {
    if (count <= capacity_) return;
    const size_t grown = capacity_ + capacity_ / 2;
    const size_t capacity = count > grown ? count : grown;
    void* data = std::realloc(data_, capacity * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }
  void Free() {
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
  }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

// The entries that one task found in its range of the vector, ascending.
struct alignas(64) Part {
  Buffer<int32_t> indices;
  Buffer<float> values;
  size_t count = 0;
  bool over_limit = false;  // it found more than was wanted, and raised its key
  SpoiledList spoiled;

  void Reserve(size_t capacity) {
    indices.Reserve(capacity);
    values.Reserve(capacity);
  }
};

// One per calling thread.
struct Workspace {
  std::vector<Part> parts;  // only ever grows; the first `part_count` are in use
  int part_count = 0;
  std::vector<Part> losers;  // beside each part, what a selection left out of it
  Buffer<uint32_t> keys;
  Buffer<float> sample;

  void Use(int count) {
    if (parts.size() < static_cast<size_t>(count)) parts = std::vector<Part>(count);
    part_count = count;
    for (Part& part : parts) {
      part.count = 0;
      part.over_limit = false;
      part.spoiled = SpoiledList();
    }
  }

  std::vector<Part>& Losers() {
    if (losers.size() < parts.size()) losers = std::vector<Part>(parts.size());
    return losers;
  }

  // What the last pass noted, out of the way of the next.
  std::vector<SpoiledList> TakeSpoiled() {
    std::vector<SpoiledList> lists;
    for (int p = 0; p < part_count; ++p) {
      if (!parts[p].spoiled.indices.empty()) lists.push_back(std::move(parts[p].spoiled));
    }
    return lists;
  }

  size_t TotalCount() const {
    size_t total = 0;
    for (int p = 0; p < part_count; ++p) total += parts[p].count;
    return total;
  }

  // Gives memory back if an unusual call made it grow beyond what the usual ones need.
  void Trim() {
    constexpr size_t kKeptBytes = size_t{64} << 20;
    size_t bytes = keys.capacity_bytes();
    for (const auto* list : {&parts, &losers}) {
      for (const Part& part : *list) {
        bytes += part.indices.capacity_bytes() + part.values.capacity_bytes();
      }
    }
    if (bytes <= kKeptBytes) return;
    parts.clear();
    losers.clear();
    part_count = 0;
    keys.Free();
  }
};

Workspace& ThreadWorkspace();

}  // namespace hvds
