// A linear layer with packed weights: out = x W^T, for few rows of x.
//
// Every format is laid out for the same loop over blocks of COLUMNS columns, the elements of two vectors. A step holds the
// weights that are multiplied by one 4-byte word of x: one 32-bit number, two 16-bit numbers or four 8-bit numbers. Each
// row is summed in the same order regardless of the other rows, so its result does not depend on the batch.
//
// Families without products of bfloat16 pairs read x in float32. A step then holds the weights of one number of x: the
// words have a column of the first vector in their lower half, and a column of the second vector in their upper half.
#pragma once
#include <type_traits>
#include <utility>

#include "simd.h"

constexpr int COLUMNS = 2 * W;  // columns of a block
constexpr int GROUP = 32;       // 8-bit or 4-bit numbers that share a scale
constexpr int GROUP_STEPS = 8;  // steps of a group, with 4 weights each
constexpr int AHEAD = 4096;     // prefetch distance in bytes: weights arrive while earlier ones are multiplied

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

// The layout of packed weights, for packed.py.
struct WeightLayout {
  int64_t columns, pairs, byte_offset;
};

struct Matrix {
  const void* weights;
  const float* bias;    // one value per column, or null
  int64_t columns;      // padded to a multiple of COLUMNS
  int64_t depth;
  Format format;
};

// The low-rank factors for up to three layers that read the same input and are packed as one matrix.
struct LowRank {
  Matrix down;   // projects to the ranks of all layers, concatenated
  Matrix up[3];  // per layer, projects from its ranks to its columns
  int64_t parts;
};

// Rows of x as a linear layer reads them: unchanged, in float32, or rounded to 8 bits in groups with one scale per group.
struct Rows {
  const int32_t* words;
  int64_t stride;  // words from one row to the next
  const float* scales;
  const int32_t* sums;
  int64_t groups;
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

// Prefetches the weights of later steps. The hardware prefetcher does so only under light load.
template <int BYTES>
inline void prefetch(const char* weights, int64_t step) {
  if constexpr (BYTES < 64) {
    if (step % (64 / BYTES) == 0) prefetch_line(weights + AHEAD);
  } else {
    for (int line = 0; line < BYTES; line += 64) prefetch_line(weights + AHEAD + line);
  }
}

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

constexpr int INT8_STEP = 8 * W, INT4_STEP = 4 * W;                // bytes of a step
constexpr int INT8_GROUP = GROUP_STEPS * INT8_STEP + 2 * COLUMNS;  // bytes of a group, with its scales
constexpr int INT4_GROUP = GROUP_STEPS * INT4_STEP + 4 * COLUMNS;  // bytes of a group, with its scales and minima

// The same for 8-bit rows. Each group is summed in integers and then multiplied by its scale.
//
// INT8 weights are stored with BYTE_OFFSET added. A group is its steps, then the scales of all columns in float16. An
// INT4 step has the columns of the first vector in the low halves of the bytes, and those of the second vector in the
// high halves. A group ends with the scales and minima of all columns in float16.
template <int R, Format FORMAT>
inline void tile_in_groups(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, Floats out[R][2]) {
  using Dot = std::conditional_t<FORMAT == INT8, Int8Dot, Int4Dot>;
  constexpr int STEP = FORMAT == INT8 ? INT8_STEP : INT4_STEP;
  Floats sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = Floats{};
  for (int64_t group = 0; group < groups; group++) {
    typename Dot::Part part[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const int32_t total = FORMAT == INT8 ? -BYTE_OFFSET * x.sums[(row + r) * x.groups + group] : 0;
      part[r][0] = part[r][1] = Dot::start(total);
    }
    for (int step = 0; step < GROUP_STEPS; step++, weights += STEP) {
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
        const Words word = broadcast_word(x.words[(row + r) * x.stride + group * GROUP_STEPS + step]);
        part[r][0] = Dot::add(part[r][0], left, word);
        part[r][1] = Dot::add(part[r][1], right, word);
      }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
      const Floats scale = load_float16(weights + 2 * W * side);
      [[maybe_unused]] Floats least;
      if constexpr (FORMAT == INT4) least = load_float16(weights + 2 * COLUMNS + 2 * W * side);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const float of_row = x.scales[(row + r) * x.groups + group];
        const Floats of_part = broadcast(of_row) * scale;
        if constexpr (FORMAT == INT4) {
          const Floats total = broadcast(of_row * static_cast<float>(x.sums[(row + r) * x.groups + group]));
          sum[r][side] = multiply_add(total, least, sum[r][side]);
        }
        sum[r][side] = multiply_add(to_floats(Dot::total(part[r][side])), of_part, sum[r][side]);
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

template <int R>
void block(const Matrix& w, const Rows& x, int64_t row, int64_t index, const Put& to) {
  const bool first = row == 0;  // later tiles find the weights in the cache
  const int64_t column = index * COLUMNS;
  const char* weights = static_cast<const char*>(w.weights);
  Floats out[R][2];
  if (w.format == FLOAT32) {
    tile<DotFloat32, R>(x, row, weights + index * w.depth * DotFloat32::BYTES, w.depth, first, out);
  } else if (w.format == BFLOAT16) {
    const int64_t steps = PAIRS ? w.depth / 2 : w.depth;
    tile<DotBFloat16, R>(x, row, weights + index * steps * DotBFloat16::BYTES, steps, first, out);
  } else if (w.format == INT8) {
    halves<R, INT8>(x, row, weights + index * (w.depth / GROUP) * INT8_GROUP, w.depth / GROUP, first, out);
  } else {
    halves<R, INT4>(x, row, weights + index * (w.depth / GROUP) * INT4_GROUP, w.depth / GROUP, first, out);
  }
  for (int r = 0; r < R; r++) {
    for (int side = 0; side < 2; side++)
      if (w.bias) out[r][side] = out[r][side] + load(w.bias + column + W * side);
    to.put(to.owner, row + r, column, out[r][0], out[r][1]);
  }
}

using Block = void (*)(const Matrix&, const Rows&, int64_t, int64_t, const Put&);
struct BlockOfRows {
  Block of[ROWS];
  template <int... R>
  constexpr BlockOfRows(std::integer_sequence<int, R...>) : of{block<R + 1>...} {}
};
constexpr BlockOfRows BLOCKS{std::make_integer_sequence<int, ROWS>{}};  // by the number of rows less one

// A range of column blocks of a linear layer.
struct Blocks {
  int64_t first, last;
};

// Computes some blocks of a linear layer for all rows, in tiles of similar size.
template <class Act>
void linear(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  const auto call = [](void* owner, int64_t row, int64_t column, Floats left, Floats right) {
    (*static_cast<const Act*>(owner))(row, column, left, right);
  };
  const Put to{call, const_cast<Act*>(&act)};
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
  for (int64_t index = blocks.first; index < blocks.last; index++)
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = rows * t / tiles;
      BLOCKS.of[rows * (t + 1) / tiles - row - 1](w, x, row, index, to);
    }
}
