// Attention of packed positions over the cache, and the rotary embedding applied before it.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "activation.h"
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

// How products of queries and keys become scores.
struct Scores {
  float scaling, cap;  // soft cap; 0 means none
};

// One query head of one position.
template <class T>
struct Query {
  const T* from;
  T* to;
  Sight sight;
};

// The numbers in which keys are multiplied with queries.
template <class T>
using Factor = std::conditional_t<PAIRS, T, float>;

// W words of a key.
template <class T>
inline Words key_words(const T* key, int64_t word) {
  if constexpr (std::is_same_v<T, Factor<T>>) return load_words(reinterpret_cast<const int32_t*>(key) + word);
  else return as_words(load(key + word));
}

// Transposes COLUMNS keys into the layout of weights, word by word. With fewer keys, the last is repeated.
template <int D, class T>
void transpose(const T* keys, int64_t count, int32_t* to) {
  constexpr int64_t words = D * sizeof(Factor<T>) / 4;
  for (int side = 0; side < 2; side++)
    for (int64_t word = 0; word < words; word += W) {
      Words row[W];
      for (int i = 0; i < W; i++) row[i] = key_words(keys + std::min<int64_t>(W * side + i, count - 1) * D, word);
      transpose_square(row);
      for (int i = 0; i < W; i++) store_words(to + (word + i) * COLUMNS + W * side, row[i]);
    }
}

// Prefetches COLUMNS keys or values of a slot. Steps read so many slots that the processor does not foresee them.
template <int D, class T>
inline void fetch(const T* from) {
  for (int64_t at = 0; at < COLUMNS * D; at += 64 / sizeof(T)) prefetch_line(from + at);
}

// Dot products of R queries with COLUMNS keys.
template <class Dot, int R>
void score(const Rows& queries, int64_t first, const char* keys, int64_t words, float* scores, int64_t padded) {
  Floats out[R][2] = {};
  tile<Dot, R>(queries, first, keys, {0, words}, out);
  for (int r = 0; r < R; r++) store(scores + r * padded, out[r][0]), store(scores + r * padded + W, out[r][1]);
}

using Score = void (*)(const Rows&, int64_t, const char*, int64_t, float*, int64_t);
template <class Dot>
struct ScoreOfRows {
  Score of[ROWS];
  template <int... R>
  constexpr ScoreOfRows(std::integer_sequence<int, R...>) : of{score<Dot, R + 1>...} {}
};
template <class Dot>
constexpr ScoreOfRows<Dot> SCORES{std::make_integer_sequence<int, ROWS>{}};  // by the number of queries less one

// Turns a row of scores into unnormalized softmax weights, and returns their sum. `to` may be the memory of `row`, because
// a weight is written at or before the scores still to be read.
template <class Weight>
float soften(float* row, Weight* to, const Sight& sight, int64_t begin, int64_t padded, float scaling) {
  const Floats nothing = broadcast(-INFINITY);
  Floats largest = nothing;
  for (int64_t column = begin; column < padded; column += W) {
    Floats score = load(row + column) * broadcast(scaling);
    if (column + W > sight.prefix || column < sight.first) {
      uint32_t seen = 0;
      for (int c = 0; c < W; c++) seen |= static_cast<uint32_t>(sight.sees(column + c)) << c;
      score = select(mask_of(seen), score, nothing);
    }
    store(row + column, score);
    largest = maximum(largest, score);
  }
  const Floats top = broadcast(largest_of(largest));
  Floats total = Floats{};
  for (int64_t column = begin; column < padded; column += W) {
    const Floats score = load(row + column);
    const Floats weight = select(differ(score, nothing), exponential(score - top), Floats{});
    store(to + column, weight);
    total = total + weight;
  }
  return sum_of(total);
}

// Sums values with the weights of R queries, V vectors of a value at a time. If `rows` < R, the last row is repeated,
// which is cheaper than a branch.
template <int D, int V, int R, class T>
void gather(const Query<T>* queries, const float* weights, const float* totals, int64_t rows, const T* values,
            int64_t begin, int64_t columns, int64_t padded) {
  const float* from[R];
  for (int r = 0; r < R; r++) from[r] = weights + std::min<int64_t>(r, rows - 1) * padded;
  for (int64_t part = 0; part < D; part += V * W) {
    Floats sum[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] = Floats{};
    for (int64_t column = begin; column < columns; column++) {
      Floats value[V];
      for (int v = 0; v < V; v++) value[v] = load(values + column * D + part + W * v);
      for (int r = 0; r < R; r++) {
        const Floats weight = broadcast(from[r][column]);
        for (int v = 0; v < V; v++) sum[r][v] = multiply_add(weight, value[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R && r < rows; r++)
      for (int v = 0; v < V; v++) store(queries[r].to + part + W * v, sum[r][v] * broadcast(1.0f / totals[r]));
  }
}

// Lays out values like weights: a word holds the same element of two consecutive values. In each COLUMNS elements the even
// ones come before the odd ones. The last value is repeated up to `padded`.
template <int D>
void pair_values(const bfloat16* values, int64_t count, int64_t padded, int32_t* to) {
  for (int64_t pair = 0; pair < padded / 2; pair++)
    for (int part = 0; part < D / COLUMNS; part++) {
      const auto words = [&](int64_t value) {
        return load_words(values + std::min(value, count - 1) * D + part * COLUMNS);
      };
      const Words one = words(2 * pair), other = words(2 * pair + 1);
      int32_t* pairs = to + (part * padded / 2 + pair) * COLUMNS;
      store_words(pairs, (one & 0xffffu) | other << 16);
      store_words(pairs + W, one >> 16 | (other & 0xffff0000u));
    }
}

// The same as `gather` for all queries, in tiles. Weights are rounded to bfloat16, as transformers does.
template <int D>
void gather_in_tiles(const Query<bfloat16>* queries, const Rows& weights, const float* totals, int64_t rows,
                     const bfloat16* values, int64_t columns, int64_t padded) {
  constexpr int64_t LAID_OUT = 128;  // values at once
  alignas(64) int32_t pairs[LAID_OUT / 2 * D];
  alignas(64) float sums[QUERIES][D];
  for (int64_t column = 0; column < padded; column += LAID_OUT) {
    const int64_t count = std::min(padded - column, LAID_OUT);
    const Rows some{weights.words + column / 2, weights.stride};
    pair_values<D>(values + column * D, columns - column, count, pairs);
    for (int part = 0; part < D / COLUMNS; part++) {
      const char* block = reinterpret_cast<const char*>(pairs + part * count / 2 * COLUMNS);
      (column ? multiply_few<true> : multiply_few<false>)(some, rows, block, count, sums[0] + part * COLUMNS, D);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < D; d += COLUMNS) {
      const Floats share = broadcast(1.0f / totals[r]);
      const Words even = as_words(rounded(load(sums[r] + d) * share, queries[r].to));
      const Words odd = as_words(rounded(load(sums[r] + d + W) * share, queries[r].to));
      store_words(queries[r].to + d, even >> 16 | odd);
    }
}

// Returns the number of floats that `attend` needs.
inline int64_t scratch_size(int64_t columns, int64_t head_dim) { return QUERIES * (columns + COLUMNS + head_dim); }

// Attention of up to QUERIES queries of one slot that share a key head. `scratch` belongs to this thread.
//
// The sums of a query have the same order whatever the other queries are: columns that only they see add zeros, because
// values are finite. Those of a model are, and `Step::write` makes those of adapters so.
template <int D, class T>
void attend(const Query<T>* queries, int64_t rows, const T* keys, const T* values, const Scores& how, float* scratch) {
  constexpr bool IN_TILES = TILES && sizeof(Factor<T>) == 2;
  constexpr int64_t words = D * sizeof(Factor<T>) / 4;
  constexpr int V = std::min(D / W, VALUE_VECTORS), TOGETHER = std::max(1, SUMS / V), FEW = std::max(1, TOGETHER / 2);
  using Dot = std::conditional_t<sizeof(Factor<T>) == 4, DotFloat32, DotBFloat16>;
  int64_t columns = 0, begin = queries[0].sight.first;
  for (int64_t r = 0; r < rows; r++) {
    columns = std::max(columns, queries[r].sight.columns());
    begin = std::min(begin, queries[r].sight.first);
  }
  begin = begin / COLUMNS * COLUMNS;
  const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS;
  Factor<T>* side_by_side = reinterpret_cast<Factor<T>*>(scratch + rows * padded);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < D; d += W) store(side_by_side + r * D + d, load(queries[r].from + d));
  const Rows x{reinterpret_cast<const int32_t*>(side_by_side), words};
  alignas(64) int32_t block[words * COLUMNS];
  for (int64_t column = begin; column < columns; column += COLUMNS) {
    fetch<D>(keys + (column + COLUMNS) * D);
    fetch<D>(values + column * D);
    transpose<D>(keys + column * D, columns - column, block);
    if constexpr (IN_TILES) {
      multiply_few<false>(x, rows, reinterpret_cast<const char*>(block), D, scratch + column, padded);
    } else {
      for (int64_t r = 0; r < rows; r += ROWS)
        SCORES<Dot>.of[std::min<int64_t>(ROWS, rows - r) - 1](x, r, reinterpret_cast<const char*>(block), words,
                                                              scratch + r * padded + column, padded);
    }
  }
  float totals[QUERIES];
  for (int64_t r = 0; r < rows; r++) {
    float* row = scratch + r * padded;
    if (how.cap) soft_cap(row + begin, padded - begin, how.scaling, how.cap);
    using Weight = std::conditional_t<IN_TILES, bfloat16, float>;
    totals[r] = soften(row, reinterpret_cast<Weight*>(row), queries[r].sight, begin, padded, how.cap ? 1.0f : how.scaling);
  }
  if constexpr (IN_TILES) {
    const Rows weights{reinterpret_cast<const int32_t*>(scratch) + begin / 2, padded};
    gather_in_tiles<D>(queries, weights, totals, rows, values + begin * D, columns - begin, padded - begin);
  } else {
    for (int64_t r = 0; r < rows; r += TOGETHER) {
      const auto sum = rows - r > FEW ? gather<D, V, TOGETHER, T> : gather<D, V, FEW, T>;
      sum(queries + r, scratch + r * padded, totals + r, rows - r, values, begin, columns, padded);
    }
  }
}

template <class T>
void rotate(T* to, const T* head, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d += W) {
    const Floats low = load(head + d), high = load(head + half + d);
    const Floats crossed = rounded(high * load(sine + d), head), other = rounded(low * load(sine + half + d), head);
    const Floats first = rounded(low * load(cosine + d), head) - crossed;
    const Floats second = rounded(high * load(cosine + half + d), head) + other;
    store(to + d, first);
    store(to + half + d, second);
  }
}
