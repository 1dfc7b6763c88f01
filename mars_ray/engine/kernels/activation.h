// Operations on single numbers of a row: activations of an MLP, soft caps, multiples, and copies.
#pragma once
#include "simd.h"

enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

// x times the logistic function of `slope`.
inline Floats gated(Floats x, Floats slope) { return x / (broadcast(1.0f) + exponential(Floats{} - slope)); }

// The tangent approximation of GELU is x (1 + tanh(y)) / 2, which is x times the logistic function of 2y.
inline Floats gelu(Floats x) {
  const Floats cubic = multiply_add(x * x * broadcast(0.044715f), x, x);
  return gated(x, cubic * broadcast(1.5957691216f));  // 2 sqrt(2 / pi)
}

// The activated gate times `up`. Both have been rounded to T.
template <class T>
Floats activate_and_mul(Activation kind, Floats gate, Floats up) {
  return rounded(kind == SILU ? gated(gate, gate) : gelu(gate), static_cast<const T*>(nullptr)) * up;
}

// cap tanh(x / cap)
inline Floats soft_cap(Floats x, float cap) {
  const Floats power = exponential(x * broadcast(2.0f / cap));
  return broadcast(cap) - broadcast(2.0f * cap) / (power + broadcast(1.0f));
}

// Scales a row of scores and caps them, in place.
inline void soft_cap(float* row, int64_t size, float scaling, float cap) {
  for (int64_t d = 0; d < size; d += W) store(row + d, soft_cap(load(row + d) * broadcast(scaling), cap));
}

template <class T>
void multiply(T* to, const T* from, float factor, int64_t size) {
  for (int64_t d = 0; d < size; d += W) store(to + d, load(from + d) * broadcast(factor));
}

// Copies numbers. Those that are infinite or NaN become 0.
template <class T>
void copy_finite(T* to, const T* from, int64_t size) {
  for (int64_t d = 0; d < size; d += W) {
    const Floats value = load(from + d);
    store(to + d, select(is_nan(value * Floats{}), Floats{}, value));
  }
}
