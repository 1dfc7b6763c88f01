// Products of matrices in the tile registers of AMX: up to 16 rows of x with a block of columns.
//
// A product of two tiles takes as long for one row as for 16, so further rows of a step cost little. bfloat16 numbers are
// always multiplied here, because sums have another order than in vector registers. Sums of 8-bit products are exact, so
// they may be computed in either.
#pragma once
#include "matrix.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <algorithm>
#include <vector>

constexpr bool TILES = true;
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_DEPTH = 32;     // numbers of a row in a tile, of either size
constexpr int64_t CACHED_ROWS = 256;   // rows that stay in the cache while all weights pass
constexpr int64_t LINE = 64;           // bytes of a row of a tile, and of a cache line

// Shapes of the tile registers, which intrinsics take as literals: sums (0, 1), x and both halves of a block in bfloat16
// (2, 3, 4) and in 8 bits (5, 6, 7).
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, TILE_DEPTH, LINE, LINE};
  uint8_t rows[16] = {};

  explicit TileShapes(uint8_t x) {
    for (int tile : {0, 1, 2, 5}) rows[tile] = x;
    for (int tile : {3, 4}) rows[tile] = TILE_DEPTH / 2;
    for (int tile : {6, 7}) rows[tile] = TILE_DEPTH / 4;
  }
};

// Shapes this thread's tiles for `rows` rows of x. With 0 the tiles are released, so that the system saves none.
inline void shape_tiles(int64_t rows) {
  static thread_local int64_t shaped = 0;
  if (rows == shaped) return;
  shaped = rows;
  if (rows == 0) return _tile_release();
  const TileShapes shapes(rows);
  _tile_loadconfig(&shapes);
}

// The sums of a block for the rows of a tile.
using TileSums = float[TILE_ROWS][COLUMNS];

inline void multiply_bfloat16(const Rows& x, int64_t row, const char* weights, int64_t depth, bool first, TileSums sums) {
  constexpr int64_t BYTES = TILE_DEPTH * COLUMNS * 2;
  const int32_t* from = x.words + row * x.stride;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t d = 0; d < depth; d += TILE_DEPTH, from += TILE_DEPTH / 2, weights += BYTES) {
    if (first)
      for (int64_t line = 0; line < BYTES; line += LINE) prefetch_line(weights + AHEAD + line);
    _tile_loadd(2, from, 4 * x.stride);
    _tile_loadd(3, weights, 2 * LINE);
    _tile_loadd(4, weights + LINE, 2 * LINE);
    _tile_dpbf16ps(0, 2, 3);
    _tile_dpbf16ps(1, 2, 4);
  }
  _tile_stored(0, sums[0], sizeof sums[0]);
  _tile_stored(1, sums[0] + W, sizeof sums[0]);
}

constexpr int64_t UNPACKED_GROUP = GROUP_STEPS * INT8_STEP;

// Returns the weights of a block of 4 bits, laid out as those of 8 bits but without scales. They are valid until the
// thread's next call.
inline const char* unpack_int4(const char* weights, int64_t groups) {
  static thread_local std::vector<char> unpacked;
  if (static_cast<int64_t>(unpacked.size()) < groups * UNPACKED_GROUP) unpacked.resize(groups * UNPACKED_GROUP);
  char* to = unpacked.data();
  for (int64_t group = 0; group < groups; group++, weights += INT4_GROUP - GROUP_STEPS * INT4_STEP)
    for (int step = 0; step < GROUP_STEPS; step++, weights += INT4_STEP, to += INT8_STEP) {
      prefetch<INT4_STEP>(weights, step);
      const Words both = load_words(weights);
      store_words(to, both & 0x0f0f0f0fu);
      store_words(to + 4 * W, both >> 4 & 0x0f0f0f0fu);
    }
  return unpacked.data();
}

// `numbers` are the weights in 8 bits, whose groups are `stride` bytes apart; `scales` are the scales, and the minima of
// INT4, of the first group.
template <Format FORMAT>
inline void multiply_bytes(const Rows& x, int64_t row, int64_t rows, const char* numbers, int64_t stride,
                           const char* scales, int64_t groups, bool first, TileSums sums) {
  alignas(64) int32_t parts[TILE_ROWS][COLUMNS];
  for (int64_t r = 0; r < rows; r++) store(sums[r], Floats{}), store(sums[r] + W, Floats{});
  for (int64_t group = 0; group < groups; group++, numbers += stride, scales += FORMAT == INT8 ? INT8_GROUP : INT4_GROUP) {
    if (FORMAT == INT8 && first)
      for (int64_t line = 0; line < INT8_GROUP; line += LINE) prefetch_line(numbers + AHEAD + line);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(5, x.words + row * x.stride + group * GROUP_STEPS, 4 * x.stride);
    _tile_loadd(6, numbers, 2 * LINE);
    _tile_loadd(7, numbers + LINE, 2 * LINE);
    _tile_dpbsud(0, 5, 6);
    _tile_dpbsud(1, 5, 7);
    _tile_stored(0, parts[0], sizeof parts[0]);
    _tile_stored(1, parts[0] + W, sizeof parts[0]);
    const Floats scale[2] = {load_float16(scales), load_float16(scales + 2 * W)};
    [[maybe_unused]] Floats least[2];
    if constexpr (FORMAT == INT4)
      for (int side = 0; side < 2; side++) least[side] = load_float16(scales + 2 * COLUMNS + 2 * W * side);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = (row + r) * x.groups + group;
      const float of_row = x.scales[at];
      for (int side = 0; side < 2; side++) {
        Floats sum = load(sums[r] + W * side);
        Ints part = (Ints)load_words(parts[r] + W * side);
        if constexpr (FORMAT == INT4) {
          const Floats total = broadcast(of_row * static_cast<float>(x.sums[at]));
          sum = multiply_add(total, least[side], sum);
        } else {
          part = part - (Ints)broadcast_word(BYTE_OFFSET * x.sums[at]);
        }
        store(sums[r] + W * side, multiply_add(to_floats(part), broadcast(of_row) * scale[side], sum));
      }
    }
  }
}

inline bool fits_tiles(const Matrix& w, int64_t rows) {
  return w.format == BFLOAT16 || (w.format >= INT8 && rows > GROUP_ROWS);
}

// Computes some blocks of a linear layer for all rows.
inline void linear_in_tiles(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Put& to) {
  const int64_t height = std::min(rows, TILE_ROWS), groups = w.depth / GROUP;
  asm volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory
  shape_tiles(height);
  alignas(64) TileSums sums;
  for (int64_t begin = 0; begin < rows; begin += CACHED_ROWS)
    for (int64_t index = blocks.first; index < blocks.last; index++) {
      const char* weights = static_cast<const char*>(w.weights);
      if (w.format == BFLOAT16) weights += index * w.depth * COLUMNS * 2;
      else weights += index * groups * (w.format == INT8 ? INT8_GROUP : INT4_GROUP);
      const char* unpacked = w.format == INT4 ? unpack_int4(weights, groups) : nullptr;
      for (int64_t row = begin; row < std::min(rows, begin + CACHED_ROWS); row += TILE_ROWS) {
        const int64_t top = std::min(row, rows - height);  // the last tile may begin within the one before
        const bool first = row == begin;
        if (w.format == BFLOAT16) {
          multiply_bfloat16(x, top, weights, w.depth, first, sums);
        } else if (w.format == INT8) {
          multiply_bytes<INT8>(x, top, height, weights, INT8_GROUP, weights + GROUP_STEPS * INT8_STEP, groups, first, sums);
        } else {
          multiply_bytes<INT4>(x, top, height, unpacked, UNPACKED_GROUP, weights + GROUP_STEPS * INT4_STEP, groups, first,
                               sums);
        }
        const int64_t column = index * COLUMNS;
        for (int64_t r = row - top; r < height; r++) {
          Floats left = load(sums[r]), right = load(sums[r] + W);
          if (w.bias) left = left + load(w.bias + column), right = right + load(w.bias + column + W);
          to.put(to.owner, top + r, column, left, right);
        }
      }
    }
}
#else
constexpr bool TILES = false;
inline void shape_tiles(int64_t) {}
inline bool fits_tiles(const Matrix&, int64_t) { return false; }
inline void linear_in_tiles(const Matrix&, const Rows&, int64_t, const Blocks&, const Put&) {}
#endif
