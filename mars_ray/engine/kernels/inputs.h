// Rows of x in the form in which linear layers read them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"

enum class Reading { PLAIN, FLOATS, BYTES };

inline Reading reading_of(const Matrix& w) {
  if (w.format >= INT8) return Reading::BYTES;
  return w.format == BFLOAT16 && !PAIRS ? Reading::FLOATS : Reading::PLAIN;
}

// Rows widened to float32, or rounded to 8 bits in groups, in the layout of `Rows`.
struct Inputs {
  std::vector<int32_t> words, offsets;
  std::vector<float> scales, sums;

  // Makes room for `rows` of `depth` numbers, and for the scales of those that are read for a whole tile after the last.
  void fit(int64_t rows, int64_t depth) {
    const size_t groups = (rows + TILE_ROWS - 1) * depth / GROUP + 1;
    if (scales.size() >= groups) return;
    words.resize(groups * GROUP / (PAIRS ? 4 : 1)), sums.resize(groups * 2);
    scales.resize(groups), offsets.resize(groups);
  }

  // Returns rows from the number at index `first` on.
  Rows rows(Reading reading, int64_t first, int64_t depth) const {
    if (reading == Reading::FLOATS) return {&words[first], depth};
    const int64_t group = first / GROUP;
    return {&words[first / 4], depth / 4, &scales[group], &sums[2 * group], &offsets[group], depth / GROUP};
  }

  template <class T>
  void prepare(Reading reading, const T* from, int64_t first, int64_t depth) {
    if (reading == Reading::FLOATS) widen(from, first, depth);
    if (reading == Reading::BYTES) round(from, first, depth);
  }

 private:
  // Makes all products of a group NaN, because one of its numbers is infinite or NaN.
  void spoil(int64_t group) {
    std::memset(reinterpret_cast<int8_t*>(words.data()) + group * GROUP, 0, GROUP);
    sums[2 * group] = sums[2 * group + 1] = 0, offsets[group] = 0;
    scales[group] = NAN;
  }

  template <class T>
  void widen(const T* from, int64_t first, int64_t depth) {
    for (int64_t d = 0; d < depth; d += W) store_words(&words[first + d], as_words(load(from + d)));
  }

  template <class T>
  void round(const T* from, int64_t first, int64_t depth) {
    constexpr int VECTORS = GROUP / W;
    int8_t* to = reinterpret_cast<int8_t*>(&words[first / 4]);
    for (int64_t d = 0; d < depth; d += GROUP) {
      Floats value[VECTORS], largest = Floats{}, nothing = Floats{};
      for (int v = 0; v < VECTORS; v++) {
        value[v] = load(from + d + W * v);
        largest = maximum(largest, absolute(value[v]));
        nothing = multiply_add(value[v], Floats{}, nothing);
      }
      if (bits_of(is_nan(nothing))) {
        spoil((first + d) / GROUP);
        continue;
      }
      const float top = std::max(largest_of(largest), 1e-30f);
      const Floats scale = broadcast(127.0f / top);
      Ints numbers[VECTORS];
      for (int v = 0; v < VECTORS; v++) numbers[v] = nearest(value[v] * scale);
      store_group(to + d, &sums[(first + d) / HALF], numbers);
      const int64_t group = (first + d) / GROUP;
      scales[group] = top / 127.0f;
      offsets[group] = -Int8Dot::OFFSET * static_cast<int32_t>(sums[2 * group] + sums[2 * group + 1]);
    }
  }
};
