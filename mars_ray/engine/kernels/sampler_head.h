// Applies the sampler head of an adapter to rows of masks. adapter/sampler_head.py describes the computation.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"
#include "team.h"

template <class T>
struct SamplerHead {
  int64_t hidden, width, vocabulary;  // `hidden` and `width` are multiples of 16
  const T* read_hidden;               // [width, hidden]
  const float* bias;                  // [width]
  const T* read_token;                // [width, hidden]
  const T* write;                     // [hidden, width]
  const T* embedding;                 // [vocabulary, hidden]
  const T* unembedding;               // [vocabulary, hidden]
};

template <class T>
struct MaskRows {
  int64_t count;
  const int64_t* before;  // token before each row
  const int64_t* first;   // pick of the first mask of each row
  const int64_t* length;  // number of masks of each row
  const int64_t* result;  // index of the first of the row in `tokens` and `confidences`
  const T* states;        // [picks, hidden]
  float* logits;          // [picks, stride]
  int64_t stride;
  int64_t* tokens;
  float* confidences;  // on input, without the head; on output, with it
};

struct Candidate {
  float logit;
  int64_t token;
};

constexpr int64_t CANDIDATES = 32;

// Finds the largest logits, in descending order. A vector comparison skips logits below the smallest one kept.
inline int64_t likeliest(const float* logits, int64_t vocabulary, Candidate kept[CANDIDATES]) {
  const auto larger = [](const Candidate& one, const Candidate& other) { return one.logit > other.logit; };
  int64_t count = 0;
  const auto consider = [&](int64_t token) {
    if (count < CANDIDATES) {
      kept[count++] = {logits[token], token};
      std::push_heap(kept, kept + count, larger);
    } else if (logits[token] > kept[0].logit) {
      std::pop_heap(kept, kept + count, larger);
      kept[count - 1] = {logits[token], token};
      std::push_heap(kept, kept + count, larger);
    }
  };
  int64_t v = 0;
  for (; v + W <= vocabulary; v += W) {
    const float least = count < CANDIDATES ? -INFINITY : kept[0].logit;
    uint32_t above = bits_of(greater(load(logits + v), broadcast(least)));
    for (; above; above &= above - 1) consider(v + __builtin_ctz(above));
  }
  for (; v < vocabulary; v++) consider(v);
  std::sort_heap(kept, kept + count, larger);
  return count;
}

template <class T>
float dot(const T* one, const float* other, int64_t size) {
  Floats total = Floats{};
  for (int64_t d = 0; d < size; d += W) total = multiply_add(load(one + d), load(other + d), total);
  return sum_of(total);
}

// Writes x divided by its root mean square.
template <class T>
void normalized(float* to, const T* x, int64_t size) {
  Floats total = Floats{};
  for (int64_t d = 0; d < size; d += W) total = multiply_add(load(x + d), load(x + d), total);
  const Floats scale = broadcast(1.0f / std::sqrt(sum_of(total) / size + 1.1920929e-7f));
  for (int64_t d = 0; d < size; d += W) store(to + d, load(x + d) * scale);
}

template <class T>
void correct_row(const SamplerHead<T>& head, const MaskRows<T>& rows, int64_t row) {
  std::vector<float> state(head.hidden), word(head.hidden), known(head.width), direction(head.hidden);
  Candidate kept[CANDIDATES];
  int64_t before = rows.before[row];
  for (int64_t mask = 0; mask < rows.length[row]; mask++) {
    float* logits = rows.logits + (rows.first[row] + mask) * rows.stride;
    float& confidence = rows.confidences[rows.result[row] + mask];
    const int64_t count = likeliest(logits, head.vocabulary, kept);
    if (!count) break;  // all logits are NaN, so this mask and those behind it predict nothing
    normalized(state.data(), rows.states + (rows.first[row] + mask) * head.hidden, head.hidden);
    normalized(word.data(), head.embedding + before * head.hidden, head.hidden);
    for (int64_t w = 0; w < head.width; w++) {
      const float sum = head.bias[w] + dot(head.read_hidden + w * head.hidden, state.data(), head.hidden) +
                        dot(head.read_token + w * head.hidden, word.data(), head.hidden);
      known[w] = sum / (1.0f + std::exp(-sum));
    }
    for (int64_t d = 0; d < head.hidden; d++) direction[d] = dot(head.write + d * head.width, known.data(), head.width);
    // Exponentials are relative to the top logit, because its probability gives the sum over the vocabulary.
    const float top = kept[0].logit;
    double others = 1.0 / confidence, corrected = 0.0;
    int64_t best = 0;
    for (int64_t c = 0; c < count; c++) {
      others -= std::exp(double(kept[c].logit - top));
      kept[c].logit += dot(head.unembedding + kept[c].token * head.hidden, direction.data(), head.hidden);
      corrected += std::exp(double(kept[c].logit - top));
      logits[kept[c].token] = kept[c].logit;
      if (kept[c].logit > kept[best].logit) best = c;
    }
    confidence = std::exp(double(kept[best].logit - top)) / (corrected + std::max(others, 1e-6 / confidence));
    before = rows.tokens[rows.result[row] + mask] = kept[best].token;
  }
}

// Each row is corrected by one thread.
template <class T>
void correct_masks(const SamplerHead<T>& head, const MaskRows<T>& rows, int64_t threads) {
  Team& team = own_team();
  team.run(threads, [&](int64_t thread) {
    for (int64_t row = thread; row < rows.count; row += team.threads()) correct_row(head, rows, row);
  });
}
