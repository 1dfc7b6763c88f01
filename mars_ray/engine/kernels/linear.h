// A linear layer with packed weights: out = x W^T, for few rows of x.
//
// Every format is laid out for the same loop over blocks of 32 columns. A step holds the weights that are multiplied by
// one 4-byte word of x: one 32-bit number, two 16-bit numbers or four 8-bit numbers. Each row is summed in the same
// order regardless of the other rows, so its result does not depend on the batch.
#pragma once
#include "simd.h"

constexpr int COLUMNS = 32;     // columns of a block
constexpr int GROUP = 32;       // 8-bit or 4-bit numbers that share a scale
constexpr int GROUP_STEPS = 8;  // steps of a group, with 4 weights each
constexpr int AHEAD = 4096;     // prefetch distance in bytes: weights arrive while earlier ones are multiplied

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

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

// Rows of x as a linear layer reads them: unchanged, or rounded to 8 bits in groups of 32 with one scale per group.
struct Rows {
  const int32_t* words;
  int64_t stride;  // words from one row to the next
  const float* scales;
  const int32_t* sums;
  int64_t groups;
};

struct DotFloat32 {
  using Sum = __m512;
  static Sum add(Sum sum, __m512i w, int32_t x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(_mm512_set1_epi32(x)), sum);
  }
};

struct DotBFloat16 {
  using Sum = __m512;
  static Sum add(Sum sum, __m512i w, int32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
  }
};

// Prefetches the weights of later steps. The hardware prefetcher does so only under light load.
inline void prefetch(const char* weights) {
  _mm_prefetch(weights + AHEAD, _MM_HINT_T0);
  _mm_prefetch(weights + AHEAD + 64, _MM_HINT_T0);
}

template <class Dot, int R>
inline void tile(const Rows& x, int64_t row, const char* weights, int64_t steps, bool first, typename Dot::Sum out[R][2]) {
  const int32_t* from = x.words + row * x.stride;
  const int64_t stride = x.stride;
  typename Dot::Sum sum[R][2];  // a local array, so that the compiler keeps the sums in registers
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = typename Dot::Sum{};
  for (int64_t step = 0; step < steps; step++, weights += 128) {
    const __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
    if (first) prefetch(weights);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      sum[r][0] = Dot::add(sum[r][0], left, from[r * stride + step]);
      sum[r][1] = Dot::add(sum[r][1], right, from[r * stride + step]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) out[r][0] = sum[r][0], out[r][1] = sum[r][1];
}

// The same for 8-bit rows. Each group is summed in integers and then multiplied by its scale.
//
// INT8 weights are stored with 128 added, because the instruction needs one unsigned operand. A group is 8 steps of 128
// bytes, then 32 scales in float16. An INT4 group is 8 steps of 64 bytes, with columns 0-15 in the low halves of the
// bytes, then 32 scales and 32 minima in float16.
template <int R, Format FORMAT>
inline void tile_in_groups(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, __m512 out[R][2]) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; group++) {
    __m512i part[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const int32_t total = FORMAT == INT8 ? -128 * x.sums[(row + r) * x.groups + group] : 0;
      part[r][0] = part[r][1] = _mm512_set1_epi32(total);
    }
    for (int step = 0; step < GROUP_STEPS; step++) {
      __m512i left = _mm512_loadu_si512(weights), right;
      if (first && (FORMAT == INT8 || step % 2 == 0)) prefetch(weights);
      if constexpr (FORMAT == INT8) {
        right = _mm512_loadu_si512(weights + 64);
        weights += 128;
      } else {
        right = _mm512_and_si512(_mm512_srli_epi16(left, 4), low);
        left = _mm512_and_si512(left, low);
        weights += 64;
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const __m512i word = _mm512_set1_epi32(x.words[(row + r) * x.stride + group * GROUP_STEPS + step]);
        part[r][0] = _mm512_dpbusd_epi32(part[r][0], left, word);
        part[r][1] = _mm512_dpbusd_epi32(part[r][1], right, word);
      }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
      const __m256i* halves = reinterpret_cast<const __m256i*>(weights + 32 * side);
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
      [[maybe_unused]] __m512 least;
      if constexpr (FORMAT == INT4) least = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 2));
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const float of_row = x.scales[(row + r) * x.groups + group];
        const __m512 of_part = _mm512_mul_ps(_mm512_set1_ps(of_row), scale);
        if constexpr (FORMAT == INT4) {
          const __m512 total = _mm512_set1_ps(of_row * static_cast<float>(x.sums[(row + r) * x.groups + group]));
          sum[r][side] = _mm512_fmadd_ps(total, least, sum[r][side]);
        }
        sum[r][side] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][side]), of_part, sum[r][side]);
      }
    }
    weights += FORMAT == INT8 ? 64 : 128;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) out[r][0] = sum[r][0], out[r][1] = sum[r][1];
}

// Splits more than 6 rows into two halves, because separate sums for groups and rows need twice as many registers.
template <int R, Format FORMAT>
inline void halves(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, __m512 out[R][2]) {
  constexpr int HALF = R > 6 ? (R + 1) / 2 : R;
  tile_in_groups<HALF, FORMAT>(x, row, weights, groups, first, out);
  if constexpr (R > HALF) tile_in_groups<R - HALF, FORMAT>(x, row + HALF, weights, groups, false, out + HALF);
}

// The function that receives 32 finished columns of a row.
struct Put {
  void (*put)(void* owner, int64_t row, int64_t column, __m512 left, __m512 right);
  void* owner;
};

template <int R>
void block(const Matrix& w, const Rows& x, int64_t row, int64_t index, const Put& to) {
  const bool first = row == 0;  // later tiles find the weights in the cache
  const int64_t column = index * COLUMNS;
  const char* weights = static_cast<const char*>(w.weights);
  __m512 out[R][2];
  if (w.format == FLOAT32) {
    tile<DotFloat32, R>(x, row, weights + index * w.depth * 128, w.depth, first, out);
  } else if (w.format == BFLOAT16) {
    tile<DotBFloat16, R>(x, row, weights + index * (w.depth / 2) * 128, w.depth / 2, first, out);
  } else if (w.format == INT8) {
    halves<R, INT8>(x, row, weights + index * (w.depth / GROUP) * 1088, w.depth / GROUP, first, out);
  } else {
    halves<R, INT4>(x, row, weights + index * (w.depth / GROUP) * 640, w.depth / GROUP, first, out);
  }
  for (int r = 0; r < R; r++) {
    for (int side = 0; side < 2; side++)
      if (w.bias) out[r][side] = _mm512_add_ps(out[r][side], load(w.bias + column + 16 * side));
    to.put(to.owner, row + r, column, out[r][0], out[r][1]);
  }
}

constexpr int ROWS = 12;  // maximum rows of a tile, whose 24 sums fit into registers
using Block = void (*)(const Matrix&, const Rows&, int64_t, int64_t, const Put&);
constexpr Block BLOCKS[ROWS] = {block<1>, block<2>, block<3>, block<4>,  block<5>,  block<6>,
                                block<7>, block<8>, block<9>, block<10>, block<11>, block<12>};

// A range of column blocks of a linear layer.
struct Blocks {
  int64_t first, last;
};

// Computes some blocks of a linear layer for all rows, in tiles of similar size.
template <class Act>
void linear(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  const auto call = [](void* owner, int64_t row, int64_t column, __m512 left, __m512 right) {
    (*static_cast<const Act*>(owner))(row, column, left, right);
  };
  const Put to{call, const_cast<Act*>(&act)};
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
  for (int64_t index = blocks.first; index < blocks.last; index++)
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = rows * t / tiles;
      BLOCKS[rows * (t + 1) / tiles - row - 1](w, x, row, index, to);
    }
}
