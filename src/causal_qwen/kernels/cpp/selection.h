// The largest of many values.

#pragma once

#include <functional>

#include "lanes.h"

inline bool any(Words lanes) {
#ifdef __AVX2__
  return _mm256_movemask_epi8((__m256i)lanes) != 0;
#else
  int32_t all = 0;
  for (int lane = 0; lane < kLanes; ++lane) all |= lanes[lane];
  return all != 0;
#endif
}

// Where the largest value is, the first of several; a value that is not a number counts as the largest.
inline int64_t argmax(const float* values, int64_t size) {
  Floats largest = Floats{} - INFINITY;
  Words none = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats v = load<Floats>(values + i);
    largest = largest > v ? largest : v;
    none |= v != v;
  }
  float most = -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, largest[lane]);
  bool odd = any(none);
  for (; i < size; ++i) most = std::max(most, values[i]), odd |= values[i] != values[i];
  return std::find_if(values, values + size, [&](float v) { return odd ? v != v : v == most; }) - values;
}

// The k-th largest of `size` ≥ k ≥ 1 numbers.
inline float kth_largest(const float* values, int64_t size, int64_t k) {
  // The k largest so far, the least of them in front; few of many values get in.
  std::vector<float> heap(values, values + k);
  std::make_heap(heap.begin(), heap.end(), std::greater<float>());
  const auto offer = [&](float value) {
    if (!(value > heap.front())) return;
    std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
    heap.back() = value;
    std::push_heap(heap.begin(), heap.end(), std::greater<float>());
  };
  int64_t i = k;
  for (; i + kLanes <= size; i += kLanes)
    if (any(load<Floats>(values + i) > heap.front()))
      for (int lane = 0; lane < kLanes; ++lane) offer(values[i + lane]);
  for (; i < size; ++i) offer(values[i]);
  return heap.front();
}
