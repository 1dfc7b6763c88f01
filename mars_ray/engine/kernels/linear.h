// A linear layer with packed weights: out = x W^T. matrix.h describes the layout.
//
// Each row is summed in the same order regardless of the other rows, so its result does not depend on the batch.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "matrix.h"
#include "unpack.h"

constexpr int TURNS = 4;            // most tiles that take turns
constexpr int64_t PART_STEPS = 64;  // steps of a turn; their weights stay in the first cache

// Some steps of a block, and what is prefetched meanwhile.
struct Steps {
  int64_t first, last;
  Prefetch ahead;
};

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

// Adds the products of R rows with some steps of a block to `sums`.
template <class Dot, int R>
inline void tile(const Rows& x, int64_t row, const char* block, const Steps& steps, Floats sums[R][2]) {
  const int32_t* from = x.words + row * x.stride;
  const int64_t stride = x.stride;
  const char* weights = block + steps.first * Dot::BYTES;
  Prefetch ahead = steps.ahead;
  Floats sum[R][2];  // a local array, so that the compiler keeps the sums in registers
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sum[r][0] = sums[r][0], sum[r][1] = sums[r][1];
  for (int64_t step = steps.first; step < steps.last; step++, weights += Dot::BYTES) {
    Words left, right;
    Dot::load(weights, left, right);
    ahead.step<Dot::BYTES>();
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Words word = broadcast_word(from[r * stride + step]);
      sum[r][0] = Dot::add(sum[r][0], left, word);
      sum[r][1] = Dot::add(sum[r][1], right, word);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

// Adds what R rows have summed over a half of a group of INT4 weights to their products with the group.
template <int R, class Dot>
inline void add_half(const Rows& x, int64_t row, int64_t group, int half, const char* multipliers,
                     const typename Dot::Part part[R][2], Floats product[R][2]) {
#pragma GCC unroll 2
  for (int side = 0; side < 2; side++) {
    const char* bytes = multipliers + half * COLUMNS + W * side;
    const Floats multiplier = to_floats(load_bytes(bytes)), offset = to_floats(load_bytes(bytes + 2 * COLUMNS));
#pragma GCC unroll 8
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
inline void to_products(const typename Dot::Part part[R][2], Floats product[R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int side = 0; side < 2; side++) product[r][side] = to_floats(Dot::total(part[r][side]));
}

// The same as `tile` for rows in 8 bits. Each group is summed exactly, and then multiplied by its scale.
template <int R, Format FORMAT>
inline void tile_in_groups(const Rows& x, int64_t row, const char* block, const Steps& steps, Floats sums[R][2]) {
  using Dot = std::conditional_t<FORMAT == INT8, Int8Dot, Int4Dot>;
  constexpr int STEP = FORMAT == INT8 ? INT8_STEP : INT4_STEP;
  constexpr int HALVES = FORMAT == INT8 ? 1 : 2, STEPS = GROUP_STEPS / HALVES;
  constexpr int GROUP_BYTES = FORMAT == INT8 ? INT8_GROUP : INT4_GROUP;
  const int64_t first = steps.first / GROUP_STEPS, last = steps.last / GROUP_STEPS;
  const char* weights = block + first * GROUP_BYTES;
  Prefetch ahead = steps.ahead;
  Floats sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sum[r][0] = sums[r][0], sum[r][1] = sums[r][1];
  for (int64_t group = first; group < last; group++) {
    const char* scales = weights + GROUP_STEPS * STEP;
    Floats product[R][2];  // whole numbers, which floats hold exactly
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      typename Dot::Part part[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        if constexpr (FORMAT == INT8 && Int8Dot::OFFSET != 0)
          part[r][0] = part[r][1] = (Ints)broadcast_word(x.offsets[(row + r) * x.groups + group]);
        else part[r][0] = part[r][1] = typename Dot::Part{};
      }
      for (int step = 0; step < STEPS; step++, weights += STEP) {
        Words words = load_words(weights), more;
        ahead.step<STEP>();
        if constexpr (FORMAT == INT8) {
          more = load_words(weights + 4 * W);
        } else {
          more = words >> 4 & 0x0f0f0f0fu;
          words &= 0x0f0f0f0fu;
        }
        const typename Dot::Weights left = Dot::prepare(words), right = Dot::prepare(more);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const int32_t* from = x.words + (row + r) * x.stride + group * GROUP_STEPS + half * STEPS;
          const Words word = broadcast_word(from[step]);
          part[r][0] = Dot::add(part[r][0], left, word);
          part[r][1] = Dot::add(part[r][1], right, word);
        }
      }
      if constexpr (FORMAT == INT8) to_products<R, Dot>(part, product);
      else add_half<R, Dot>(x, row, group, half, scales + 2 * COLUMNS, part, product);
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
      const Floats scale = load_float16(scales + 2 * W * side);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const float of_row = x.scales[(row + r) * x.groups + group];
        sum[r][side] = multiply_add(product[r][side], broadcast(of_row) * scale, sum[r][side]);
      }
    }
    if (ahead.tiles == 1 && STEP >= LINE) ahead.all<GROUP_BYTES - GROUP_STEPS * STEP>();
    weights += GROUP_BYTES - GROUP_STEPS * STEP;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
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
  int64_t column, steps;
};

// Adds the products of R rows with some steps of a block to `sums`. After its last step, passes the sums on.
template <int R>
void block(const ColumnBlock& b, const Rows& x, int64_t row, const Steps& steps, Floats sums[][2], const Put& to) {
  if (b.format == FLOAT32) tile<DotFloat32, R>(x, row, b.weights, steps, sums);
  else if (b.format == BFLOAT16) tile<DotBFloat16, R>(x, row, b.weights, steps, sums);
  else if constexpr (R <= GROUP_ROWS) {  // linear() divides rows in 8 bits into tiles of this size
    if (b.format == INT8) tile_in_groups<R, INT8>(x, row, b.weights, steps, sums);
    else tile_in_groups<R, INT4>(x, row, b.weights, steps, sums);
  }
  if (steps.last < b.steps) return;
  for (int r = 0; r < R; r++) {
    for (int side = 0; side < 2; side++)
      if (b.bias) sums[r][side] = sums[r][side] + load(b.bias + W * side);
    to.put(to.owner, row + r, b.column, sums[r][0], sums[r][1]);
  }
}

using Block = void (*)(const ColumnBlock&, const Rows&, int64_t, const Steps&, Floats[][2], const Put&);
struct BlockOfRows {
  Block of[ROWS];
  template <int... R>
  constexpr BlockOfRows(std::integer_sequence<int, R...>) : of{block<R + 1>...} {}
};
constexpr BlockOfRows BLOCKS{std::make_integer_sequence<int, ROWS>{}};  // by the number of rows less one

// Computes some blocks of a linear layer for all rows, in tiles of similar size.
//
// Tiles take turns over parts of a block, and each prefetches its share of the weights PART_STEPS further on, also in the
// next block. If each went through the whole block, the first one would wait for memory, and memory for the others.
template <class Act>
void linear(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  if constexpr (TILES)
    if (fits_tiles(w.format, rows)) return linear_in_tiles(w, x, rows, blocks, act);
  const auto call = [](void* owner, int64_t row, int64_t column, Floats left, Floats right) {
    (*static_cast<const Act*>(owner))(row, column, left, right);
  };
  const Put to{call, const_cast<Act*>(&act)};
  const bool in_groups = w.format == INT8 || w.format == INT4, unpacks = w.format == INT4 && rows >= UNPACK_ROWS;
  const int64_t most = in_groups ? GROUP_ROWS : ROWS;
  const int64_t tiles = (rows + most - 1) / most;
  const int64_t steps = in_groups ? w.depth / 4 : w.format == BFLOAT16 && PAIRS ? w.depth / 2 : w.depth;
  const int64_t bytes = w.block_bytes() / steps;
  const int64_t group = in_groups ? bytes * GROUP_STEPS : LINE, ahead = (AHEAD + group - 1) / group * group;
  for (int64_t index = blocks.first; index < blocks.last; index++) {
    const int64_t column = index * COLUMNS;
    const char* weights = unpacks ? unpacked(w.block(index), w.depth) : w.block(index);
    const float* bias = w.bias ? w.bias + column : nullptr;
    const ColumnBlock b{unpacks ? INT8 : w.format, weights, bias, column, steps};
    for (int64_t begin = 0; begin < tiles; begin += TURNS) {
      const int64_t turns = std::min<int64_t>(TURNS, tiles - begin), part = turns == 1 ? steps : PART_STEPS;
      const bool prefetches = begin == 0 && !unpacks;  // later tiles find the weights in the cache
      Floats sums[TURNS][ROWS][2];
      for (int64_t turn = 0; turn < turns; turn++)
        for (int64_t r = 0; r < std::min(rows, most); r++) sums[turn][r][0] = sums[turn][r][1] = Floats{};
      for (int64_t first = 0; first < steps; first += part)
        for (int64_t turn = 0; turn < turns; turn++) {
          const int64_t tile = begin + turn, row = rows * tile / tiles, last = std::min(steps, first + part);
          const int64_t distance = turns == 1 ? ahead : bytes * (first + part + (last - first) * turn / turns);
          const Prefetch what{weights + distance, prefetches ? turns : 0, bytes};
          BLOCKS.of[rows * (tile + 1) / tiles - row - 1](b, x, row, {first, last, what}, sums[turn], to);
        }
    }
  }
}
