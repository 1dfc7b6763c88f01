// One forward of a decoder of the Llama family over the cache, in one call: the step of the engine on a CPU.
//
// All threads walk through the layers together, each with its share of rows, columns or heads, and wait for each other
// between operations. What a position gives depends on its tokens alone, bit for bit: not on the rows beside it, nor on
// the number of threads.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "sampler_head.h"

struct Layer {
  const float* attention_norm;
  Matrix qkv;
  const float* query_norm;  // or none
  const float* key_norm;    // or none
  Matrix output;
  const float* mlp_norm;
  Matrix gate_up;
  Matrix down;
  int64_t window;  // 0: none
};

struct Model {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, mask_id;
  float norm_epsilon, scaling;
  const void* embedding;
  const float* final_norm;
  Matrix head;
  const Layer* layers;
};

struct Adapter {
  const void* mask_embedding;  // [masks, hidden]
  const LowRank* pairs;        // four of each layer: qkv, output, gate_up, down; all of the batch's `adapter_format`
  int64_t ranks;               // of the widest of them
};

// Masks that one adapter decodes. They stand side by side.
struct Group {
  const Adapter* adapter;
  int64_t first, count;
};

struct Batch {
  int64_t positions, picks, threads, num_groups, adapter_format;
  const Group* groups;  // masks of adapters, behind everything else
  const int64_t* offsets;  // masks before a mask in its row
  const int64_t* ids;
  const int64_t* slots;
  const int64_t* places;    // in the sequence
  const int64_t* columns;   // of the slot, where keys and values go
  const int64_t* prefixes;  // see Sight
  const uint64_t* behind;
  const float* cosines;  // [positions, head_dim]
  const float* sines;
  const int64_t* picked;
  void* const* keys;  // of each layer, [slots, kv_heads, width, head_dim]
  void* const* values;
  int64_t slot_stride, head_stride;
  void* hidden;  // [picks, hidden], the last hidden states
  float* logits;  // [picks, vocabulary padded to whole blocks]
  int64_t* tokens;
  float* confidences;
};

// Rows rounded to 8 bits in groups of 32, as `Rows` are read.
struct Rounded {
  std::vector<int32_t> words, sums;
  std::vector<float> scales;

  void fit(size_t numbers) {
    if (words.size() < numbers / 4) words.resize(numbers / 4), sums.resize(numbers / GROUP), scales.resize(numbers / GROUP);
  }

  Rows from(int64_t first, int64_t depth) const {
    return {&words[first / 4], depth / 4, &scales[first / GROUP], &sums[first / GROUP], depth / GROUP};
  }

  template <class T>
  void round(const T* from, int64_t first, int64_t depth) {
    int8_t* to = reinterpret_cast<int8_t*>(&words[first / 4]);
    for (int64_t d = 0; d < depth; d += GROUP) {
      const __m512 left = load(from + d), right = load(from + d + 16);
      const __m512 largest = _mm512_max_ps(_mm512_abs_ps(left), _mm512_abs_ps(right));
      const float top = std::max(_mm512_reduce_max_ps(largest), 1e-30f);
      const __m512 scale = _mm512_set1_ps(127.0f / top);
      const __m512i one = _mm512_cvtps_epi32(_mm512_mul_ps(left, scale));
      const __m512i other = _mm512_cvtps_epi32(_mm512_mul_ps(right, scale));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm512_cvtsepi32_epi8(one));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d + 16), _mm512_cvtsepi32_epi8(other));
      const int64_t group = (first + d) / GROUP;
      sums[group] = _mm512_reduce_add_epi32(_mm512_add_epi32(one, other));
      scales[group] = top / 127.0f;
    }
  }
};

template <class T>
struct Buffers {
  std::vector<T> hidden, normed, qkv, attended, gate_up, activated, low;
  Rounded rounded, rounded_low;
  std::vector<float> scores;
};

template <class T>
void rms_norm(T* to, const T* from, const float* weight, int64_t size, float epsilon) {
  __m512 total = _mm512_setzero_ps();
  for (int64_t d = 0; d < size; d += 16) total = _mm512_fmadd_ps(load(from + d), load(from + d), total);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(total) / size + epsilon));
  for (int64_t d = 0; d < size; d += 16)
    store(to + d, _mm512_mul_ps(rounded(_mm512_mul_ps(load(from + d), scale), from), load(weight + d)));
}

template <class T>
void silu_and_mul(T* to, const T* gate_up, int64_t size) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (int64_t d = 0; d < size; d += 16) {
    const __m512 gate = load(gate_up + d);
    const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    store(to + d, _mm512_mul_ps(rounded(_mm512_div_ps(gate, below), gate_up), load(gate_up + size + d)));
  }
}

template <class T>
class Step {
 public:
  Step(const Model& model, const Batch& batch, Buffers<T>& buffers, int thread, int threads)
      : m(model), b(batch), at(buffers), thread(thread), threads(threads) {}

  void run() {
    const T* embedding = static_cast<const T*>(m.embedding);
    each(b.positions, [&](int64_t n) {
      const T* from = embedding + b.ids[n] * m.hidden;
      for (int64_t g = 0; g < b.num_groups; g++)
        if (const Group& group = b.groups[g]; group.first <= n && n < group.first + group.count)
          from = static_cast<const T*>(group.adapter->mask_embedding) + b.offsets[n] * m.hidden;
      std::copy_n(from, m.hidden, &at.hidden[n * m.hidden]);
    });
    for (int64_t index = 0; index < m.num_layers; index++) layer(m.layers[index], index);
    each(b.picks, [&](int64_t n) {
      norm(n, b.picked[n], m.final_norm);
      std::copy_n(&at.normed[n * m.hidden], m.hidden, static_cast<T*>(b.hidden) + n * m.hidden);
      if (m.head.format >= INT8) at.rounded.round(&at.normed[n * m.hidden], n * m.hidden, m.hidden);
    });
    wait();
    linear(m.head, rows(m.head, at.normed.data()), b.picks, thread, threads,
           [&](int64_t row, int64_t column, __m512 left, __m512 right) {
             store(b.logits + row * m.head.columns + column, left);
             store(b.logits + row * m.head.columns + column + 16, right);
           });
    wait();
    each(b.picks, [&](int64_t n) { choose(n); });
  }

 private:
  const Model& m;
  const Batch& b;
  Buffers<T>& at;
  const int thread, threads;

  static void wait() {
#pragma omp barrier
  }

  template <class Act>
  void each(int64_t count, const Act& act) const {
    for (int64_t n = count * thread / threads; n < count * (thread + 1) / threads; n++) act(n);
  }

  void layer(const Layer& l, int64_t index) {
    each(b.positions, [&](int64_t n) { norm(n, n, l.attention_norm); });
    round_rows(l.qkv, at.normed.data());
    wait();
    project(l.qkv, at.normed.data(), at.qkv.data());
    adapt(4 * index, at.normed.data(), at.qkv.data());
    wait();
    T* keys = static_cast<T*>(b.keys[index]);
    T* values = static_cast<T*>(b.values[index]);
    each(b.positions, [&](int64_t n) { write(l, n, keys, values); });
    wait();
    const int64_t groups = m.heads / m.kv_heads, width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    float* scores = &at.scores[at.scores.size() / threads * thread];
    // Positions of a slot stand together, so neighbours read the same keys.
    each(b.positions * m.kv_heads, [&](int64_t task) {
      const int64_t n = task % b.positions, head = task / b.positions;
      const int64_t offset = b.slots[n] * b.slot_stride + head * b.head_stride;
      const int64_t first = l.window ? std::max<int64_t>(0, b.places[n] - l.window + 1) : 0;
      attend_with(&at.attended[(n * m.heads + head * groups) * m.head_dim], &at.qkv[n * width + head * groups * m.head_dim],
                  keys + offset, values + offset, Sight{b.prefixes[n], b.behind[n], first}, groups, scores);
    });
    wait();
    if (round_rows(l.output, at.attended.data())) wait();
    add(l.output, at.attended.data());
    adapt(4 * index + 1, at.attended.data(), at.hidden.data());
    wait();
    each(b.positions, [&](int64_t n) { norm(n, n, l.mlp_norm); });
    round_rows(l.gate_up, at.normed.data());
    wait();
    project(l.gate_up, at.normed.data(), at.gate_up.data());
    adapt(4 * index + 2, at.normed.data(), at.gate_up.data());
    wait();
    each(b.positions, [&](int64_t n) {
      silu_and_mul(&at.activated[n * m.intermediate], &at.gate_up[n * 2 * m.intermediate], m.intermediate);
    });
    round_rows(l.down, at.activated.data());
    wait();
    add(l.down, at.activated.data());
    adapt(4 * index + 3, at.activated.data(), at.hidden.data());
    wait();
  }

  void norm(int64_t row, int64_t from, const float* weight) {
    rms_norm(&at.normed[row * m.hidden], &at.hidden[from * m.hidden], weight, m.hidden, m.norm_epsilon);
  }

  void write(const Layer& l, int64_t n, T* keys, T* values) {
    const int64_t size = m.head_dim, width = (m.heads + 2 * m.kv_heads) * size;
    T* row = &at.qkv[n * width];
    const int64_t cell = b.slots[n] * b.slot_stride + b.columns[n] * size;
    for (int64_t head = 0; head < m.heads + m.kv_heads; head++) {
      const bool is_query = head < m.heads;
      T* part = row + head * size;
      const float* weight = is_query ? l.query_norm : l.key_norm;
      if (weight) rms_norm(part, part, weight, size, m.norm_epsilon);
      T* to = is_query ? part : keys + cell + (head - m.heads) * b.head_stride;
      rotate(to, part, b.cosines + n * size, b.sines + n * size, size);
    }
    for (int64_t head = 0; head < m.kv_heads; head++)
      std::copy_n(row + (m.heads + m.kv_heads + head) * size, size, values + cell + head * b.head_stride);
  }

  void attend_with(T* to, const T* query, const T* keys, const T* values, const Sight& sight, int64_t groups,
                   float* scores) {
    switch (m.head_dim) {
      case 32: return attend<32>(to, query, keys, values, sight, groups, m.scaling, scores);
      case 64: return attend<64>(to, query, keys, values, sight, groups, m.scaling, scores);
      case 96: return attend<96>(to, query, keys, values, sight, groups, m.scaling, scores);
      case 128: return attend<128>(to, query, keys, values, sight, groups, m.scaling, scores);
      case 256: return attend<256>(to, query, keys, values, sight, groups, m.scaling, scores);
    }
  }

  // Rows from `first` on as `w` reads them; of 8 bits, `round_rows` has made them before.
  Rows rows(const Matrix& w, const T* from, int64_t first = 0) const {
    if (w.format < INT8) return plain(w.depth, from + first * w.depth);
    return at.rounded.from(first * w.depth, w.depth);
  }

  // Rounds this thread's rows, all of them or the masks alone, where `w` or adapters beside it are of 8 bits.
  bool round_rows(const Matrix& w, const T* from) {
    const bool masks = b.num_groups && b.adapter_format >= INT8;
    if (w.format < INT8 && !masks) return false;
    const int64_t first = w.format >= INT8 ? 0 : b.groups[0].first;
    each(b.positions, [&](int64_t n) {
      if (n >= first) at.rounded.round(from + n * w.depth, n * w.depth, w.depth);
    });
    return true;
  }

  void project(const Matrix& w, const T* from, T* to) {
    linear(w, rows(w, from), b.positions, thread, threads,
           [&](int64_t row, int64_t column, __m512 left, __m512 right) {
             store(to + row * w.columns + column, left);
             store(to + row * w.columns + column + 16, right);
           });
  }

  // Adds the low-rank products at masks to what their layer gave.
  void adapt(int64_t number, const T* from, T* to) {
    if (b.num_groups == 0) return;
    each_pair(number, [&](const LowRank& pair, const Group& group, int64_t start) {
      const int64_t ranks = pair.down.columns;
      linear(pair.down, rows(pair.down, from, group.first), group.count, thread, threads,
             [&](int64_t row, int64_t column, __m512 left, __m512 right) {
               store(&at.low[start + row * ranks + column], left);
               store(&at.low[start + row * ranks + column + 16], right);
             });
    });
    wait();
    if (b.adapter_format >= INT8) {
      each_pair(number, [&](const LowRank& pair, const Group& group, int64_t start) {
        const int64_t ranks = pair.down.columns;
        each(group.count, [&](int64_t n) { at.rounded_low.round(&at.low[start + n * ranks], start + n * ranks, ranks); });
      });
      wait();
    }
    each_pair(number, [&](const LowRank& pair, const Group& group, int64_t start) { widen(pair, group, start, to); });
  }

  // Calls `act` for each group with low-rank products here, and where in `low` those of the group begin.
  template <class Act>
  void each_pair(int64_t number, const Act& act) const {
    int64_t start = 0;
    for (int64_t g = 0; g < b.num_groups; g++) {
      const Group& group = b.groups[g];
      if (const LowRank& pair = group.adapter->pairs[number]; pair.parts) act(pair, group, start);
      start += group.count * group.adapter->ranks;
    }
  }

  void widen(const LowRank& pair, const Group& group, int64_t start, T* to) {
    const int64_t ranks = pair.down.columns;
    int64_t width = 0;
    for (int64_t part = 0; part < pair.parts; part++) width += pair.up[part].columns;
    to += group.first * width;
    for (int64_t part = 0; part < pair.parts; part++) {
      const Matrix& up = pair.up[part];
      const Rows x = up.format < INT8 ? plain(ranks, &at.low[start]) : at.rounded_low.from(start, ranks);
      linear(up, x, group.count, thread, threads, [&](int64_t row, int64_t column, __m512 left, __m512 right) {
        T* out = to + row * width + column;
        store(out, _mm512_add_ps(load(out), rounded(left, out)));
        store(out + 16, _mm512_add_ps(load(out + 16), rounded(right, out)));
      });
      start += up.depth;
      to += up.columns;
    }
  }

  // Rows of numbers as they are, `width` from one to the next.
  static Rows plain(int64_t width, const T* from) {
    return {reinterpret_cast<const int32_t*>(from), width * static_cast<int64_t>(sizeof(T)) / 4, nullptr, nullptr, 0};
  }

  // Adds to the residual stream.
  void add(const Matrix& w, const T* from) {
    linear(w, rows(w, from), b.positions, thread, threads,
           [&](int64_t row, int64_t column, __m512 left, __m512 right) {
             T* to = &at.hidden[row * m.hidden + column];
             store(to, _mm512_add_ps(load(to), rounded(left, to)));
             store(to + 16, _mm512_add_ps(load(to + 16), rounded(right, to)));
           });
  }

  // The most likely token but the mask, and its probability.
  void choose(int64_t n) {
    float* logits = b.logits + n * m.head.columns;
    std::fill(logits + m.vocabulary, logits + m.head.columns, -INFINITY);
    if (m.mask_id < m.vocabulary) logits[m.mask_id] = -INFINITY;
    __m512 largest = load(logits);
    for (int64_t v = 16; v < m.head.columns; v += 16) largest = _mm512_max_ps(largest, load(logits + v));
    const float top = _mm512_reduce_max_ps(largest);
    int64_t token = 0;
    __m512 total = _mm512_setzero_ps();
    for (int64_t v = m.head.columns - 16; v >= 0; v -= 16) {
      const __m512 logit = load(logits + v);
      const __mmask16 same = _mm512_cmp_ps_mask(logit, _mm512_set1_ps(top), _CMP_EQ_OQ);
      if (same) token = v + __builtin_ctz(same);
      const __mmask16 real = _mm512_cmp_ps_mask(logit, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
      total = _mm512_add_ps(total, _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(logit, _mm512_set1_ps(top)))));
    }
    b.tokens[n] = token;
    b.confidences[n] = 1.0f / _mm512_reduce_add_ps(total);
  }
};

template <class T>
void run(const Model& model, const Batch& batch) {
  // Kept between calls; each engine decodes in a thread of its own.
  static thread_local Buffers<T> buffers;
  const int64_t rows = std::max(batch.positions, batch.picks);
  const int64_t depth = std::max(model.hidden, std::max(model.intermediate, model.heads * model.head_dim));
  int64_t columns = 0;
  for (int64_t n = 0; n < batch.positions; n++)
    columns = std::max(columns, Sight{batch.prefixes[n], batch.behind[n], 0}.columns());
  const auto fit = [](auto& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  };
  fit(buffers.hidden, rows * model.hidden);
  fit(buffers.normed, rows * model.hidden);
  fit(buffers.qkv, rows * (model.heads + 2 * model.kv_heads) * model.head_dim);
  fit(buffers.attended, rows * model.heads * model.head_dim);
  fit(buffers.gate_up, rows * 2 * model.intermediate);
  fit(buffers.activated, rows * model.intermediate);
  int64_t low = 0;
  for (int64_t g = 0; g < batch.num_groups; g++) low += batch.groups[g].count * batch.groups[g].adapter->ranks;
  fit(buffers.low, low);
  buffers.rounded_low.fit(low);
  buffers.rounded.fit(rows * depth);
  fit(buffers.scores, batch.threads * (model.heads / model.kv_heads) * (columns + 16));
  Buffers<T>& shared = buffers;
#pragma omp parallel num_threads(batch.threads)
  {
#ifdef _OPENMP
    Step<T>(model, batch, shared, omp_get_thread_num(), omp_get_num_threads()).run();
#else
    Step<T>(model, batch, shared, 0, 1).run();
#endif
  }
}

extern "C" void forward_float32(const Model* model, const Batch* batch) { run<float>(*model, *batch); }
extern "C" void forward_bfloat16(const Model* model, const Batch* batch) { run<bfloat16>(*model, *batch); }

extern "C" void correct_float32(const SamplerHead<float>* head, const MaskRows<float>* rows, int64_t threads) {
  correct_masks(*head, *rows, threads);
}
extern "C" void correct_bfloat16(const SamplerHead<bfloat16>* head, const MaskRows<bfloat16>* rows, int64_t threads) {
  correct_masks(*head, *rows, threads);
}
