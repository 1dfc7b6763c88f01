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

template <class Dot, int R>
inline void tile(const Rows& x, int64_t row, const char* weights, int64_t steps, bool first, Floats out[R][2]) {
  const int32_t* from = x.words + row * x.stride;
  const int64_t stride = x.stride;
  Floats sum[R][2];  // a local array, so that the compiler keeps the sums in registers
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = Floats{};
  for (int64_t step = 0; step < steps; step++, weights += Dot::BYTES) {
    Words left, right;
    Dot::load(weights, left, right);
    if (first) prefetch<Dot::BYTES>(weights, step);
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

// The same for 8-bit rows. Each group is summed in integers and then multiplied by its scale.
template <int R, Format FORMAT>
inline void tile_in_groups(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, Floats out[R][2]) {
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
        if (first) prefetch<STEP>(weights, step);
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
#pragma GCC unroll 2
      for (int side = 0; side < 2; side++) {
        [[maybe_unused]] Floats multiplier, offset;
        if constexpr (FORMAT == INT4) {
          const char* bytes = scales + (2 + half) * COLUMNS + W * side;
          multiplier = to_floats(load_bytes(bytes)), offset = to_floats(load_bytes(bytes + 2 * COLUMNS));
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          const float* sums = x.sums + 2 * ((row + r) * x.groups + group);
          const Floats total = to_floats(Dot::total(part[r][side]));
          if constexpr (FORMAT == INT8) {
            product[r][side] = Dot::OFFSET ? total - broadcast(Dot::OFFSET * (sums[0] + sums[1])) : total;
          } else {
            product[r][side] = half ? multiply_add(total, multiplier, product[r][side]) : total * multiplier;
            product[r][side] = product[r][side] - broadcast(sums[half]) * offset;
          }
        }
      }
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

// Splits many rows into two halves, because separate sums for groups and rows need twice as many registers.
template <int R, Format FORMAT>
inline void halves(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, Floats out[R][2]) {
  constexpr int HALF = R > GROUP_ROWS ? (R + 1) / 2 : R;
  tile_in_groups<HALF, FORMAT>(x, row, weights, groups, first, out);
  if constexpr (R > HALF) tile_in_groups<R - HALF, FORMAT>(x, row + HALF, weights, groups, false, out + HALF);
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
};

template <int R>
void block(const ColumnBlock& b, const Rows& x, int64_t row, const Put& to) {
  const bool first = row == 0;  // later tiles find the weights in the cache
  const int64_t groups = b.depth / GROUP;
  Floats out[R][2];
  if (b.format == FLOAT32) tile<DotFloat32, R>(x, row, b.weights, b.depth, first, out);
  else if (b.format == BFLOAT16) tile<DotBFloat16, R>(x, row, b.weights, PAIRS ? b.depth / 2 : b.depth, first, out);
  else if (b.format == INT8) halves<R, INT8>(x, row, b.weights, groups, first, out);
  else halves<R, INT4>(x, row, b.weights, groups, first, out);
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
  if (fits_tiles(w.format, rows)) return linear_in_tiles(w, x, rows, blocks, act);
  const auto call = [](void* owner, int64_t row, int64_t column, Floats left, Floats right) {
    (*static_cast<const Act*>(owner))(row, column, left, right);
  };
  const Put to{call, const_cast<Act*>(&act)};
  const bool unpacks = w.format == INT4 && rows >= UNPACK_ROWS;
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
  for (int64_t index = blocks.first; index < blocks.last; index++) {
    const int64_t column = index * COLUMNS;
    const char* weights = unpacks ? unpacked(w.block(index), w.depth) : w.block(index);
    const ColumnBlock b{unpacks ? INT8 : w.format, weights, w.bias ? w.bias + column : nullptr, column, w.depth};
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = rows * t / tiles;
      BLOCKS.of[rows * (t + 1) / tiles - row - 1](b, x, row, to);
    }
  }
}
