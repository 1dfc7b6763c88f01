// Checks each kernel of the family that the compiler flags select against a plain scalar version, and prints "right".
#include <cstdio>
#include <cstdlib>
#include <random>

#include "decoder.cpp"
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static std::mt19937 generator(7);
static float uniform(float size) { return std::uniform_real_distribution<float>(-size, size)(generator); }

static void expect(bool right, const char* name, double found = 0, double expected = 0) {
  if (right) return;
  std::printf("%s: %.9g, expected %.9g\n", name, found, expected);
  std::exit(1);
}
static void expect_near(double found, double expected, double tolerance, const char* name) {
  expect(std::abs(found - expected) <= tolerance, name, found, expected);
}

static float number_of(bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
static float number_of(float value) { return value; }
static bfloat16 nearest_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {uint16_t(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static void put(float& to, float value) { to = value; }
static void put(bfloat16& to, float value) { to = nearest_bfloat16(value); }

// The multiplier and the offset of one half of a group of 4-bit numbers.
static int multiplier_of(int column, int half) { return 1 + (7 * column + half) % 15; }
static int offset_of(int column, int half) { return std::max(15 * multiplier_of(column, half) - 127, (9 * column + half) % 128); }

// Weights of COLUMNS * 2 outputs, laid out as packed.py does it, and as plain numbers.
struct Packed {
  std::vector<char> bytes;
  std::vector<float> plain;  // [columns, depth]
  Matrix matrix;

  Packed(Format format, int64_t depth, bool extreme) : plain(2 * COLUMNS * depth) {
    const int64_t columns = 2 * COLUMNS, groups = depth / GROUP;
    const auto add = [this](auto number) {
      const char* from = reinterpret_cast<const char*>(&number);
      bytes.insert(bytes.end(), from, from + sizeof number);
    };
    const auto at = [&](int64_t column, int64_t d) -> float& { return plain[column * depth + d]; };
    const auto whole = [&](int least, int most) {
      return extreme ? (generator() % 2 ? least : most) : least + int(generator() % (most - least + 1));
    };
    const auto scale_of = [](int64_t column, int64_t group) { return 1.0f / (2 << (column + group) % 3); };
    const auto in_float16 = [](float power) -> uint16_t { return (15 + std::ilogb(power)) << 10; };
    for (int64_t first = 0; first < columns; first += COLUMNS) {
      if (format == FLOAT32)
        for (int64_t d = 0; d < depth; d++)
          for (int c = 0; c < COLUMNS; c++) add(at(first + c, d) = uniform(1));
      if (format == BFLOAT16) {
        std::vector<bfloat16> stored(COLUMNS * depth);
        for (int c = 0; c < COLUMNS; c++)
          for (int64_t d = 0; d < depth; d++)
            at(first + c, d) = number_of(stored[c * depth + d] = nearest_bfloat16(uniform(1)));
        if (PAIRS)
          for (int64_t d = 0; d < depth; d += 2)
            for (int c = 0; c < COLUMNS; c++) add(stored[c * depth + d]), add(stored[c * depth + d + 1]);
        else
          for (int64_t d = 0; d < depth; d++)
            for (int c = 0; c < W; c++) add(stored[c * depth + d]), add(stored[(W + c) * depth + d]);
      }
      for (int64_t group = 0; format >= INT8 && group < groups; group++) {
        for (int step = 0; step < GROUP_STEPS; step++)
          for (int c = 0; c < (format == INT8 ? COLUMNS : W); c++)
            for (int n = 0; n < 4; n++) {
              const int64_t d = group * GROUP + 4 * step + n;
              if (format == INT8) {
                const int number = whole(-127, 127);
                at(first + c, d) = scale_of(first + c, group) * number;
                add(uint8_t(number + BYTE_OFFSET));
              } else {
                const int low = whole(0, 15), high = whole(0, 15);
                const auto put = [&](int64_t column, int stored) {
                  const int half = 4 * step / HALF;
                  at(column, d) = scale_of(column, group) * (stored * multiplier_of(column, half) - offset_of(column, half));
                };
                put(first + c, low), put(first + W + c, high);
                add(uint8_t(low | high << 4));
              }
            }
        for (int c = 0; c < COLUMNS; c++) add(in_float16(scale_of(first + c, group)));
        for (const auto of : {multiplier_of, offset_of})
          for (int part = 0; format == INT4 && part < 2; part++)
            for (int c = 0; c < COLUMNS; c++) add(uint8_t(of(first + c, part)));
      }
    }
    matrix = {bytes.data(), nullptr, columns, depth, format};
  }
};

template <class T>
void check_linear(Format format, bool extreme) {
  const int64_t depth = 3 * GROUP, rows = 290;  // more than stay in the cache together
  Packed packed(format, depth, extreme);
  std::vector<float> bias(packed.matrix.columns);
  for (float& number : bias) number = uniform(1);
  packed.matrix.bias = bias.data();
  std::vector<T> x(rows * depth);
  for (T& number : x) put(number, extreme ? (generator() % 2 ? 1.0f : -1.0f) : uniform(1));
  const Reading reading = reading_of(packed.matrix);
  Inputs inputs;
  inputs.fit(rows, depth);
  for (int64_t r = 0; r < rows; r++) inputs.prepare(reading, &x[r * depth], r * depth, depth);
  const auto rows_from = [&](int64_t row) {
    if (reading != Reading::PLAIN) return inputs.rows(reading, row * depth, depth);
    return Rows{reinterpret_cast<const int32_t*>(&x[row * depth]), int64_t(depth * sizeof(T) / 4)};
  };
  const int64_t columns = packed.matrix.columns;
  std::vector<float> together(rows * columns), alone(columns);
  const auto into = [&](std::vector<float>& to) {
    return [&to, columns](int64_t row, int64_t column, Floats left, Floats right) {
      store(&to[row * columns + column], left), store(&to[row * columns + column + W], right);
    };
  };
  for (int64_t count = 1; count <= rows; count += count < 35 || count > 255 ? 1 : 55) {
    linear(packed.matrix, rows_from(0), count, Blocks{0, columns / COLUMNS}, into(together));
    for (int64_t row = 0; row < count; row++) {
      linear(packed.matrix, rows_from(row), 1, Blocks{0, columns / COLUMNS}, into(alone));
      expect(!std::memcmp(&together[row * columns], alone.data(), 4 * columns), "a row depends on others");
      for (int64_t column = 0; column < columns; column++) {
        double sum = bias[column], size = 1;
        for (int64_t d = 0; d < depth; d++) {
          double number = number_of(x[row * depth + d]);
          if (reading == Reading::BYTES)
            number = inputs.scales[(row * depth + d) / GROUP] *
                     reinterpret_cast<const int8_t*>(inputs.words.data())[row * depth + d];
          sum += number * packed.plain[column * depth + d];
          size += std::abs(number * packed.plain[column * depth + d]);
        }
        expect_near(together[row * columns + column], sum, 2e-6 * size, "linear");
      }
    }
  }
}

template <class T>
void check_rounding_of_rows() {
  std::vector<T> x(2 * GROUP);
  for (T& number : x) put(number, uniform(3));
  Inputs inputs;
  inputs.fit(1, 2 * GROUP);
  inputs.prepare(Reading::BYTES, x.data(), 0, 2 * GROUP);
  for (int group = 0; group < 2; group++) {
    float top = 0;
    int sum = 0;
    for (int d = 0; d < GROUP; d++) top = std::max(top, std::abs(number_of(x[GROUP * group + d])));
    for (int d = 0; d < GROUP; d++) {
      const int found = reinterpret_cast<int8_t*>(inputs.words.data())[GROUP * group + d];
      expect_near(found, number_of(x[GROUP * group + d]) * 127 / top, 0.50001, "rounded number");
      sum += found;
    }
    expect_near(inputs.sums[2 * group] + inputs.sums[2 * group + 1], sum, 0, "sum of rounded numbers");
    expect_near(inputs.scales[group], top / 127, 1e-9, "scale");
  }
}

// A number that is no number spoils the rows that have it, however many there are, and no others.
static void check_not_a_number(Format format) {
  const int64_t depth = 2 * GROUP, rows = 40;
  const Packed packed(format, depth, false);
  std::vector<float> x(rows * depth, 1.0f), out(rows * packed.matrix.columns);
  x[3 * depth + 5] = x[3 * depth + 6] = NAN, x[20 * depth + 70] = INFINITY;
  Inputs inputs;
  inputs.fit(rows, depth);
  for (int64_t r = 0; r < rows; r++) inputs.prepare(Reading::BYTES, &x[r * depth], r * depth, depth);
  for (const int64_t count : {4, 21, 40}) {
    linear(packed.matrix, inputs.rows(Reading::BYTES, 0, depth), count, Blocks{0, packed.matrix.columns / COLUMNS},
           [&](int64_t row, int64_t column, Floats left, Floats right) {
             store(&out[row * packed.matrix.columns + column], left), store(&out[row * packed.matrix.columns + column + W], right);
           });
    for (int64_t r = 0; r < count; r++) {
      const float number = out[r * packed.matrix.columns];
      expect((number != number) == (r == 3 || r == 20), "not a number");
    }
  }
}

template <int D, class T>
void check_attention(float tolerance, float cap = 0, int64_t begin = 0) {
  const Scores how{0.3f, cap};
  const int64_t keys = 300, count = QUERIES;
  std::vector<T> key((keys + 1) * D), value((keys + 1) * D), query(count * D), out(count * D), alone(D);
  for (auto* numbers : {&key, &value, &query})
    for (T& number : *numbers) put(number, uniform(1));
  std::vector<float> scratch(scratch_size(keys, D));
  Query<T> queries[QUERIES];
  for (int64_t q = 0; q < count; q++)
    queries[q] = {&query[q * D], &out[q * D], Sight{begin + 10 + 10 * q, q % 3 ? 0x15ull : 0, q % 2 ? begin + 7 : begin}};
  int64_t columns = 0;  // what was never written may be anything
  for (const Query<T>& one : queries) columns = std::max(columns, one.sight.columns());
  for (auto* numbers : {&key, &value})
    for (int64_t at = columns * D; at < int64_t(numbers->size()); at++) put((*numbers)[at], NAN);
  for (int64_t rows = 1; rows <= count; rows++) attend<D>(queries, rows, key.data(), value.data(), how, scratch.data());
  for (int64_t q = 0; q < count; q++) {
    double total = 0;
    std::vector<double> sum(D);
    for (int64_t column = 0; column < queries[q].sight.columns(); column++) {
      if (!queries[q].sight.sees(column)) continue;
      double score = 0;
      for (int d = 0; d < D; d++) score += double(number_of(query[q * D + d])) * number_of(key[column * D + d]);
      const double scaled = cap ? cap * std::tanh(0.3 * score / cap) : 0.3 * score;
      const double weight = std::exp(scaled);
      total += weight;
      for (int d = 0; d < D; d++) sum[d] += weight * number_of(value[column * D + d]);
    }
    for (int d = 0; d < D; d++) expect_near(number_of(out[q * D + d]), sum[d] / total, tolerance, "attention");
    Query<T> one = queries[q];
    one.to = alone.data();
    attend<D>(&one, 1, key.data(), value.data(), how, scratch.data());
    expect(!std::memcmp(&out[q * D], alone.data(), D * sizeof(T)), "a query depends on others");
  }
}

static void check_numbers() {
  for (float first = -90; first < 90; first += 0.25f * W) {
    float x[W], found[W];
    for (int i = 0; i < W; i++) x[i] = first + 0.25f * i;
    store(found, exponential(load(x)));
    for (int i = 0; i < W; i++) {
      const double expected = std::exp(std::clamp(double(x[i]), -87.0, 88.0));
      expect_near(found[i], expected, 5e-7 * expected, "exponential");
    }
  }
  for (float first = -9; first < 9; first += 0.03f * W) {
    float x[W], found[W];
    for (int i = 0; i < W; i++) x[i] = first + 0.03f * i;
    store(found, soft_cap(load(x), 2.5f));
    for (int i = 0; i < W; i++) expect_near(found[i], 2.5 * std::tanh(x[i] / 2.5), 1e-6, "soft cap");
  }
  for (int times = 0; times < 100000; times++) {
    float value[W], kept[W];
    bfloat16 found[W];
    for (float& number : value) {
      const uint32_t bits = generator();
      std::memcpy(&number, &bits, 4);
#ifdef KERNELS_ROUND
      if (std::fpclassify(number) == FP_SUBNORMAL) number = 0;
#endif
    }
    store(found, load(value)), store(kept, rounded(load(value), found));
    for (int i = 0; i < W; i++) {
      const bool both_nan = value[i] != value[i] && number_of(found[i]) != number_of(found[i]) && kept[i] != kept[i];
      if (both_nan) continue;
      expect(found[i].bits == nearest_bfloat16(value[i]).bits, "bfloat16", found[i].bits, nearest_bfloat16(value[i]).bits);
      expect(nearest_bfloat16(kept[i]).bits == found[i].bits, "rounded");
    }
  }
}

template <class T>
void check_elementwise(float tolerance) {
  const int64_t size = 96;
  std::vector<T> x(2 * size), out(size);
  std::vector<float> weight(size), cosine(size), sine(size);
  double squares = 0;
  for (T& number : x) put(number, uniform(2));
  for (int64_t d = 0; d < size; d++) weight[d] = uniform(1), cosine[d] = uniform(1), sine[d] = uniform(1);
  for (int64_t d = 0; d < size; d++) squares += double(number_of(x[d])) * number_of(x[d]);
  for (const NormRounding rounding : {BEFORE_WEIGHT, AFTER_WEIGHT}) {
    rms_norm(out.data(), x.data(), weight.data(), size, 1e-5f, rounding);
    for (int64_t d = 0; d < size; d++)
      expect_near(number_of(out[d]), number_of(x[d]) / std::sqrt(squares / size + 1e-5) * weight[d], tolerance, "norm");
  }
  multiply(out.data(), x.data(), 1.5f, size);
  for (int64_t d = 0; d < size; d++) expect_near(number_of(out[d]), 1.5 * number_of(x[d]), tolerance, "multiple");
  const auto activate = [&](Activation kind) {
    for (int64_t d = 0; d < size; d += W)
      store(&out[d], activate_and_mul<T>(kind, load(&x[d]), load(&x[size + d])));
  };
  activate(GELU_TANH);
  for (int64_t d = 0; d < size; d++) {
    const double gate = number_of(x[d]), tangent = std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate));
    expect_near(number_of(out[d]), gate * (1 + tangent) / 2 * number_of(x[size + d]), 2 * tolerance, "gelu");
  }
  activate(SILU);
  for (int64_t d = 0; d < size; d++) {
    const double gate = number_of(x[d]);
    expect_near(number_of(out[d]), gate / (1 + std::exp(-gate)) * number_of(x[size + d]), 2 * tolerance, "silu");
  }
  rotate(out.data(), x.data(), cosine.data(), sine.data(), size);
  for (int64_t d = 0; d < size; d++) {
    const double other = d < size / 2 ? -number_of(x[d + size / 2]) : number_of(x[d - size / 2]);
    expect_near(number_of(out[d]), number_of(x[d]) * cosine[d] + other * sine[d], 2 * tolerance, "rotation");
  }
  put(x[5], NAN), put(x[40], INFINITY), put(x[95], -INFINITY);
  copy_finite(out.data(), x.data(), size);
  for (int64_t d = 0; d < size; d++)
    expect_near(number_of(out[d]), std::isfinite(number_of(x[d])) ? number_of(x[d]) : 0, 0, "finite copy");
}

static void check_likeliest() {
  std::vector<float> logits(1003);
  for (float& logit : logits) logit = uniform(9);
  Candidate kept[CANDIDATES];
  expect(likeliest(logits.data(), 1003, kept) == CANDIDATES, "number of candidates");
  std::sort(logits.rbegin(), logits.rend());
  for (int64_t c = 0; c < CANDIDATES; c++) expect_near(kept[c].logit, logits[c], 0, "candidate");
}

int main() {
#ifdef __AMX_TILE__
  syscall(SYS_arch_prctl, 0x1023, 18);  // families.py does this in Python
#endif
  check_numbers();
  check_linear<float>(FLOAT32, false);
  check_linear<bfloat16>(BFLOAT16, false);
  for (const bool extreme : {false, true})
    for (const Format format : {INT8, INT4}) check_linear<float>(format, extreme), check_linear<bfloat16>(format, extreme);
  for (const Format format : {INT8, INT4}) check_not_a_number(format);
  check_rounding_of_rows<float>(), check_rounding_of_rows<bfloat16>();
  check_attention<32, float>(1e-5f), check_attention<64, bfloat16>(2e-2f), check_attention<96, float>(1e-5f);
  check_attention<128, bfloat16>(2e-2f), check_attention<256, float>(1e-5f);
  check_attention<256, bfloat16>(2e-2f, 0, 40), check_attention<96, bfloat16>(2e-2f), check_attention<64, float>(1e-5f, 0, 40);
  check_attention<64, float>(1e-5f, 0.7f), check_attention<32, bfloat16>(2e-2f, 2.0f);
  check_elementwise<float>(1e-5f), check_elementwise<bfloat16>(3e-2f);
  check_likeliest();
  std::puts("right");
}
