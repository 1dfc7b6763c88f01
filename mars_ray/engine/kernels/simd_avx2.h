// AVX2 with FMA and F16C, with the products of AVX-VNNI if the flags allow them.
#pragma once
#include <immintrin.h>

constexpr int W = 8;
constexpr int ROWS = 6;           // rows of a tile, with two sums each
constexpr int GROUP_ROWS = 4;     // the same for 8-bit rows, whose products need more registers
constexpr int VALUE_VECTORS = 4;  // vectors of a value that are summed together in attention
constexpr int SUMS = 12;          // sums that fit into registers

using Floats = VectorOf<W>::Floats;
using Ints = VectorOf<W>::Ints;
using Words = VectorOf<W>::Words;
using Mask = Floats;  // all bits of an element are set or none

inline Floats as_floats(Words value) { return (Floats)value; }
inline Words as_words(Floats value) { return (Words)value; }

inline Floats broadcast(float value) { return _mm256_set1_ps(value); }
inline Words broadcast_word(int32_t value) { return (Words)_mm256_set1_epi32(value); }

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load(const bfloat16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Floats load_float16(const void* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
// W unsigned bytes.
inline Ints load_bytes(const void* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
}
inline Words load_words(const void* from) { return (Words)_mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline void store_words(void* to, Words value) { _mm256_storeu_si256(static_cast<__m256i*>(to), (__m256i)value); }
inline void store_upper_halves(bfloat16* to, Words value) {
  const __m256i top = _mm256_srli_epi32((__m256i)value, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats absolute(Floats value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }
inline Floats round_to_even(Floats value) {
  return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Ints nearest(Floats value) { return (Ints)_mm256_cvtps_epi32(value); }
inline Floats to_floats(Ints value) { return _mm256_cvtepi32_ps((__m256i)value); }
inline Floats times_power_of_two(Floats value, Floats power) { return value * as_floats((Words)(nearest(power) + 127 << 23)); }
inline float largest_of(Floats value) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float sum_of(Floats value) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Mask equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask differ(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_OQ); }
inline Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Floats value) { return _mm256_cmp_ps(value, value, _CMP_UNORD_Q); }
inline Mask mask_of(uint32_t bits) {
  const Ints place = {1, 2, 4, 8, 16, 32, 64, 128};
  return (Mask)(((Ints)broadcast_word(bits) & place) == place);
}
inline uint32_t bits_of(Mask mask) { return _mm256_movemask_ps(mask); }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }

// Stores 64 numbers as bytes, and the sums of their first and of their second half.
inline void store_group(int8_t* to, float* sums, const Ints numbers[8]) {
  for (int half = 0; half < 2; half++, numbers += 4, to += 32) {
    const auto shorts = [&](int v) { return _mm256_packs_epi32((__m256i)numbers[v], (__m256i)numbers[v + 1]); };
    const __m256i places = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(shorts(0), shorts(2)), places);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sums[half] = sum_of(_mm256_cvtepi32_ps(fours));  // whole numbers, so exact
  }
}

inline void prefetch_line(const void* from) { _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0); }

// Transposes a square of 32-bit words, one vector a row.
inline void transpose_square(Words rows[W]) {
  __m256 pair[W], four[W];
  for (int i = 0; i < W; i += 2) {
    pair[i] = _mm256_unpacklo_ps((Floats)rows[i], (Floats)rows[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps((Floats)rows[i], (Floats)rows[i + 1]);
  }
  for (int i = 0; i < W; i += 4)
    for (int high = 0; high < 2; high++) {
      four[i + 2 * high] = _mm256_shuffle_ps(pair[i + high], pair[i + high + 2], 0x44);
      four[i + 2 * high + 1] = _mm256_shuffle_ps(pair[i + high], pair[i + high + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    rows[i] = (Words)_mm256_permute2f128_ps(four[i], four[4 + i], 0x20);
    rows[4 + i] = (Words)_mm256_permute2f128_ps(four[i], four[4 + i], 0x31);
  }
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
// The instruction needs one unsigned operand, so 8-bit weights are stored with 128 added.
constexpr int32_t BYTE_OFFSET = 128;
constexpr int64_t UNPACK_ROWS = 24;

struct Int8Dot {
  static constexpr int32_t OFFSET = BYTE_OFFSET;
  using Part = Ints;
  using Weights = Words;
  static Weights prepare(Words weights) { return weights; }
  static Part add(Part sum, Weights w, Words x) {
#ifdef __AVXVNNI__
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else  // the same with an AVX-512 encoding, which tests use on processors without AVX-VNNI
    return (Ints)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
  }
  static Ints total(Part part) { return part; }
};
using Int4Dot = Int8Dot;
#else
constexpr int32_t BYTE_OFFSET = 0;
constexpr int64_t UNPACK_ROWS = INT64_MAX;  // products of 8-bit numbers take longer

// The sums of two products are exact in 16 bits, because both numbers are within [-127, 127].
struct Int8Dot {
  static constexpr int32_t OFFSET = BYTE_OFFSET;
  using Part = Ints;
  struct Weights {
    __m256i value, size;
  };
  static Weights prepare(Words w) { return {(__m256i)w, _mm256_abs_epi8((__m256i)w)}; }
  static Part add(Part sum, Weights w, Words x) {
    const __m256i pairs = _mm256_maddubs_epi16(w.size, _mm256_sign_epi8((__m256i)x, w.value));
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static Ints total(Part part) { return part; }
};

// Weights are within [0, 15], so the sums of half a group are exact in 16 bits: 16 x 15 x 127 < 2^15.
struct Int4Dot {
  using Part = __m256i;
  using Weights = Words;
  static Weights prepare(Words weights) { return weights; }
  static Part add(Part sum, Weights w, Words x) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    asm("" : "+x"(sum));  // keeps GCC from adding in another order, for which it moves most products to memory
    return sum;
  }
  static Ints total(Part part) { return (Ints)_mm256_madd_epi16(part, _mm256_set1_epi16(1)); }
};
#endif
