// One forward of a decoder over the KV cache, in one call: the engine's step on a CPU.
//
// All threads go through the layers together. Each computes its share of rows, columns or heads, and they synchronize
// between operations. The output at a position depends, bit for bit, only on its own tokens: not on other rows or the
// number of threads.
#include <algorithm>
#include <numeric>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "illegal_instruction.h"
#include "inputs.h"
#include "linear.h"
#include "rms_norm.h"
#include "sampler_head.h"
#include "structures.h"
#include "team.h"

constexpr int64_t RUNS_EACH = 3;  // target number of attention runs per thread

// Consecutive positions of one slot, which read its keys together.
struct Run {
  int64_t first, count;
};

// Splits positions into runs short enough to give every thread some, with at most QUERIES queries per key head.
inline std::vector<Run> runs_of(const Model& model, const Batch& batch) {
  const int64_t most = std::max<int64_t>(1, QUERIES * model.kv_heads / model.heads);
  const int64_t share = batch.positions * model.kv_heads / (RUNS_EACH * batch.threads);
  const int64_t longest = std::clamp<int64_t>(share, 1, most);
  std::vector<Run> runs;
  for (int64_t n = 0; n < batch.positions; n++) {
    const bool goes_on = n > 0 && batch.slots[n] == batch.slots[n - 1] && runs.back().count < longest;
    if (goes_on) runs.back().count++;
    else runs.push_back({n, 1});
  }
  return runs;
}

// Buffers of one thread. Low-rank products are so small that computing them in every thread is faster than waiting.
template <class T>
struct Own {
  std::vector<float> attention;
  std::vector<T> low;
  Inputs inputs, low_inputs;
};

template <class T>
struct Buffers {
  std::vector<T> hidden, normed, qkv, attended, gate_up, activated;
  Inputs normed_inputs, inner_inputs;  // the latter of `attended` and `activated`
  std::vector<Run> runs;
  std::vector<Own<T>> own;
};

template <class T>
class Step {
 public:
  Step(const Model& model, const Batch& batch, Buffers<T>& buffers, Team& team, int64_t thread)
      : m(model), b(batch), at(buffers), own(buffers.own[thread]), team(team), thread(thread), threads(team.threads()) {}

  void run() {
    const T* embedding = static_cast<const T*>(m.embedding);
    each(b.positions, [&](int64_t n) {
      T* to = &at.hidden[n * m.hidden];
      for (int64_t g = 0; g < b.num_groups; g++)
        if (const Group& group = b.groups[g]; group.first <= n && n < group.first + group.count) {
          std::copy_n(static_cast<const T*>(group.adapter->mask_embedding) + b.offsets[n] * m.hidden, m.hidden, to);
          return;
        }
      const T* from = embedding + b.ids[n] * m.hidden;
      if (m.embedding_scale == 1.0f) std::copy_n(from, m.hidden, to);
      else multiply(to, from, m.embedding_scale, m.hidden);
    });
    for (int64_t index = 0; index < m.num_layers; index++) layer(m.layers[index], index);
    if (m.layers[m.num_layers - 1].down_norm) wait();
    each(b.picks, [&](int64_t n) {
      norm(n, b.picked[n], m.final_norm);
      std::copy_n(&at.normed[n * m.hidden], m.hidden, static_cast<T*>(b.hidden) + n * m.hidden);
      at.normed_inputs.prepare(reading_of(m.head), &at.normed[n * m.hidden], n * m.hidden, m.hidden);
    });
    wait();
    const auto unembed = [&](const auto& finish) {
      linear(m.head, rows(m.head, at.normed.data(), at.normed_inputs), b.picks, share(m.head.columns),
             [&](int64_t row, int64_t column, Floats left, Floats right) {
               store(b.logits + row * m.head.columns + column, finish(left));
               store(b.logits + row * m.head.columns + column + W, finish(right));
             });
    };
    if (m.logit_cap) unembed([&](Floats logit) { return soft_cap(logit, m.logit_cap); });
    else unembed([](Floats logit) { return logit; });
    wait();
    each(b.picks, [&](int64_t n) { choose(n); });
  }

 private:
  const Model& m;
  const Batch& b;
  Buffers<T>& at;
  Own<T>& own;
  Team& team;
  const int64_t thread, threads;

  void wait() { team.wait(); }

  // Returns this thread's share of the blocks of `columns` columns, of which `together` stay together.
  Blocks share(int64_t columns, int64_t together = 1) const {
    const int64_t parts = columns / COLUMNS / together;
    return {parts * thread / threads * together, parts * (thread + 1) / threads * together};
  }

  template <class Act>
  void each(int64_t count, const Act& act) const {
    for (int64_t n = count * thread / threads; n < count * (thread + 1) / threads; n++) act(n);
  }

  // Each thread does what needs no other thread's results before it waits for them.
  void layer(const Layer& l, int64_t index) {
    each(b.positions, [&](int64_t n) { norm(n, n, l.attention_norm); });
    prepare_normed(l.qkv);
    wait();
    T* keys = static_cast<T*>(b.keys[index]);
    T* values = static_cast<T*>(b.values[index]);
    const Blocks heads = share(l.qkv.columns, m.head_dim / COLUMNS);
    project(l.qkv, heads, at.normed.data(), at.normed_inputs, at.qkv.data());
    adapt(4 * index, l.qkv, heads, at.normed.data(), at.normed_inputs, at.qkv.data());
    for (int64_t n = 0; n < b.positions; n++) write(l, n, heads, keys, values);
    wait();
    // Later runs of a prompt see more columns, so the threads take turns.
    const int64_t runs = at.runs.size();
    const int64_t together = heads_together(l.output);
    for (int64_t task = thread; task < runs * m.kv_heads / together; task += threads)
      attend_run(l, at.runs[task % runs], task / runs * together, together, keys, values);
    wait();
    add(l.output, 4 * index + 1, at.attended.data(), l.output_norm);
    each(b.positions, [&](int64_t n) { norm(n, n, l.mlp_norm); });
    prepare_normed(l.gate_up);
    wait();
    activate(l, 4 * index + 2);
    wait();
    add(l.down, 4 * index + 3, at.activated.data(), l.down_norm);
  }

  void norm(int64_t row, int64_t from, const float* weight) {
    rms_norm(&at.normed[row * m.hidden], &at.hidden[from * m.hidden], weight, m.hidden, m.norm_epsilon, m.norm_rounding);
  }

  // Returns whether an adapter decodes the position. Positions are sorted by adapter, those without one first.
  bool is_adapted(int64_t n) const { return b.num_groups && n >= b.groups[0].first; }

  // Rotates this thread's heads of a position, and stores those of keys and values in the cache.
  //
  // Products of an adapter may overflow, so its values are made finite. Queries that do not see a value multiply it by 0,
  // and 0 times NaN is NaN. Keys may be anything, because scores that are not seen are replaced.
  void write(const Layer& l, int64_t n, const Blocks& mine, T* keys, T* values) {
    const int64_t size = m.head_dim, width = (m.heads + 2 * m.kv_heads) * size;
    const int64_t cell = b.slots[n] * b.slot_stride + b.columns[n] * size;
    const int64_t turn = (l.rotary * b.rotated + b.places[n]) * m.rotary_dim;
    for (int64_t head = mine.first * COLUMNS / size; head < mine.last * COLUMNS / size; head++) {
      T* part = &at.qkv[n * width + head * size];
      const int64_t key = head - m.heads, value = key - m.kv_heads;
      if (value >= 0) {
        T* to = values + cell + value * b.head_stride;
        if (is_adapted(n)) copy_finite(to, part, size);
        else std::copy_n(part, size, to);
        continue;
      }
      const float* weight = key < 0 ? l.query_norm : l.key_norm;
      if (weight) rms_norm(part, part, weight, size, m.norm_epsilon, m.norm_rounding);
      T* to = key < 0 ? part : keys + cell + key * b.head_stride;
      rotate(to, part, b.cosines + turn, b.sines + turn, m.rotary_dim);
      if (key >= 0) std::copy(part + m.rotary_dim, part + size, to + m.rotary_dim);
    }
  }

  // Returns how many key heads one thread takes together, so that it computes whole groups of the input of `w`.
  int64_t heads_together(const Matrix& w) const {
    return reading_of(w) == Reading::BYTES ? GROUP / std::gcd(GROUP, m.heads / m.kv_heads * m.head_dim) : 1;
  }

  // Attention of the positions of a run over `count` key heads.
  void attend_run(const Layer& l, const Run& run, int64_t first, int64_t count, const T* keys, const T* values) {
    const int64_t width = m.heads / m.kv_heads * m.head_dim;
    for (int64_t head = first; head < first + count; head++) attend_head(l, run, head, keys, values);
    for (int64_t n = run.first; n < run.first + run.count; n++)
      prepare_inner(l.output, at.attended.data(), n, first * width, count * width);
  }

  // The same over one key head, for all query heads that share it.
  void attend_head(const Layer& l, const Run& run, int64_t head, const T* keys, const T* values) {
    const int64_t groups = m.heads / m.kv_heads, width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    const int64_t offset = b.slots[run.first] * b.slot_stride + head * b.head_stride;
    float* scratch = own.attention.data();
    Query<T> queries[QUERIES];
    int64_t count = 0;
    for (int64_t n = run.first; n < run.first + run.count; n++) {
      const int64_t first = l.window ? std::max<int64_t>(0, b.places[n] - l.window + 1) : 0;
      for (int64_t query = head * groups; query < (head + 1) * groups; query++) {
        queries[count++] = {&at.qkv[n * width + query * m.head_dim], &at.attended[(n * m.heads + query) * m.head_dim],
                            Sight{b.prefixes[n], b.behind[n], first}};
        if (count == QUERIES) attend_with(queries, count, keys + offset, values + offset, scratch), count = 0;
      }
    }
    if (count) attend_with(queries, count, keys + offset, values + offset, scratch);
  }

  void attend_with(const Query<T>* queries, int64_t count, const T* keys, const T* values, float* scratch) {
    const Scores how{m.scaling, m.attention_cap};
    switch (m.head_dim) {
      case 32: return attend<32>(queries, count, keys, values, how, scratch);
      case 64: return attend<64>(queries, count, keys, values, how, scratch);
      case 96: return attend<96>(queries, count, keys, values, how, scratch);
      case 128: return attend<128>(queries, count, keys, values, how, scratch);
      case 256: return attend<256>(queries, count, keys, values, how, scratch);
    }
  }

  // Computes this thread's columns of the activated MLP, in the form that `down` reads.
  void activate(const Layer& l, int64_t number) {
    const Blocks mine = share(l.gate_up.columns, reading_of(l.down) == Reading::BYTES ? GROUP / W : 2);
    const auto finish = [&](int64_t row, int64_t column, Floats gate, Floats up) {
      T* to = &at.activated[row * m.intermediate + column / 2];
      store(to, activate_and_mul<T>(m.activation, gate, up));
    };
    if (b.num_groups == 0) {
      const T* type = nullptr;
      linear(l.gate_up, rows(l.gate_up, at.normed.data(), at.normed_inputs), b.positions, mine,
             [&](int64_t row, int64_t column, Floats gate, Floats up) {
               finish(row, column, rounded(gate, type), rounded(up, type));
             });
    } else {
      project(l.gate_up, mine, at.normed.data(), at.normed_inputs, at.gate_up.data());
      adapt(number, l.gate_up, mine, at.normed.data(), at.normed_inputs, at.gate_up.data());
      for (int64_t n = 0; n < b.positions; n++)
        for (int64_t column = mine.first * COLUMNS; column < mine.last * COLUMNS; column += COLUMNS) {
          const T* gate_up = &at.gate_up[n * 2 * m.intermediate + column];
          finish(n, column, load(gate_up), load(gate_up + W));
        }
    }
    for (int64_t n = 0; n < b.positions; n++)
      prepare_inner(l.down, at.activated.data(), n, mine.first * W, (mine.last - mine.first) * W);
  }

  // Returns rows in the form that `w` reads. They must have been prepared before.
  Rows rows(const Matrix& w, const T* from, const Inputs& inputs) const {
    const Reading reading = reading_of(w);
    return reading == Reading::PLAIN ? plain(w.depth, from) : inputs.rows(reading, 0, w.depth);
  }

  // Prepares this thread's rows of `normed` for `w`.
  void prepare_normed(const Matrix& w) {
    each(b.positions, [&](int64_t n) {
      at.normed_inputs.prepare(reading_of(w), &at.normed[n * w.depth], n * w.depth, w.depth);
    });
  }

  // Prepares `count` numbers of a row for `w`, from the one at `first` on.
  void prepare_inner(const Matrix& w, const T* from, int64_t row, int64_t first, int64_t count) {
    const int64_t begin = row * w.depth + first;
    at.inner_inputs.prepare(reading_of(w), from + begin, begin, count);
  }

  void project(const Matrix& w, const Blocks& mine, const T* from, const Inputs& inputs, T* to) {
    linear(w, rows(w, from, inputs), b.positions, mine, [&](int64_t row, int64_t column, Floats left, Floats right) {
      store(to + row * w.columns + column, left);
      store(to + row * w.columns + column + W, right);
    });
  }

  // Adds the low-rank products at masks to the output of layer `w`, in this thread's columns.
  void adapt(int64_t number, const Matrix& w, const Blocks& mine, const T* from, const Inputs& inputs, T* to) {
    for (int64_t g = 0; g < b.num_groups; g++) {
      const Group& group = b.groups[g];
      if (const LowRank& pair = group.adapter->pairs[number]; pair.parts) {
        narrow(pair, group, w, from + group.first * w.depth, inputs);
        widen(pair, group, w, mine, to + group.first * w.columns);
      }
    }
  }

  // Projects the masks of a group to all ranks, in this thread's own buffer.
  void narrow(const LowRank& pair, const Group& group, const Matrix& w, const T* from, const Inputs& inputs) {
    const int64_t ranks = pair.down.columns;
    const Reading reading = reading_of(pair.down);
    const bool is_plain = reading == Reading::PLAIN, is_prepared = reading == reading_of(w);
    if (!is_plain && !is_prepared)
      for (int64_t n = 0; n < group.count; n++) own.inputs.prepare(reading, from + n * w.depth, n * w.depth, w.depth);
    const Rows x = is_plain      ? plain(w.depth, from)
                   : is_prepared ? inputs.rows(reading, group.first * w.depth, w.depth)
                                 : own.inputs.rows(reading, 0, w.depth);
    linear(pair.down, x, group.count, Blocks{0, ranks / COLUMNS},
           [&](int64_t row, int64_t column, Floats left, Floats right) {
             store(&own.low[row * ranks + column], left);
             store(&own.low[row * ranks + column + W], right);
           });
    own.low_inputs.prepare(reading_of(pair.up[0]), own.low.data(), 0, group.count * ranks);
  }

  void widen(const LowRank& pair, const Group& group, const Matrix& w, const Blocks& mine, T* to) {
    const int64_t halves = w.alternating ? 2 : 1, half_blocks = w.columns / COLUMNS / halves;
    int64_t rank = 0, begin = 0;  // first rank and first block of this part
    for (int64_t part = 0; part < pair.parts; part++) {
      const Matrix& up = pair.up[part];
      const int64_t blocks = up.columns / COLUMNS, ranks = pair.down.columns;
      const Reading reading = reading_of(up);
      const Rows x =
          reading == Reading::PLAIN ? plain(ranks, &own.low[rank]) : own.low_inputs.rows(reading, rank, ranks);
      for (int64_t half = 0; half < halves; half++) {
        const int64_t first = half * half_blocks + mine.first / halves, last = half * half_blocks + mine.last / halves;
        const Blocks here{std::max<int64_t>(0, first - begin), std::min(blocks, last - begin)};
        linear(up, x, group.count, here, [&](int64_t row, int64_t column, Floats left, Floats right) {
          T* out = to + row * w.columns;
          for (int side = 0; side < 2; side++) {
            T* sum = out + place(w, begin * COLUMNS + column + W * side);
            store(sum, load(sum) + rounded(side ? right : left, out));
          }
        });
      }
      rank += up.depth;
      begin += blocks;
    }
  }

  // Returns where a column of the layers of `w` is in its output.
  static int64_t place(const Matrix& w, int64_t column) {
    if (!w.alternating) return column;
    const int64_t half = w.columns / 2;
    return 2 * (column % half) + column / half * W;
  }

  // Returns unchanged rows of `width` numbers.
  static Rows plain(int64_t width, const T* from) {
    return {reinterpret_cast<const int32_t*>(from), width * static_cast<int64_t>(sizeof(T)) / 4};
  }

  // Adds the output of layer `w`, adapted by pair `number`, to the residual stream. Afterwards every thread may read the
  // positions that it has in `each`; without a norm, all positions.
  void add(const Matrix& w, int64_t number, const T* from, const float* weight) {
    if (weight) return add_normed(w, number, from, weight);
    linear(w, rows(w, from, at.inner_inputs), b.positions, share(w.columns),
           [&](int64_t row, int64_t column, Floats left, Floats right) {
             T* to = &at.hidden[row * m.hidden + column];
             store(to, load(to) + rounded(left, to));
             store(to + W, load(to + W) + rounded(right, to));
           });
    adapt(number, w, share(w.columns), from, at.inner_inputs, at.hidden.data());
    wait();
  }

  // The same with a norm of the whole output, for which `normed` has room.
  void add_normed(const Matrix& w, int64_t number, const T* from, const float* weight) {
    project(w, share(w.columns), from, at.inner_inputs, at.normed.data());
    adapt(number, w, share(w.columns), from, at.inner_inputs, at.normed.data());
    wait();
    each(b.positions, [&](int64_t n) {
      T* out = &at.normed[n * m.hidden];
      rms_norm(out, out, weight, m.hidden, m.norm_epsilon, m.norm_rounding);
      T* to = &at.hidden[n * m.hidden];
      for (int64_t d = 0; d < m.hidden; d += W) store(to + d, load(to + d) + load(out + d));
    });
  }

  // Finds the most likely token other than the mask, and its probability.
  void choose(int64_t n) {
    float* logits = b.logits + n * m.head.columns;
    std::fill(logits + m.vocabulary, logits + m.head.columns, -INFINITY);
    if (m.mask_id < m.vocabulary) logits[m.mask_id] = -INFINITY;
    Floats largest = load(logits);
    for (int64_t v = W; v < m.head.columns; v += W) largest = maximum(largest, load(logits + v));
    const Floats top = broadcast(largest_of(largest)), nothing = broadcast(-INFINITY);
    int64_t token = 0;
    Floats total = Floats{};
    for (int64_t v = m.head.columns - W; v >= 0; v -= W) {
      const Floats logit = load(logits + v);
      if (const uint32_t same = bits_of(equal(logit, top))) token = v + __builtin_ctz(same);
      total = total + select(differ(logit, nothing), exponential(logit - top), Floats{});
    }
    b.tokens[n] = token;
    b.confidences[n] = 1.0f / sum_of(total);
  }
};

template <class T>
void run(const Model& model, const Batch& batch) {
  // Buffers are reused between calls. Each engine decodes in its own thread, so they are thread-local.
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
  buffers.normed_inputs.fit(rows, model.hidden);
  buffers.inner_inputs.fit(rows, depth);
  buffers.runs = runs_of(model, batch);
  buffers.own.resize(std::max<size_t>(buffers.own.size(), batch.threads));
  for (int64_t thread = 0; thread < batch.threads; thread++) {
    Own<T>& own = buffers.own[thread];
    fit(own.attention, scratch_size(columns, model.head_dim));
    for (int64_t g = 0; g < batch.num_groups; g++) {
      const Group& group = batch.groups[g];
      fit(own.low, group.count * group.adapter->ranks);
      own.inputs.fit(group.count, depth);
      own.low_inputs.fit(group.count, group.adapter->ranks);
    }
  }
  Team& team = own_team();
  Buffers<T>& shared = buffers;  // the caller's, not those of the thread that runs
  team.run(batch.threads, [&](int64_t thread) {
    [[maybe_unused]] const Tiles tiles;
    Step<T>(model, batch, shared, team, thread).run();
  });
}

// Everything else is hidden, so that libraries of several families can be loaded into one process.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const WeightLayout layout;
const WeightLayout layout = {COLUMNS, PAIRS, BYTE_OFFSET};

EXPORTED void end_at_illegal_instructions() { illegal_instruction::end_process_with_a_line(); }

EXPORTED void forward_float32(const Model* model, const Batch* batch) {
  illegal_instruction::RunningKernel running;
  run<float>(*model, *batch);
}
EXPORTED void forward_bfloat16(const Model* model, const Batch* batch) {
  illegal_instruction::RunningKernel running;
  run<bfloat16>(*model, *batch);
}

EXPORTED void correct_float32(const SamplerHead<float>* head, const MaskRows<float>* rows, int64_t threads) {
  illegal_instruction::RunningKernel running;
  correct_masks(*head, *rows, threads);
}
EXPORTED void correct_bfloat16(const SamplerHead<bfloat16>* head, const MaskRows<bfloat16>* rows, int64_t threads) {
  illegal_instruction::RunningKernel running;
  correct_masks(*head, *rows, threads);
}
