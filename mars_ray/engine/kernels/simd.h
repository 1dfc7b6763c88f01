// Vectors of W floats, on which all kernels are written. W and the operations that differ between processors are in the
// header of the family, which the compiler's flags select.
//
// A family also says how many rows of a linear layer fit into its registers, and which products it has: of pairs of
// bfloat16 numbers (KERNELS_PAIRS, dot_pairs), and of 8-bit numbers (Int8Dot, Int4Dot). The layout of packed weights
// depends on these. From UNPACK_ROWS rows on, 4-bit weights are unpacked to 8 bits. A family may round to bfloat16 in its own
// way (KERNELS_ROUND).
#pragma once
#include <cstdint>
#include <cstring>

struct bfloat16 {
  uint16_t bits;
};

template <int WIDTH>
struct VectorOf {
  typedef float Floats __attribute__((vector_size(4 * WIDTH)));
  typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
  typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
  typedef uint16_t Shorts __attribute__((vector_size(4 * WIDTH)));
  typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));
};

#if defined(__AVX512F__) && !defined(KERNELS_AVX2)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "simd_neon.h"
#else
#error "no family of kernels fits these compiler flags"
#endif

#ifdef KERNELS_PAIRS
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

#ifndef KERNELS_ROUND
// The bits of each value rounded to bfloat16 in their upper half: to nearest, ties to even, as torch does.
inline Words bfloat16_bits(Floats value) {
  const Words bits = as_words(value);
  const Words nearest = bits + ((bits >> 16 & 1) + 0x7fff);
  const Words quiet = Words{} + 0x7fc00000u;
  return as_words(select(is_nan(value), as_floats(quiet), as_floats(nearest)));
}

inline void store(bfloat16* to, Floats value) { store_upper_halves(to, bfloat16_bits(value)); }
inline Floats rounded(Floats value, const bfloat16*) { return as_floats(bfloat16_bits(value) & 0xffff0000u); }
#endif

// The value after rounding to the stored type. transformers rounds after every operation, so the kernels do too.
inline Floats rounded(Floats value, const float*) { return value; }

// e^x of each element, accurate to a few units in the last place. x is clamped to [-87, 88].
inline Floats exponential(Floats x) {
  x = minimum(maximum(x, broadcast(-87.0f)), broadcast(88.0f));
  const Floats power = round_to_even(x * broadcast(1.44269504f));
  Floats rest = multiply_add(power, broadcast(-0.693359375f), x);
  rest = multiply_add(power, broadcast(2.12194440e-4f), rest);
  Floats sum = broadcast(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    sum = multiply_add(sum, rest, broadcast(coefficient));
  sum = multiply_add(sum, rest * rest, rest + broadcast(1.0f));
  return times_power_of_two(sum, power);
}
