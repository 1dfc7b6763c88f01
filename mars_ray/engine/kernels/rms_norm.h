// Normalization of a row by its root mean square.
#pragma once
#include <cmath>

#include "simd.h"

// When the quotient of a number and the root mean square is rounded to the type of the row.
enum NormRounding : int64_t {
  BEFORE_WEIGHT = 0,  // before it is multiplied by the weight: Llama
  AFTER_WEIGHT = 1,   // only once, with the weight: Gemma
};

template <class T>
void rms_norm(T* to, const T* from, const float* weight, int64_t size, float epsilon, NormRounding rounding) {
  Floats total = Floats{};
  for (int64_t d = 0; d < size; d += W) total = multiply_add(load(from + d), load(from + d), total);
  const Floats scale = broadcast(1.0f / std::sqrt(sum_of(total) / size + epsilon));
  if (rounding == BEFORE_WEIGHT)
    for (int64_t d = 0; d < size; d += W) store(to + d, rounded(load(from + d) * scale, from) * load(weight + d));
  else
    for (int64_t d = 0; d < size; d += W) store(to + d, load(from + d) * scale * load(weight + d));
}
