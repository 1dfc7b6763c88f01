// Unpacks a block of INT4 weights, so that many rows multiply it as fast as one of INT8 weights.
//
// Packed and unpacked weights give the same sums, because each group is summed exactly and scales are copied.
#pragma once
#include <cstring>
#include <vector>

#include "matrix.h"

// Returns a block of INT8 weights, which this thread's next call overwrites.
inline const char* unpacked(const char* weights, int64_t depth) {
  using Shorts = VectorOf<W>::Shorts;
  using Bytes = VectorOf<W>::Bytes;
  struct alignas(64) Line {
    char bytes[64];
  };
  static thread_local std::vector<Line> lines;
  const int64_t groups = depth / GROUP;
  const size_t size = groups * INT8_GROUP / sizeof(Line) + 1;
  if (lines.size() < size) lines.resize(size);
  char* to = lines[0].bytes;
  for (int64_t group = 0; group < groups; group++, weights += INT4_GROUP, to += INT8_GROUP) {
    const char* scales = weights + GROUP_STEPS * INT4_STEP;
    for (int half = 0; half < 2; half++) {
      Shorts multipliers[2];
      Bytes offsets[2];
      for (int side = 0; side < 2; side++) {
        const char* bytes = scales + (2 + half) * COLUMNS + W * side;
        multipliers[side] = (Shorts)(load_bytes(bytes) * 0x00010001);
        offsets[side] = (Bytes)(load_bytes(bytes + 2 * COLUMNS) * 0x01010101) - BYTE_OFFSET;
      }
      for (int step = half * GROUP_STEPS / 2; step < (half + 1) * GROUP_STEPS / 2; step++) {
        const Words both = load_words(weights + step * INT4_STEP);
        prefetch<INT4_STEP>(weights + step * INT4_STEP + AHEAD);
        for (int side = 0; side < 2; side++) {
          const Shorts numbers = (Shorts)(both >> 4 * side & 0x0f0f0f0fu);
          const Bytes products = (Bytes)(numbers * multipliers[side]);  // below 256, so two in a short do not mix
          store_words(to + step * INT8_STEP + 4 * W * side, (Words)(products - offsets[side]));
        }
      }
    }
    std::memcpy(to + GROUP_STEPS * INT8_STEP, scales, 2 * COLUMNS);
  }
  return lines[0].bytes;
}
