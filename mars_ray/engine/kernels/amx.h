// A linear layer in the tile registers of AMX, which multiply up to 16 rows of x with 16 columns of weights at once.
//
// A product takes as long for one row as for 16, so further rows of a step cost little. In bfloat16 all numbers of rows
// are multiplied here, because vector registers would sum in another order. 8-bit products are summed in integers.
#pragma once
#include "matrix.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <algorithm>

constexpr bool TILES = true;
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t LINE = 64;           // bytes of a row of a tile, and of a cache line
constexpr int64_t CACHED_ROWS = 256;   // rows that stay in the cache while all weights pass
constexpr int64_t FEW_INT8_ROWS = 8, FEW_INT4_ROWS = 12;  // measured

// Shapes of the tile registers, which intrinsics take as literals: sums of up to 32 rows with both halves of a block
// (0, 1 and 2, 3), x (4, 5), and both halves of the weights (6, 7). `x_bytes` are the bytes of a row of x.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {LINE, LINE, LINE, LINE, 0, 0, LINE, LINE};
  uint8_t rows[16] = {};

  TileShapes(uint8_t x_rows, uint8_t x_bytes) {
    for (int tile = 0; tile < 6; tile++) rows[tile] = x_rows;
    for (int tile : {4, 5}) bytes[tile] = x_bytes;
    for (int tile : {6, 7}) rows[tile] = x_bytes / 4;
  }
};

// GCC does not know what the instructions of tiles read, so it must have stored everything before, also at `address`.
inline void store_all(const void* address) { asm volatile("" : : "r"(address) : "memory"); }

// The tiles of a thread during a step. Afterwards they have the shapes that other code of the thread gave them, because
// some libraries set shapes once and rely on them.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(&earlier);
    rows = 0;
  }
  ~Tiles() { _tile_loadconfig(&earlier); }

  static void shape(int64_t x_rows, int64_t x_bytes) {
    if (x_rows == rows && x_bytes == bytes) return;
    rows = x_rows, bytes = x_bytes;
    const TileShapes shapes(x_rows, x_bytes);
    store_all(&shapes);
    _tile_loadconfig(&shapes);
  }

 private:
  alignas(64) char earlier[64];
  static inline thread_local int64_t rows, bytes;
};

// Rows of x that are multiplied in one tile, and where their sums go: COLUMNS floats each, `stride` floats apart.
struct TileRows {
  int64_t row;
  float* sums;
  int64_t stride;
};

// Multiplies one tile or two tiles of rows with a block of weights in bfloat16.
template <bool TWO>
inline void multiply_bfloat16(const Rows& x, const TileRows& one, const TileRows& two, const char* weights, int64_t depth,
                              bool first) {
  constexpr int64_t DEPTH = 32, BYTES = DEPTH * COLUMNS * 2;
  const int32_t* from = x.words + one.row * x.stride;
  [[maybe_unused]] const int32_t* other = x.words + two.row * x.stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < depth; d += DEPTH, from += DEPTH / 2, other += DEPTH / 2, weights += BYTES) {
    if (first) prefetch<BYTES>(weights, 0);
    _tile_loadd(6, weights, 2 * LINE);
    _tile_loadd(7, weights + LINE, 2 * LINE);
    _tile_loadd(4, from, 4 * x.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
      _tile_loadd(5, other, 4 * x.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, one.sums, 4 * one.stride);
  _tile_stored(1, one.sums + W, 4 * one.stride);
  if constexpr (TWO) {
    _tile_stored(2, two.sums, 4 * two.stride);
    _tile_stored(3, two.sums + W, 4 * two.stride);
  }
}

// Dot products of up to 32 queries with COLUMNS keys, which are laid out as weights.
inline void score_in_tiles(const Rows& queries, int64_t rows, const char* keys, int64_t depth, float* scores,
                           int64_t padded) {
  const bool two = rows > TILE_ROWS;
  const int64_t height = two ? (rows + 1) / 2 : rows, second = rows - height;
  store_all(keys);
  Tiles::shape(height, LINE);
  const TileRows one{0, scores, padded}, other{second, scores + second * padded, padded};
  (two ? multiply_bfloat16<true> : multiply_bfloat16<false>)(queries, one, other, keys, depth, false);
}

// The sums of a block for the rows of a tile.
using TileSums = float[TILE_ROWS][COLUMNS];

// Multiplies the rows of a tile with a block of weights in 8 or 4 bits. Groups are first summed in integers.
template <Format FORMAT>
inline void multiply_bytes(const Rows& x, int64_t row, const char* weights, int64_t groups, bool first, TileSums sums) {
  constexpr int64_t BYTES = FORMAT == INT8 ? INT8_GROUP : INT4_GROUP;
  constexpr int64_t SCALES = GROUP_STEPS * (FORMAT == INT8 ? INT8_STEP : INT4_STEP);
  constexpr int64_t BEGUN = 4;  // groups whose products begin before their sums are added, so that nothing waits
  alignas(64) int32_t parts[2 * BEGUN][TILE_ROWS][W];
  [[maybe_unused]] alignas(64) char numbers[2 * BEGUN][GROUP_STEPS][LINE];
  const int32_t* words = x.words + row * x.stride;
  for (int side = 0; side < 2; side++) {
    const auto unpack = [&](int64_t g) {
      const char* from = weights + g * BYTES;
      for (int step = 0; step < GROUP_STEPS; step++)
        store_words(numbers[g % (2 * BEGUN)][step], load_words(from + step * INT4_STEP) >> 4 * side & 0x0f0f0f0fu);
    };
    const auto multiply = [&](int64_t g) {
      const char* from = weights + g * BYTES;
      if (first && side == 0) prefetch<BYTES>(from, 0);
      _tile_zero(0);
      _tile_loadd(4, words + g * GROUP_STEPS, 4 * x.stride);
      if constexpr (FORMAT == INT8) {
        _tile_loadd(6, from + LINE * side, 2 * LINE);
      } else {
        if (g + BEGUN < groups) unpack(g + BEGUN);
        store_all(numbers);
        _tile_loadd(6, numbers[g % (2 * BEGUN)], LINE);
      }
      _tile_dpbssd(0, 4, 6);
      _tile_stored(0, parts[g % (2 * BEGUN)], sizeof parts[0][0]);
    };
    if constexpr (FORMAT == INT4)
      for (int64_t g = 0; g < std::min(groups, BEGUN); g++) unpack(g);
    for (int64_t g = 0; g < std::min(groups, BEGUN); g++) multiply(g);
    const char* scale_at = weights + SCALES + 2 * W * side;
    Floats sum[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sum[r] = Floats{};
    for (int64_t g = 0; g < groups; g++, scale_at += BYTES) {
      if (g + BEGUN < groups) multiply(g + BEGUN);
      const Floats scale = load_float16(scale_at);
      [[maybe_unused]] Floats least;
      if constexpr (FORMAT == INT4) least = load_float16(scale_at + 2 * COLUMNS);
      const int64_t of = row * x.groups + g;
#pragma GCC unroll 16
      for (int r = 0; r < TILE_ROWS; r++) {
        if constexpr (FORMAT == INT4) sum[r] = multiply_add(broadcast(x.totals[of + r * x.groups]), least, sum[r]);
        const Floats product = to_floats((Ints)load_words(parts[g % (2 * BEGUN)][r]));
        sum[r] = multiply_add(product, broadcast(x.scales[of + r * x.groups]) * scale, sum[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) store(sums[r] + W * side, sum[r]);
  }
}

// Few 8-bit rows are faster in vector registers. Their products are summed in integers, so the sums are the same.
inline bool fits_tiles(Format format, int64_t rows) {
  return format == BFLOAT16 || (format == INT8 && rows > FEW_INT8_ROWS) || (format == INT4 && rows > FEW_INT4_ROWS);
}

// Computes some blocks of a linear layer for all rows.
template <class Act>
void linear_in_tiles(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  const int64_t groups = w.depth / GROUP;
  // With 8 bits, a tile reads 16 rows even if there are fewer.
  const int64_t height = std::min(rows, TILE_ROWS);
  Tiles::shape(w.format == BFLOAT16 ? height : TILE_ROWS, w.format == BFLOAT16 ? LINE : GROUP);
  alignas(64) TileSums sums[2];
  // Finishes the rows from `row` on. The last tile may begin within the one before.
  const auto finish = [&](int64_t row, int64_t top, int64_t column, const TileSums& of) {
    for (int64_t r = row - top; r < height; r++) {
      Floats left = load(of[r]), right = load(of[r] + W);
      if (w.bias) left = left + load(w.bias + column), right = right + load(w.bias + column + W);
      act(top + r, column, left, right);
    }
  };
  store_all(x.words);
  for (int64_t begin = 0; begin < rows; begin += CACHED_ROWS) {
    const int64_t end = std::min(rows, begin + CACHED_ROWS);
    for (int64_t index = blocks.first; index < blocks.last; index++) {
      const int64_t column = index * COLUMNS;
      const char* weights = static_cast<const char*>(w.weights);
      if (w.format == BFLOAT16) {
        weights += index * w.depth * COLUMNS * 2;
        for (int64_t row = begin; row < end; row += 2 * TILE_ROWS) {
          const int64_t other = row + TILE_ROWS, top = std::min(row, rows - height), other_top = std::min(other, rows - height);
          const TileRows one{top, sums[0][0], COLUMNS}, two{other_top, sums[1][0], COLUMNS};
          const auto multiply = other < end ? multiply_bfloat16<true> : multiply_bfloat16<false>;
          multiply(x, one, two, weights, w.depth, row == begin);
          finish(row, top, column, sums[0]);
          if (other < end) finish(other, other_top, column, sums[1]);
        }
        continue;
      }
      weights += index * groups * (w.format == INT8 ? INT8_GROUP : INT4_GROUP);
      for (int64_t row = begin; row < end; row += TILE_ROWS) {
        const int64_t top = std::min(row, rows - height);
        const auto multiply = w.format == INT8 ? multiply_bytes<INT8> : multiply_bytes<INT4>;
        multiply(x, top, weights, groups, row == begin, sums[0]);
        finish(row, top, column, sums[0]);
      }
    }
  }
}
#else
constexpr bool TILES = false;
constexpr int64_t TILE_ROWS = 1;
struct Tiles {};
inline bool fits_tiles(Format, int64_t) { return false; }
template <class Act>
void linear_in_tiles(const Matrix&, const Rows&, int64_t, const Blocks&, const Act&) {}
inline void score_in_tiles(const Rows&, int64_t, const char*, int64_t, float*, int64_t) {}
#endif
