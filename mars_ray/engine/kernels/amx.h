// A linear layer in the tile registers of AMX, which multiply up to 16 rows of x with 16 columns of weights at once.
//
// A product takes as long for one row as for 16, so further rows of a step cost little. In bfloat16 any number of rows is
// multiplied here, even one, because vector registers would sum in another order. 8-bit products are summed in integers.
#pragma once
#include "matrix.h"
#include "unpack.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <algorithm>

constexpr bool TILES = true;
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t CACHED_ROWS = 256;   // rows that stay in the cache while all weights pass
constexpr int64_t FEW_INT8_ROWS = 8, FEW_INT4_ROWS = 12;  // measured

// Shapes of the tile registers. Their numbers are literals below: 0 to 3 hold sums, 4 and 5 hold x, 6 and 7 hold the two
// sides of the weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
  uint8_t rows[16] = {};

  TileShapes(uint8_t x_rows) {
    for (int tile = 0; tile < 6; tile++) rows[tile] = x_rows;
    for (int tile : {6, 7}) rows[tile] = LINE / 4;
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

  static void shape(int64_t x_rows) {
    if (x_rows == rows) return;
    rows = x_rows;
    const TileShapes shapes(x_rows);
    store_all(&shapes);
    _tile_loadconfig(&shapes);
  }

 private:
  alignas(64) char earlier[64];
  static inline thread_local int64_t rows;
};

// Rows of x that are multiplied in one tile, and where their sums go: COLUMNS floats each, `stride` floats apart.
struct TileRows {
  int64_t row;
  float* sums;
  int64_t stride;
};

// Multiplies one tile or two tiles of rows with a block of weights in bfloat16. With MORE, it adds to the sums.
template <bool TWO, bool MORE = false>
inline void multiply_bfloat16(const Rows& x, const TileRows& one, const TileRows& two, const char* weights, int64_t depth,
                              bool prefetches) {
  constexpr int64_t DEPTH = 32, BYTES = DEPTH * COLUMNS * 2;
  const int32_t* from = x.words + one.row * x.stride;
  [[maybe_unused]] const int32_t* other = x.words + two.row * x.stride;
  if constexpr (MORE) {
    _tile_loadd(0, one.sums, 4 * one.stride);
    _tile_loadd(1, one.sums + W, 4 * one.stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if constexpr (TWO && MORE) {
    _tile_loadd(2, two.sums, 4 * two.stride);
    _tile_loadd(3, two.sums + W, 4 * two.stride);
  } else if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < depth; d += DEPTH, from += DEPTH / 2, other += DEPTH / 2, weights += BYTES) {
    if (prefetches) prefetch<BYTES>(weights + AHEAD);
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

// Multiplies up to 32 rows in bfloat16 with a block that is laid out as weights. With MORE, it adds to the sums.
template <bool MORE>
inline void multiply_few(const Rows& x, int64_t rows, const char* block, int64_t depth, float* sums, int64_t stride) {
  const bool two = rows > TILE_ROWS;
  const int64_t height = two ? (rows + 1) / 2 : rows, second = rows - height;
  store_all(block);
  Tiles::shape(height);
  const TileRows one{0, sums, stride}, other{second, sums + second * stride, stride};
  (two ? multiply_bfloat16<true, MORE> : multiply_bfloat16<false, MORE>)(x, one, other, block, depth, false);
  store_all(sums);
}

// Multiplies a tile of rows with one side of a block of INT8 weights. Groups are first summed in integers.
inline void multiply_side(const Rows& x, const TileRows& rows, int side, const char* weights, int64_t groups, bool prefetches) {
  constexpr int64_t BEGUN = 4;  // groups whose products begin before their sums are added, so that nothing waits
  alignas(LINE) int32_t parts[2 * BEGUN][TILE_ROWS][W];
  const int32_t* words = x.words + rows.row * x.stride;
  const auto multiply = [&](int64_t group) {
    const char* from = weights + group * INT8_GROUP;
    if (prefetches) prefetch<INT8_GROUP>(from + AHEAD);
    _tile_zero(0);
    _tile_loadd(4, words + group * GROUP_STEPS, 4 * x.stride);
    _tile_loadd(6, from + LINE * side, 2 * LINE);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, parts[group % (2 * BEGUN)], LINE);
  };
  for (int64_t group = 0; group < std::min(groups, BEGUN); group++) multiply(group);
  const char* scale_at = weights + GROUP_STEPS * INT8_STEP + 2 * W * side;
  const float* scales = x.scales + rows.row * x.groups;
  Floats sum[TILE_ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) sum[r] = Floats{};
  for (int64_t group = 0; group < groups; group++, scale_at += INT8_GROUP, scales++) {
    if (group + BEGUN < groups) multiply(group + BEGUN);
    const Floats scale = load_float16(scale_at);
    const auto& part = parts[group % (2 * BEGUN)];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++)
      sum[r] = multiply_add(to_floats((Ints)load_words(part[r])), broadcast(scales[r * x.groups]) * scale, sum[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE_ROWS; r++) store(rows.sums + r * rows.stride + W * side, sum[r]);
}

// Multiplies one tile or two tiles of rows with a block of INT8 weights.
template <bool TWO>
inline void multiply_int8(const Rows& x, const TileRows& one, const TileRows& two, const char* weights, int64_t depth,
                          bool prefetches) {
  for (int side = 0; side < 2; side++) {
    multiply_side(x, one, side, weights, depth / GROUP, prefetches && side == 0);
    if constexpr (TWO) multiply_side(x, two, side, weights, depth / GROUP, false);
  }
}

// Few 8-bit rows are faster in vector registers. Their products are summed in integers, so the sums are the same.
inline bool fits_tiles(Format format, int64_t rows) {
  return format == BFLOAT16 || (format == INT8 && rows > FEW_INT8_ROWS) || (format == INT4 && rows > FEW_INT4_ROWS);
}

// Computes some blocks of a linear layer for all rows.
template <class Act>
void linear_in_tiles(const Matrix& w, const Rows& x, int64_t rows, const Blocks& blocks, const Act& act) {
  const int64_t height = std::min(rows, TILE_ROWS);
  const auto multiply = w.format == BFLOAT16 ? multiply_bfloat16<false> : multiply_int8<false>;
  const auto multiply_two = w.format == BFLOAT16 ? multiply_bfloat16<true> : multiply_int8<true>;
  alignas(LINE) float sums[2][TILE_ROWS][COLUMNS];
  // Passes on the rows from `row` on. The last tile may overlap the one before.
  const auto finish = [&](int64_t row, int64_t top, int64_t column, const float (&of)[TILE_ROWS][COLUMNS]) {
    for (int64_t r = row - top; r < height; r++) {
      Floats left = load(of[r]), right = load(of[r] + W);
      if (w.bias) left = left + load(w.bias + column), right = right + load(w.bias + column + W);
      act(top + r, column, left, right);
    }
  };
  Tiles::shape(height);
  store_all(x.words);
  for (int64_t begin = 0; begin < rows; begin += CACHED_ROWS) {
    const int64_t end = std::min(rows, begin + CACHED_ROWS);
    for (int64_t index = blocks.first; index < blocks.last; index++) {
      const int64_t column = index * COLUMNS;
      const char* weights = w.block(index);
      if (w.format == INT4) store_all(weights = unpacked(weights, w.depth));
      for (int64_t row = begin; row < end; row += 2 * TILE_ROWS) {
        const int64_t other = row + TILE_ROWS, top = std::min(row, rows - height), other_top = std::min(other, rows - height);
        const TileRows one{top, sums[0][0], COLUMNS}, two{other_top, sums[1][0], COLUMNS};
        (other < end ? multiply_two : multiply)(x, one, two, weights, w.depth, row == begin && w.format != INT4);
        finish(row, top, column, sums[0]);
        if (other < end) finish(other, other_top, column, sums[1]);
      }
    }
  }
}
#else
constexpr bool TILES = false;
constexpr int64_t TILE_ROWS = 1;
struct Tiles {};
// Never called.
bool fits_tiles(Format, int64_t);
template <class Act>
void linear_in_tiles(const Matrix&, const Rows&, int64_t, const Blocks&, const Act&);
template <bool MORE>
void multiply_few(const Rows&, int64_t, const char*, int64_t, float*, int64_t);
#endif
