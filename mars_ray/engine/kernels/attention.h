// Attention of packed positions over the cache, and the rotary embedding that comes before.
#pragma once
#include <cmath>

#include "simd.h"

// What a position may attend to in its slot: the first `prefix` columns, and behind them those whose bit is set.
struct Sight {
  int64_t prefix;
  uint64_t behind;
  int64_t first;  // with a sliding window, columns before this one are out of sight
  int64_t columns() const { return prefix + (behind ? 64 - __builtin_clzll(behind) : 0); }
  bool sees(int64_t column) const {
    if (column < prefix) return column >= first;
    return column - prefix < 64 && (behind >> (column - prefix) & 1);
  }
};

inline __m512 products(const float* a, const float* b, int size) {
  __m512 sum = _mm512_setzero_ps();
  for (int d = 0; d < size; d += 16) sum = _mm512_fmadd_ps(load(a + d), load(b + d), sum);
  return sum;
}

inline __m512 products(const bfloat16* a, const bfloat16* b, int size) {
  __m512 sum = _mm512_setzero_ps();
  for (int d = 0; d < size; d += 32)
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + d), (__m512bh)_mm512_loadu_si512(b + d));
  return sum;
}

// Writes `to` for the `groups` query heads of one position that share a key head. `scores` holds a row for each.
template <int D, class T>
void attend(T* to, const T* query, const T* keys, const T* values, const Sight& sight, int groups, float scaling,
            float* scores) {
  const int64_t columns = sight.columns(), padded = (columns + 15) / 16 * 16, begin = sight.first / 16 * 16;
  constexpr int TOGETHER = D >= 256 ? 1 : 256 / D;  // heads whose sums fit into registers
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  for (int g = 0; g < groups; g++) {
    float* row = scores + g * padded;
    __m512 largest = nothing;
    for (int64_t column = begin; column < padded; column += 16) {
      __m512 part[16];
      for (int c = 0; c < 16; c++)
        part[c] = products(query + g * D, keys + (column + c < columns ? column + c : columns - 1) * D, D);
      __m512 score = _mm512_mul_ps(sums(part), _mm512_set1_ps(scaling));
      if (column + 16 > sight.prefix || column < sight.first) {
        __mmask16 seen = 0;
        for (int c = 0; c < 16; c++) seen |= static_cast<__mmask16>(sight.sees(column + c)) << c;
        score = _mm512_mask_mov_ps(nothing, seen, score);
      }
      store(row + column, score);
      largest = _mm512_max_ps(largest, score);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    __m512 total = _mm512_setzero_ps();
    for (int64_t column = begin; column < padded; column += 16) {
      const __m512 score = load(row + column);
      const __mmask16 seen = _mm512_cmp_ps_mask(score, nothing, _CMP_NEQ_OQ);
      const __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(score, top)));
      store(row + column, weight);
      total = _mm512_add_ps(total, weight);
    }
    const __m512 part = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
    for (int64_t column = begin; column < padded; column += 16)
      store(row + column, _mm512_mul_ps(load(row + column), part));
  }
  for (int first = 0; first < groups; first += TOGETHER) {
    const int heads = groups - first < TOGETHER ? groups - first : TOGETHER;
    __m512 sum[TOGETHER][D / 16];
    for (int g = 0; g < TOGETHER; g++)
      for (int d = 0; d < D / 16; d++) sum[g][d] = _mm512_setzero_ps();
    for (int64_t column = begin; column < columns; column++) {
      __m512 value[D / 16];
      for (int d = 0; d < D / 16; d++) value[d] = load(values + column * D + 16 * d);
      for (int g = 0; g < TOGETHER; g++) {
        // A head that is not there repeats the last: a branch here would keep the sums out of registers.
        const __m512 weight = _mm512_set1_ps(scores[(first + (g < heads ? g : heads - 1)) * padded + column]);
        for (int d = 0; d < D / 16; d++) sum[g][d] = _mm512_fmadd_ps(weight, value[d], sum[g][d]);
      }
    }
    for (int g = 0; g < heads; g++)
      for (int d = 0; d < D / 16; d++) store(to + (first + g) * D + 16 * d, sum[g][d]);
  }
}

template <class T>
void rotate(T* to, const T* head, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d += 16) {
    const __m512 low = load(head + d), high = load(head + half + d);
    const __m512 first = _mm512_sub_ps(rounded(_mm512_mul_ps(low, load(cosine + d)), head),
                                       rounded(_mm512_mul_ps(high, load(sine + d)), head));
    const __m512 second = _mm512_add_ps(rounded(_mm512_mul_ps(high, load(cosine + half + d)), head),
                                        rounded(_mm512_mul_ps(low, load(sine + half + d)), head));
    store(to + d, first);
    store(to + half + d, second);
  }
}
