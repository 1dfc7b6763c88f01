// Vectors of 16 floats, loaded from and stored to float32 or bfloat16. Requires AVX-512.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct bfloat16 {
  uint16_t bits;
};

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load(const bfloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }

inline void store(bfloat16* to, __m512 value) {
  // Round to nearest, ties to even, as torch does.
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_set1_epi32(0x7fc00000);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i top = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(top));
}

// The value after rounding to the stored type. transformers rounds after every operation, so the kernels do too.
inline __m512 rounded(__m512 value, const float*) { return value; }

inline __m512 rounded(__m512 value, const bfloat16*) {
  bfloat16 kept[16];
  store(kept, value);
  return load(kept);
}

// e^x of each element, accurate to a few units in the last place. x is clamped to [-87, 88].
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
  const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
  sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(sum, power);
}
