// NEON of 64-bit ARM, with the products of DotProd and BF16 if the flags allow them.
#pragma once
#include <arm_neon.h>

constexpr int W = 4;
constexpr int ROWS = 12;          // rows of a tile, with two sums each
constexpr int GROUP_ROWS = 6;     // the same for rows in 8 bits, which have sums of groups, too
constexpr int VALUE_VECTORS = 4;  // vectors of a value that are summed together in attention
constexpr int SUMS = 24;          // sums that fit into registers

using Floats = float32x4_t;
using Ints = int32x4_t;
using Words = uint32x4_t;
using Mask = uint32x4_t;  // all bits of an element are set or none

inline Floats as_floats(Words value) { return vreinterpretq_f32_u32(value); }
inline Words as_words(Floats value) { return vreinterpretq_u32_f32(value); }

inline Floats broadcast(float value) { return vdupq_n_f32(value); }
inline Words broadcast_word(int32_t value) { return vdupq_n_u32(static_cast<uint32_t>(value)); }

inline Floats load(const float* from) { return vld1q_f32(from); }
inline Floats load(const bfloat16* from) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}
inline Floats load_float16(const void* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(from))));
}
// W unsigned bytes.
inline Ints load_bytes(const void* from) {
  uint32_t word;
  std::memcpy(&word, from, W);
  const uint16x4_t shorts = vget_low_u16(vmovl_u8(vcreate_u8(word)));
  return vreinterpretq_s32_u32(vmovl_u16(shorts));
}
inline Words load_words(const void* from) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }

inline void store(float* to, Floats value) { vst1q_f32(to, value); }
inline void store_words(void* to, Words value) { vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_u32(value)); }
inline void store_upper_halves(bfloat16* to, Words value) {
  vst1_u16(reinterpret_cast<uint16_t*>(to), vshrn_n_u32(value, 16));
}

inline Floats multiply_add(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
inline Floats maximum(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats minimum(Floats a, Floats b) { return vminq_f32(a, b); }
inline Floats absolute(Floats value) { return vabsq_f32(value); }
inline Floats round_to_even(Floats value) { return vrndnq_f32(value); }
inline Ints nearest(Floats value) { return vcvtnq_s32_f32(value); }
inline Floats to_floats(Ints value) { return vcvtq_f32_s32(value); }
inline Floats times_power_of_two(Floats value, Floats power) {
  const Ints bits = vshlq_n_s32(vaddq_s32(nearest(power), vdupq_n_s32(127)), 23);
  return vmulq_f32(value, vreinterpretq_f32_s32(bits));
}
inline float largest_of(Floats value) { return vmaxvq_f32(value); }
inline float sum_of(Floats value) { return vaddvq_f32(value); }

inline Mask equal(Floats a, Floats b) { return vceqq_f32(a, b); }
inline Mask differ(Floats a, Floats b) { return vmvnq_u32(vceqq_f32(a, b)); }
inline Mask greater(Floats a, Floats b) { return vcgtq_f32(a, b); }
inline Mask is_nan(Floats value) { return vmvnq_u32(vceqq_f32(value, value)); }
inline Mask mask_of(uint32_t bits) {
  const Words place = {1, 2, 4, 8};
  return vtstq_u32(vdupq_n_u32(bits), place);
}
inline uint32_t bits_of(Mask mask) {
  const Words place = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, place));
}
inline Floats select(Mask mask, Floats yes, Floats no) { return vbslq_f32(mask, yes, no); }

// Stores 64 numbers as bytes, and the sums of their first and of their second half.
inline void store_group(int8_t* to, float* sums, const Ints numbers[16]) {
  for (int half = 0; half < 2; half++) {
    Ints sum = vdupq_n_s32(0);
    for (int v = 0; v < 8; v += 2, numbers += 2, to += 8) {
      vst1_s8(to, vqmovn_s16(vcombine_s16(vqmovn_s32(numbers[0]), vqmovn_s32(numbers[1]))));
      sum = vaddq_s32(sum, vaddq_s32(numbers[0], numbers[1]));
    }
    sums[half] = static_cast<float>(vaddvq_s32(sum));
  }
}

inline void prefetch_line(const void* from) { __builtin_prefetch(from); }

// Transposes a square of 32-bit words, one vector a row.
inline void transpose_square(Words rows[W]) {
  const auto pairs = [](Words low) { return vreinterpretq_u64_u32(low); };
  const uint64x2_t low = pairs(vtrn1q_u32(rows[0], rows[1])), high = pairs(vtrn2q_u32(rows[0], rows[1]));
  const uint64x2_t other_low = pairs(vtrn1q_u32(rows[2], rows[3])), other_high = pairs(vtrn2q_u32(rows[2], rows[3]));
  rows[0] = vreinterpretq_u32_u64(vtrn1q_u64(low, other_low));
  rows[1] = vreinterpretq_u32_u64(vtrn1q_u64(high, other_high));
  rows[2] = vreinterpretq_u32_u64(vtrn2q_u64(low, other_low));
  rows[3] = vreinterpretq_u32_u64(vtrn2q_u64(high, other_high));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define KERNELS_PAIRS
inline Floats dot_pairs(Floats sum, Words w, Words x) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(x));
}
#endif

constexpr int32_t BYTE_OFFSET = 0;
constexpr int64_t UNPACK_ROWS = 24;

struct Int8Dot {
  static constexpr int32_t OFFSET = BYTE_OFFSET;
  using Part = Ints;
  using Weights = int8x16_t;
  static Weights prepare(Words weights) { return vreinterpretq_s8_u32(weights); }
  static Part add(Part sum, Weights w, Words x) {
    const int8x16_t numbers = vreinterpretq_s8_u32(x);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, numbers);
#else  // the sums of two products are exact in 16 bits, because both numbers are within [-127, 127]
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(numbers));
    const int16x8_t high = vmull_high_s8(w, numbers);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
  }
  static Ints total(Part part) { return part; }
};
using Int4Dot = Int8Dot;
