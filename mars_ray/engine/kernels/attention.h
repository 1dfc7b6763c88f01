// Attention of packed positions over the cache, and the rotary embedding applied before it.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "linear.h"

// The columns of its slot that a position may attend to: the first `prefix`, and later ones whose `behind` bit is set.
struct Sight {
  int64_t prefix;
  uint64_t behind;
  int64_t first;  // first column of the sliding window; 0 without a window
  int64_t columns() const { return prefix + (behind ? 64 - __builtin_clzll(behind) : 0); }
  bool sees(int64_t column) const {
    if (column < prefix) return column >= first;
    return column - prefix < 64 && (behind >> (column - prefix) & 1);
  }
};

constexpr int64_t QUERIES = 24;  // maximum queries that read the same keys together

// One query head of one position.
template <class T>
struct Query {
  const T* from;
  T* to;
  Sight sight;
};

// Transposes 32 keys into the layout of weights in `tile`, word by word. With fewer than 32 keys, the last is repeated.
template <int D, class T>
void transpose(const T* keys, int64_t count, int32_t* to) {
  constexpr int64_t words = D * sizeof(T) / 4;
  for (int side = 0; side < 2; side++)
    for (int64_t word = 0; word < words; word += 16) {
      __m512i row[16], pair[16], four[16];
      for (int i = 0; i < 16; i++) {
        const int64_t key = std::min<int64_t>(16 * side + i, count - 1);
        row[i] = _mm512_loadu_si512(reinterpret_cast<const int32_t*>(keys + key * D) + word);
      }
      for (int i = 0; i < 16; i += 2) {
        pair[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
      }
      for (int i = 0; i < 16; i += 4)
        for (int high = 0; high < 2; high++) {
          four[i + 2 * high] = _mm512_unpacklo_epi64(pair[i + high], pair[i + high + 2]);
          four[i + 2 * high + 1] = _mm512_unpackhi_epi64(pair[i + high], pair[i + high + 2]);
        }
      for (int i = 0; i < 4; i++) {
        const __m512i even = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xdd);
        const __m512i more_even = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0x88);
        const __m512i more_odd = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0xdd);
        int32_t* out = to + (word + i) * COLUMNS + 16 * side;
        _mm512_storeu_si512(out, _mm512_shuffle_i32x4(even, more_even, 0x88));
        _mm512_storeu_si512(out + 4 * COLUMNS, _mm512_shuffle_i32x4(odd, more_odd, 0x88));
        _mm512_storeu_si512(out + 8 * COLUMNS, _mm512_shuffle_i32x4(even, more_even, 0xdd));
        _mm512_storeu_si512(out + 12 * COLUMNS, _mm512_shuffle_i32x4(odd, more_odd, 0xdd));
      }
    }
}

// Dot products of R queries with 32 keys.
template <class Dot, int R>
void score(const Rows& queries, int64_t first, const char* keys, int64_t words, float* scores, int64_t padded) {
  __m512 out[R][2];
  tile<Dot, R>(queries, first, keys, words, false, out);
  for (int r = 0; r < R; r++) store(scores + r * padded, out[r][0]), store(scores + r * padded + 16, out[r][1]);
}

using Score = void (*)(const Rows&, int64_t, const char*, int64_t, float*, int64_t);
template <class Dot>
constexpr Score SCORES[ROWS] = {score<Dot, 1>, score<Dot, 2>, score<Dot, 3>, score<Dot, 4>,  score<Dot, 5>,  score<Dot, 6>,
                                score<Dot, 7>, score<Dot, 8>, score<Dot, 9>, score<Dot, 10>, score<Dot, 11>, score<Dot, 12>};

// Turns a row of scores into unnormalized softmax weights in place, and returns their sum.
inline float soften(float* row, const Sight& sight, int64_t begin, int64_t padded, float scaling) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 largest = nothing;
  for (int64_t column = begin; column < padded; column += 16) {
    __m512 score = _mm512_mul_ps(load(row + column), _mm512_set1_ps(scaling));
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
  return _mm512_reduce_add_ps(total);
}

// Sums values with the weights of R queries. If `rows` < R, the last row is repeated, which is cheaper than a branch.
template <int D, int R, class T>
void gather(const Query<T>* queries, const float* weights, const float* totals, int64_t rows, const T* values,
            int64_t begin, int64_t columns, int64_t padded) {
  __m512 sum[R][D / 16];
  const float* from[R];
  for (int r = 0; r < R; r++) {
    from[r] = weights + std::min<int64_t>(r, rows - 1) * padded;
    for (int d = 0; d < D / 16; d++) sum[r][d] = _mm512_setzero_ps();
  }
  for (int64_t column = begin; column < columns; column++) {
    __m512 value[D / 16];
    for (int d = 0; d < D / 16; d++) value[d] = load(values + column * D + 16 * d);
    for (int r = 0; r < R; r++) {
      const __m512 weight = _mm512_set1_ps(from[r][column]);
      for (int d = 0; d < D / 16; d++) sum[r][d] = _mm512_fmadd_ps(weight, value[d], sum[r][d]);
    }
  }
  for (int r = 0; r < R && r < rows; r++)
    for (int d = 0; d < D / 16; d++)
      store(queries[r].to + 16 * d, _mm512_mul_ps(sum[r][d], _mm512_set1_ps(1.0f / totals[r])));
}

// Returns the number of floats that `attend` needs.
inline int64_t scratch_size(int64_t columns, int64_t head_dim) { return QUERIES * (columns + COLUMNS + head_dim); }

// Attention of up to QUERIES queries of one slot that share a key head. `scratch` belongs to this thread.
//
// The sums of a query have the same order whatever the other queries are: columns that only they see add zeros.
template <int D, class T>
void attend(const Query<T>* queries, int64_t rows, const T* keys, const T* values, float scaling, float* scratch) {
  constexpr int64_t words = D * sizeof(T) / 4;
  constexpr int TOGETHER = D > 192 ? 1 : 384 / D, FEW = D > 192 ? 1 : TOGETHER / 2;  // sums that fit into registers
  using Dot = std::conditional_t<sizeof(T) == 4, DotFloat32, DotBFloat16>;
  int64_t columns = 0, begin = queries[0].sight.first;
  for (int64_t r = 0; r < rows; r++) {
    columns = std::max(columns, queries[r].sight.columns());
    begin = std::min(begin, queries[r].sight.first);
  }
  begin = begin / COLUMNS * COLUMNS;
  const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS;
  T* side_by_side = reinterpret_cast<T*>(scratch + rows * padded);
  for (int64_t r = 0; r < rows; r++) std::copy_n(queries[r].from, D, side_by_side + r * D);
  const Rows x{reinterpret_cast<const int32_t*>(side_by_side), words, nullptr, nullptr, 0};
  alignas(64) int32_t block[words * COLUMNS];
  for (int64_t column = begin; column < columns; column += COLUMNS) {
    transpose<D>(keys + column * D, columns - column, block);
    for (int64_t r = 0; r < rows; r += ROWS)
      SCORES<Dot>[std::min<int64_t>(ROWS, rows - r) - 1](x, r, reinterpret_cast<const char*>(block), words,
                                                         scratch + r * padded + column, padded);
  }
  float totals[QUERIES];
  for (int64_t r = 0; r < rows; r++)
    totals[r] = soften(scratch + r * padded, queries[r].sight, begin, padded, scaling);
  for (int64_t r = 0; r < rows; r += TOGETHER) {
    const auto sum = rows - r > FEW ? gather<D, TOGETHER, T> : gather<D, FEW, T>;
    sum(queries + r, scratch + r * padded, totals + r, rows - r, values, begin, columns, padded);
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
