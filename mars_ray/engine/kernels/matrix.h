// Packed weights of linear layers, and the rows that are multiplied with them.
//
// Every format is laid out for the same loop over blocks of COLUMNS columns, the elements of two vectors. A step holds the
// weights that are multiplied by one 4-byte word of x: one 32-bit number, two 16-bit numbers or four 8-bit numbers.
//
// For BFLOAT16 weights, families without products of bfloat16 pairs read x in float32. A step then holds the weights of
// one number of x: a word has a column of the first vector in its lower half, and one of the second in its upper half.
#pragma once
#include "simd.h"

constexpr int COLUMNS = 2 * W;  // columns of a block
constexpr int GROUP = 64;       // 8-bit or 4-bit numbers that share a scale
constexpr int HALF = 32;        // 4-bit numbers that share a multiplier and an offset
constexpr int GROUP_STEPS = 16;  // steps of a group, with 4 weights each
constexpr int LINE = 64;        // bytes of a cache line
constexpr int AHEAD = 4096;     // prefetch distance in bytes: weights arrive while earlier ones are multiplied

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

// The layout of packed weights, for packed.py.
struct WeightLayout {
  int64_t columns, pairs, byte_offset;
};

// INT8 weights are stored with BYTE_OFFSET added. A group is its steps, then the scales of all columns in float16. An
// INT4 step has the columns of the first vector in the low halves of the bytes, and those of the second vector in the
// high halves. After the scales there are bytes: multipliers of all columns, for the first and the second half of the group,
// and offsets. A weight is (number * multiplier - offset) * scale, and its part in brackets is within [-127, 127].
constexpr int INT8_STEP = 8 * W, INT4_STEP = 4 * W;                // bytes of a step
constexpr int INT8_GROUP = GROUP_STEPS * INT8_STEP + 2 * COLUMNS;  // bytes of a group, with its scales
constexpr int INT4_GROUP = GROUP_STEPS * INT4_STEP + 6 * COLUMNS;  // bytes of a group, with all that follows

struct Matrix {
  const void* weights;
  const float* bias;    // one value per column, or null
  int64_t columns;      // padded to a multiple of COLUMNS
  int64_t depth;
  Format format;
  int32_t alternating;  // 1 if vectors of the first and of the second half of the columns take turns

  int64_t block_bytes() const {
    const int64_t groups = depth / GROUP;
    return format == FLOAT32    ? depth * COLUMNS * 4
           : format == BFLOAT16 ? depth * COLUMNS * 2
           : format == INT8     ? groups * INT8_GROUP
                                : groups * INT4_GROUP;
  }

  // Returns the weights of block `index`.
  const char* block(int64_t index) const { return static_cast<const char*>(weights) + index * block_bytes(); }
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
  const float* sums;  // sums of the rounded numbers of each half of a group
  const int32_t* offsets;  // what sums over a group of INT8 weights begin with, if 128 is added to the weights
  int64_t groups;
};

// A range of column blocks of a linear layer.
struct Blocks {
  int64_t first, last;
};

// Prefetches weights for later. The hardware prefetcher does so only under light load.
template <int BYTES>
inline void prefetch(const char* weights) {
  for (int line = 0; line < BYTES; line += LINE) prefetch_line(weights + line);
}

// Prefetches weights in order while others are multiplied. Several tiles may share the work.
struct Prefetch {
  const char* next = nullptr;
  int64_t tiles = 0;  // 0 prefetches nothing
  int64_t bytes = 0;  // bytes for each step of all tiles together
  int64_t due = 0;

  template <int BYTES>
  void step() {
    if (tiles == 1 && BYTES >= LINE) all<BYTES>();
    else if (tiles)
      for (due += bytes; due >= LINE * tiles; due -= LINE * tiles, next += LINE) prefetch_line(next);
  }

  template <int BYTES>
  void all() {
    prefetch<BYTES>(next);
    next += BYTES;
  }
};
