// AVX-512 (F, BW, DQ, VL), with the products of AVX512_BF16 and AVX512_VNNI if the flags allow them.
#pragma once
#include <immintrin.h>

constexpr int W = 16;
constexpr int ROWS = 12;         // rows of a tile, with two sums each
#ifdef __AVX512VNNI__
constexpr int GROUP_ROWS = 8;    // the same for rows in 8 bits; the sums of their groups fit
#else
constexpr int GROUP_ROWS = 6;    // products of 8-bit numbers need more registers
#endif
constexpr int VALUE_VECTORS = 16;  // vectors of a value that are summed together in attention
constexpr int SUMS = 24;         // sums that fit into registers

using Floats = VectorOf<W>::Floats;
using Ints = VectorOf<W>::Ints;
using Words = VectorOf<W>::Words;
using Mask = __mmask16;

inline Floats as_floats(Words value) { return (Floats)value; }
inline Words as_words(Floats value) { return (Words)value; }

inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Words broadcast_word(int32_t value) { return (Words)_mm512_set1_epi32(value); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const bfloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Floats load_float16(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
// W unsigned bytes.
inline Ints load_bytes(const void* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Words load_words(const void* from) { return (Words)_mm512_loadu_si512(from); }

inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline void store_words(void* to, Words value) { _mm512_storeu_si512(to, (__m512i)value); }
inline void store_upper_halves(bfloat16* to, Words value) {
  const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)value, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), top);
}

inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats value) { return _mm512_abs_ps(value); }
inline Floats round_to_even(Floats value) { return _mm512_roundscale_ps(value, 8); }
inline Floats times_power_of_two(Floats value, Floats power) { return _mm512_scalef_ps(value, power); }
inline Ints nearest(Floats value) { return (Ints)_mm512_cvtps_epi32(value); }
inline Floats to_floats(Ints value) { return _mm512_cvtepi32_ps((__m512i)value); }
inline float largest_of(Floats value) { return _mm512_reduce_max_ps(value); }
inline float sum_of(Floats value) { return _mm512_reduce_add_ps(value); }

inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_OQ); }
inline Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Floats value) { return _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q); }
inline Mask mask_of(uint32_t bits) { return static_cast<Mask>(bits); }
inline uint32_t bits_of(Mask mask) { return mask; }
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }

// Stores 64 numbers as bytes, and the sums of their first and of their second half.
inline void store_group(int8_t* to, float* sums, const Ints numbers[4]) {
  const auto shorts = [&](int v) { return _mm512_packs_epi32((__m512i)numbers[v], (__m512i)numbers[v + 1]); };
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(places, _mm512_packs_epi16(shorts(0), shorts(2)));
  _mm512_storeu_si512(to, bytes);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), bytes);
  const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  const __m256i eights = _mm256_hadd_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
  const __m128i parts = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  _mm_storel_pi(reinterpret_cast<__m64*>(sums), _mm_cvtepi32_ps(_mm_hadd_epi32(parts, parts)));
}

inline void prefetch_line(const void* from) { _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0); }

// Transposes a square of 32-bit words, one vector a row.
inline void transpose_square(Words rows[W]) {
  __m512i pair[W], four[W];
  for (int i = 0; i < W; i += 2) {
    pair[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < W; i += 4)
    for (int high = 0; high < 2; high++) {
      four[i + 2 * high] = _mm512_unpacklo_epi64(pair[i + high], pair[i + high + 2]);
      four[i + 2 * high + 1] = _mm512_unpackhi_epi64(pair[i + high], pair[i + high + 2]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i even = _mm512_shuffle_i32x4(four[i], four[4 + i], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(four[i], four[4 + i], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(four[8 + i], four[12 + i], 0xdd);
    rows[i] = (Words)_mm512_shuffle_i32x4(even, more_even, 0x88);
    rows[4 + i] = (Words)_mm512_shuffle_i32x4(odd, more_odd, 0x88);
    rows[8 + i] = (Words)_mm512_shuffle_i32x4(even, more_even, 0xdd);
    rows[12 + i] = (Words)_mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
}

#ifdef __AVX512BF16__
// To nearest, ties to even, as torch does, except that subnormal numbers become 0.
#define KERNELS_ROUND
inline __m256i to_bfloat16(Floats value) { return (__m256i)_mm512_cvtneps_pbh(value); }
inline void store(bfloat16* to, Floats value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(value)); }
inline Floats rounded(Floats value, const bfloat16*) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bfloat16(value)), 16));
}

#define KERNELS_PAIRS
inline Floats dot_pairs(Floats sum, Words w, Words x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
#endif

#ifdef __AVX512VNNI__
// The instruction needs one unsigned operand, so 8-bit weights are stored with 128 added, or it is added here if tiles,
// whose operands are signed, read them, too.
#ifdef __AMX_INT8__
constexpr int32_t BYTE_OFFSET = 0;
#else
constexpr int32_t BYTE_OFFSET = 128;
#endif

constexpr int64_t UNPACK_ROWS = 40;  // measured

struct Int4Dot {
  using Part = Ints;
  using Weights = Words;
  static Weights prepare(Words weights) { return weights; }
  static Part add(Part sum, Weights w, Words x) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
  static Ints total(Part part) { return part; }
};

struct Int8Dot : Int4Dot {
  static constexpr int32_t OFFSET = 128;
  static Weights prepare(Words weights) { return BYTE_OFFSET ? weights : weights ^ 0x80808080u; }
};
#else
constexpr int32_t BYTE_OFFSET = 0;
constexpr int64_t UNPACK_ROWS = INT64_MAX;  // products of 8-bit numbers take longer

// The sums of two products are exact in 16 bits, because both numbers are within [-127, 127].
struct Int8Dot {
  static constexpr int32_t OFFSET = 0;
  using Part = Ints;
  struct Weights {
    __m512i size;
    __mmask64 negative;
  };
  static Weights prepare(Words w) { return {_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)}; }
  static Part add(Part sum, Weights w, Words x) {
    const __m512i signed_x = _mm512_mask_sub_epi8((__m512i)x, w.negative, _mm512_setzero_si512(), (__m512i)x);
    const __m512i pairs = _mm512_maddubs_epi16(w.size, signed_x);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  static Ints total(Part part) { return part; }
};

// Weights are within [0, 15], so the sums of half a group are exact in 16 bits: 16 x 15 x 127 < 2^15.
struct Int4Dot {
  using Part = __m512i;
  using Weights = Words;
  static Weights prepare(Words weights) { return weights; }
  static Part add(Part sum, Weights w, Words x) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
    asm("" : "+v"(sum));  // keeps GCC from adding in another order, for which it moves most products to memory
    return sum;
  }
  static Ints total(Part part) { return (Ints)_mm512_madd_epi16(part, _mm512_set1_epi16(1)); }
};
#endif
