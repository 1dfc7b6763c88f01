// A linear layer with packed weights: out = x W^T. matrix.h describes the layout.
//
// Each row is summed in the same order regardless of the other rows, so its result does not depend on the batch.
#pragma once
#include <type_traits>
#include <utility>

#include "amx.h"
#include "matrix.h"
#include "unpack.h"

struct DotFloat32 {
  static constexpr int BYTES = 8 * W;  // bytes of a step
  static void load(const char* weights, Words& left, Words& right) {
    left = load_words(weights), right = load_words(weights + 4 * W);
  }
  static Floats add(Floats sum, Words w, Words x) { return multiply_add(as_floats(w), as_floats(x), sum); }
};

struct DotHalves : DotFloat32 {
  static constexpr int BYTES = 4 * W;
  static void load(const char* weights, Words& left, Words& right) {
    const Words both = load_words(weights);
    left = both << 16, right = both & 0xffff0000u;
  }
};

#ifdef KERNELS_PAIRS
struct DotPairs : DotFloat32 {
  static Floats add(Floats sum, Words w, Words x) { return dot_pairs(sum, w, x); }
};
using DotBFloat16 = DotPairs;
#else
using DotBFloat16 = DotHalves;
#endif

// Multiplies R rows with a block of weights. Later rows find the weights in the cache, so only the first ones prefetch.
template <class Dot, int R>
inline void tile(const Rows& x, int64_t row, const char* weights, int64_t steps, bool prefetches, Floats out[R][2]) {
  const int32_t* from = x.words + row * x.stride;
  const int64_t stride = x.stride;
  Floats sum[R][2];  // a local array, so that the compiler keeps the sums in registers
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = Floats{};
  for (int64_t step = 0; step < steps; step++, weights += Dot::BYTES) {
    Words left, right;
    Dot::load(weights, left, right);
    if (prefetches) prefetch<Dot::BYTES>(weights, step);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Words word = broadcast_word(from[r * stride + step]);
      sum[r][0] = Dot::add(sum[r][0], left, word);
      sum[r][1] = Dot::add(sum[r][1], right, word);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) out[r][0] = sum[r][0], out[r][1] = sum[r][1];
}

// Adds what R rows have summed over a half of a group of INT4 weights to their products with the group.
template <int R, class Dot>
inline void add_half(const Rows& x, int64_t row, int64_t group, int half, const char* multipliers,
                     const typename Dot::Part part[R][2], Floats product[R][2]) {
#pragma GCC unroll 2
  for (int side = 0; side < 2; side++) {
    const char* bytes = multipliers + half * COLUMNS + W * side;
    const Floats multiplier = to_floats(load_bytes(bytes)), offset = to_floats(load_bytes(bytes + 2 * COLUMNS));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const float sum = x.sums[2 * ((row + r) * x.groups + group) + half];
      const Floats total = to_floats(Dot::total(part[r][side]));
      product[r][side] = half ? multiply_add(total, multiplier, product[r][side]) : total * multiplier;
      product[r][side] = product[r][side] - broadcast(sum) * offset;
    }
  }
}

// Returns what R rows have summed over a group of INT8 weights as their products with it.
template <int R, class Dot>
inline void to_products(const Rows& x, int64_t row, int64_t group, const typename Dot::Part part[R][2],
                        Floats product[R][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const float* sums = x.sums + 2 * ((row + r) * x.groups + group);
    for (int side = 0; side < 2; side++) {
      product[r][side] = to_floats(Dot::total(part[r][side]));
      if (Dot::OFFSET) product[r][side] = product[r][side] - broadcast(Dot::OFFSET * (sums[0] + sums[1]));
    }
  }
}

// The same as `tile` for rows in 8 bits. Each group is summed exactly, and then multiplied by its scale.
template <int R, Format FORMAT>
inline void tile_in_groups(const Rows& x, int64_t row, const char* weights, int64_t groups, bool prefetches, Floats out[R][2]) {
  using Dot = std::conditional_t<FORMAT == INT8, Int8Dot, Int4Dot>;
  constexpr int STEP = FORMAT == INT8 ? INT8_STEP : INT4_STEP;
  constexpr int HALVES = FORMAT == INT8 ? 1 : 2, STEPS = GROUP_STEPS / HALVES;
  Floats sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = Floats{};
  for (int64_t group = 0; group < groups; group++) {
    const char* scales = weights + GROUP_STEPS * STEP;
    Floats product[R][2];  // whole numbers, which floats hold exactly
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      typename Dot::Part part[R][2];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) part[r][0] = part[r][1] = typename Dot::Part{};
      for (int step = 0; step < STEPS; step++, weights += STEP) {
        Words words = load_words(weights), more;
        if (prefetches) prefetch<STEP>(weights, step);
        if constexpr (FORMAT == INT8) {
          more = load_words(weights + 4 * W);
        } else {
          more = words >> 4 & 0x0f0f0f0fu;
          words &= 0x0f0f0f0fu;
        }
        const typename Dot::Weights left = Dot::prepare(words), right = Dot::prepare(more);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const int32_t* from = x.words + (row + r) * x.stride + group * GROUP_STEPS + half * STEPS;
          const Words word = broadcast_word(from[step]);
          part[r][0] = Dot::add(part[r][0], left, word);
          part[r][1] = Dot::add(part[r][1], right, word);
        }
      }
      if constexpr (FORMAT == INT8) to_products<R, Dot>(x, row, group, part, product);
      else add_half<R, Dot>(x, row, group, half, scales + 2 * COLUMNS, part, product);
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
      const Floats scale = load_float16(scales + 2 * W * side);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const float of_row = x.scales[(row + r) * x.groups + group];
        sum[r][side] = multiply_add(product[r][side], broadcast(of_row) * scale, sum[r][side]);
      }
    }
    weights += (FORMAT == INT8 ? INT8_GROUP : INT4_GROUP) - GROUP_STEPS * STEP;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) out[r][0] = sum[r][0], out[r][1] = sum[r][1];
}

// The function that receives the COLUMNS finished columns of a row.
struct Put {
  void (*put)(void* owner, int64_t row, int64_t column, Floats left, Floats right);
  void* owner;
};

// A block of columns of a linear layer.
struct ColumnBlock {
  Format format;
  const char* weights;
  const float* bias;  // may be null
  int64_t column, depth;
  bool prefetches;
};

template <int R>
void block(const ColumnBlock& b, const Rows& x, int64_t row, const Put& to) {
  const bool first = b.prefetches && row == 0;
  const int64_t groups = b.depth / GROUP;
  Floats out[R][2];
  if (b.format == FLOAT32) tile<DotFloat32, R>(x, row, b.weights, b.depth, first, out);
  else if (b.format == BFLOAT16) tile<DotBFloat16, R>(x, row, b.weights, PAIRS ? b.depth / 2 : b.depth, first, out);
  else if constexpr (R <= GROUP_ROWS) {  // linear() divides rows in 8 bits into tiles of this size
    if (b.format == INT8) tile_in_groups<R, INT8>(x, row, b.weights, groups, first, out);
    else tile_in_groups<R, INT4>(x, row, b.weights, groups, first, out);
  }
  for (int r = 0; r < R; r++) {
    for (int side = 0; side < 2; side++)
      if (b.bias) out[r][side] = out[r][side] + load(b.bias + W * side);
    to.put(to.owner, row + r, b.column, out[r][0], out[r][1]);
  }
}

using Block = void (*)(const ColumnBlock&, const Rows&, int64_t, const Put&);
struct BlockOfRows {
  Block of[ROWS];
  template <int... R>
  constexpr BlockOfRows(std::integer_sequence<int, R...>) : of{block<R + 1>...} {}
};
constexpr BlockOfRows BLOCKS{std::make_integer_sequence<int, ROWS>{}};  // by the number of rows less one

// Computes some blocks of a linear layer for all rows, in tiles of similar size.
template <class Act>
void linear(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  if constexpr (TILES)
    if (fits_tiles(w.format, rows)) return linear_in_tiles(w, x, rows, blocks, act);
  const auto call = [](void* owner, int64_t row, int64_t column, Floats left, Floats right) {
    (*static_cast<const Act*>(owner))(row, column, left, right);
  };
  const Put to{call, const_cast<Act*>(&act)};
  const bool unpacks = w.format == INT4 && rows >= UNPACK_ROWS;
  const int64_t most = w.format == INT8 || w.format == INT4 ? GROUP_ROWS : ROWS;
  const int64_t tiles = (rows + most - 1) / most;
  for (int64_t index = blocks.first; index < blocks.last; index++) {
    const int64_t column = index * COLUMNS;
    const char* weights = unpacks ? unpacked(w.block(index), w.depth) : w.block(index);
    const float* bias = w.bias ? w.bias + column : nullptr;
    const ColumnBlock b{unpacks ? INT8 : w.format, weights, bias, column, w.depth, !unpacks};
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = rows * t / tiles;
      BLOCKS.of[rows * (t + 1) / tiles - row - 1](b, x, row, to);
    }
  }
}
