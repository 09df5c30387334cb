// Products and decoding steps that read every weight once, on all threads.
//
// A step of a few tokens is bound by reading weights, so the code is a loop over rows of W: each row is
// widened to float32 on the way and meets all vectors while it is in the cache. Vectors of eight floats are
// the compiler's own type, which any target has. This file knows neither tensors nor tokens; native.py fills
// the structures below, field by field.
//
// Shapes: B rows of the batch, S visible slots, H hidden size, N query heads, K key and value heads, d head
// width, F inner width of the MLP.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

extern "C" {

// W: (rows, columns). Floats, or integers by groups of 32 columns with scale and (unless null) shift.
struct Matrix {
  const void* weight;
  const float* scale;  // (rows, columns / 32)
  const float* shift;  // (rows, columns / 32)
  const float* bias;   // (rows), or null
  int64_t rows, columns, kind;
};

struct Block {
  const float *attention_gain, *attention_shift, *mlp_gain, *mlp_shift;  // a shift is a LayerNorm's, or null
  Matrix qkv, output, gate_up, down;
};

struct Decoder {
  const Block* blocks;
  const float *gain, *shift;  // of the final norm
  const float* frequencies;   // (d/2), radians per position
  int64_t layers, hidden, heads, groups, width, inner, layernorm;
  double eps;
};

// loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean + scale_U0, (B, rows) each; b is W's bias.
struct Scores {
  float *loc_S, *scale_S;
  const float* balance;                  // (rows), or null
  const float *mean, *loc_U0, *scale_U0;  // (B)
};

struct Step {
  float* x;                            // (B, H): embeddings in, features after the final norm out
  const uint8_t* valid;                // (B, capacity): 0 at padding; the new token's slot is valid
  float *const *keys, *const *values;  // per layer (capacity, B, K, d)
  int64_t batch, slots, capacity, threads;  // the new token takes the last of S slots
};
}

namespace {

enum Kind : int64_t { kFloat32, kBfloat16, kBytes, kNibbles };

constexpr int kLanes = 8;
constexpr int kParts = 4;  // vectors of eight floats that are read at a time
constexpr int64_t kGroup = kLanes * kParts;

using Floats = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Shorts = int16_t __attribute__((vector_size(32)));

template <typename T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float sum(Floats v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

inline Words nearest(Floats v) {
  return __builtin_convertvector(v + (v < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Words);
}

inline Floats absolute(Floats v) { return (Floats)((Words)v & 0x7fffffff); }

// a_j b_j + a_{j+1} b_{j+1} for even j.
inline Words products_of_pairs(Shorts a, Shorts b) {
#ifdef __AVX2__
  return (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Words even_a = (Words)a << 16 >> 16, even_b = (Words)b << 16 >> 16;
  return even_a * even_b + ((Words)a >> 16) * ((Words)b >> 16);
#endif
}

float dot(const float* a, const float* b, int64_t size) {
  Floats total = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total += load<Floats>(a + i) * load<Floats>(b + i);
  float rest = 0.0f;
  for (; i < size; ++i) rest += a[i] * b[i];
  return sum(total) + rest;
}

// [0, size) or a part of it.
struct Range {
  int64_t first, last;
  Range(int64_t first, int64_t last) : first(first), last(last) {}
  // The share of one of several threads.
  static Range share(int64_t size, int64_t thread, int64_t threads) {
    return {size * thread / threads, size * (thread + 1) / threads};
  }
};

// One row of W, widened on the way: at(i, part) are eight of the 32 columns from i on ---------------------------

struct Float32Row {
  const float* row;
  Float32Row(const Matrix& m, int64_t r) : row(static_cast<const float*>(m.weight) + r * m.columns) {}
  Floats at(int64_t i, int part) const { return load<Floats>(row + i + part * kLanes); }
  float one(int64_t i) const { return row[i]; }
};

// bfloat16 is the upper half of a float32, so a word holds two: even columns come first, then odd ones. The
// vectors are put into that order once, which is cheaper than sorting every row.
struct Bfloat16Row {
  const uint16_t* row;
  Bfloat16Row(const Matrix& m, int64_t r) : row(static_cast<const uint16_t*>(m.weight) + r * m.columns) {}
  Floats at(int64_t i, int part) const {
    const Words pairs = load<Words>(row + i + part / 2 * 2 * kLanes);
    return (Floats)(part % 2 ? pairs & ~0xffff : pairs << 16);
  }
  float one(int64_t i) const {
    const uint32_t bits = uint32_t(row[i]) << 16;
    return load<float>(&bits);
  }
};

// Integers of 8 or 4 bits, in 32-bit words. Byte p of word j of a group belongs to column j + 8p; with 4 bits two
// groups share the words, the first in the lower halves of the bytes.
template <int bits>
struct Levels {
  const int32_t* row;
  Levels(const Matrix& m, int64_t r) : row(static_cast<const int32_t*>(m.weight) + r * m.columns * bits / 32) {}
  // Columns 8·part to 8·part + 7 of group g.
  Words part(int64_t g, int part) const {
    if constexpr (bits == 8) return load<Words>(row + g * kLanes) << (24 - 8 * part) >> 24;
    return load<Words>(row + g / 2 * kLanes) >> (8 * part + 4 * (g & 1)) & 15;
  }
  // As 16-bit lanes: columns j and j + 16 in turn, and columns j + 8 and j + 24. `half` is g % 2.
  void lanes(int64_t g, int half, Shorts& even, Shorts& odd) const {
    if constexpr (bits == 8) {
      const Shorts words = load<Shorts>(row + g * kLanes);
      even = words << 8 >> 8, odd = words >> 8;
    } else {
      const Shorts words = load<Shorts>(row + g / 2 * kLanes);
      even = words >> 4 * half & 15, odd = words >> (8 + 4 * half) & 15;
    }
  }
};

template <int bits>
struct IntegerRow {
  Levels<bits> levels;
  const float *scale, *shift;
  IntegerRow(const Matrix& m, int64_t r)
      : levels(m, r),
        scale(m.scale + r * (m.columns / kGroup)),
        shift(m.shift ? m.shift + r * (m.columns / kGroup) : nullptr) {}
  Floats at(int64_t i, int part) const {
    const int64_t g = i / kGroup;
    return __builtin_convertvector(levels.part(g, part), Floats) * scale[g] + (shift ? shift[g] : 0.0f);
  }
  float one(int64_t) const { return 0.0f; }  // groups are whole: no column is left over
};

// What the rows of a matrix meet: vectors (B, columns) in the order and the form that its kind asks for.
struct Vectors {
  const float* x;
  std::vector<float> sorted;        // for bfloat16: even columns first
  std::vector<int16_t> levels;      // for integers: x = scale · level, by groups
  std::vector<float> scales, sums;  // (B, columns / 32)

  void prepare(const Matrix& m, const float* values, int64_t batch) {
    x = values;
    if (m.kind == kBfloat16) sort(m.columns, batch);
    if (m.scale) quantise(batch * m.columns / kGroup);
  }

 private:
  void sort(int64_t columns, int64_t batch) {
    sorted.assign(x, x + batch * columns);
    constexpr int64_t width = 2 * kLanes;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = b * columns; i < b * columns + columns / kGroup * kGroup; i += width)
        for (int lane = 0; lane < kLanes; ++lane) {
          sorted[i + lane] = x[i + 2 * lane];
          sorted[i + kLanes + lane] = x[i + 2 * lane + 1];
        }
    x = sorted.data();
  }

  // 16 bits per group of 32, which err by less than a hundredth of what 8-bit weights do: their products with
  // weights are then exact in 32-bit integers. In the order of `Levels::lanes`.
  void quantise(int64_t groups) {
    levels.resize(groups * kGroup), scales.resize(groups), sums.resize(groups);
    for (int64_t g = 0; g < groups; ++g) {
      Floats part[kParts], largest = {}, total = {};
      for (int p = 0; p < kParts; ++p) {
        part[p] = load<Floats>(x + g * kGroup + p * kLanes);
        const Floats size = absolute(part[p]);
        largest = largest > size ? largest : size;
        total += part[p];
      }
      float most = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, largest[lane]);
      scales[g] = most / 32767.0f, sums[g] = sum(total);
      const float factor = most > 0.0f ? 32767.0f / most : 0.0f;
      Words level[kParts];
      for (int p = 0; p < kParts; ++p) level[p] = nearest(part[p] * factor);
      const Words even = (level[0] & 0xffff) | level[2] << 16, odd = (level[1] & 0xffff) | level[3] << 16;
      std::memcpy(&levels[g * kGroup], &even, sizeof even);
      std::memcpy(&levels[g * kGroup + kGroup / 2], &odd, sizeof odd);
    }
  }
};

// Products ----------------------------------------------------------------------------------------------------

// Vectors that meet a row in one visit: their sums stay in registers.
constexpr int64_t kVectors = 8, kPairs = 4;

// All, or few enough that the next vectors of a large batch find them in the cache.
inline int64_t rows_at_a_time(Range rows, int64_t batch, int64_t most) {
  return batch > most ? 8 : rows.last - rows.first;
}

// The sums of one row of floats with C vectors, which start at vector b.
template <int C, typename Row>
inline void row_sums(Row*, const Matrix& m, int64_t r, const Vectors& vectors, int64_t b, float (&sums)[C]) {
  // Sums side by side, because one alone would wait for its own additions.
  constexpr int kSums = C <= 2 ? 4 : C <= 4 ? 2 : 1;
  const int64_t columns = m.columns;
  const float* x = vectors.x + b * columns;
  const Row row(m, r);
  Floats total[C][kSums] = {};
  int64_t i = 0;
  for (; i + kGroup <= columns; i += kGroup)
    for (int part = 0; part < kParts; ++part) {
      const Floats w = row.at(i, part);
      for (int c = 0; c < C; ++c) total[c][part % kSums] += w * load<Floats>(x + c * columns + i + part * kLanes);
    }
  for (int c = 0; c < C; ++c) {
    for (int part = 1; part < kSums; ++part) total[c][0] += total[c][part];
    sums[c] = sum(total[c][0]);
    for (int64_t rest = i; rest < columns; ++rest) sums[c] += row.one(rest) * x[c * columns + rest];
  }
}

// The same for integers: whole numbers within a group, then its two scales; a shift meets the sums of x.
template <int C, int bits>
inline void integer_sums(const Matrix& m, int64_t r, const Vectors& vectors, int64_t b, float (&sums)[C]) {
  constexpr int kSums = C == 1 ? 4 : 2;
  const int64_t groups = m.columns / kGroup;
  const Levels<bits> row(m, r);
  const float *scale = m.scale + r * groups, *x_scale = vectors.scales.data() + b * groups;
  const int16_t* x = vectors.levels.data() + b * m.columns;
  Floats total[C][kSums] = {};
  const auto meet = [&](int64_t g, int part, int half) {
    Shorts even, odd;
    row.lanes(g, half, even, odd);
    for (int c = 0; c < C; ++c) {
      const int16_t* levels = x + c * m.columns + g * kGroup;
      const Words term = products_of_pairs(even, load<Shorts>(levels)) +
                         products_of_pairs(odd, load<Shorts>(levels + kGroup / 2));
      total[c][part] += __builtin_convertvector(term, Floats) * scale[g] * x_scale[c * groups + g];
    }
  };
  int64_t g = 0;
  for (; g + kSums <= groups; g += kSums)
    for (int part = 0; part < kSums; ++part) meet(g + part, part, part % 2);
  for (; g < groups; ++g) meet(g, 0, g % 2);
  for (int c = 0; c < C; ++c) {
    for (int part = 1; part < kSums; ++part) total[c][0] += total[c][part];
    sums[c] = sum(total[c][0]);
    if (m.shift) sums[c] += dot(m.shift + r * groups, vectors.sums.data() + (b + c) * groups, groups);
  }
}

template <int C>
inline void row_sums(IntegerRow<8>*, const Matrix& m, int64_t r, const Vectors& v, int64_t b, float (&sums)[C]) {
  integer_sums<C, 8>(m, r, v, b, sums);
}

template <int C>
inline void row_sums(IntegerRow<4>*, const Matrix& m, int64_t r, const Vectors& v, int64_t b, float (&sums)[C]) {
  integer_sums<C, 4>(m, r, v, b, sums);
}

// y[c · stride + row] (+)= W x + b for some rows and C vectors, which start at vector b.
template <int C, bool add, typename Row>
void visit(const Matrix& m, Range rows, const Vectors& vectors, int64_t b, float* y, int64_t stride) {
  for (int64_t row = rows.first; row < rows.last; ++row) {
    float sums[C];
    row_sums<C>(static_cast<Row*>(nullptr), m, row, vectors, b, sums);
    for (int c = 0; c < C; ++c) {
      float& target = y[(b + c) * stride + row];
      target = (add ? target : 0.0f) + sums[c] + (m.bias ? m.bias[row] : 0.0f);
    }
  }
}

template <bool add, typename Row>
void multiply_rows(const Matrix& m, Range rows, const Vectors& vectors, int64_t batch, float* y, int64_t stride) {
  const int64_t block = rows_at_a_time(rows, batch, kVectors);
  for (int64_t first = rows.first; first < rows.last; first += block) {
    const Range some(first, std::min(first + block, rows.last));
    for (int64_t b = 0; b < batch; b += kVectors) switch (batch - b) {
        case 1: visit<1, add, Row>(m, some, vectors, b, y, stride); break;
        case 2: visit<2, add, Row>(m, some, vectors, b, y, stride); break;
        case 3: visit<3, add, Row>(m, some, vectors, b, y, stride); break;
        case 4: visit<4, add, Row>(m, some, vectors, b, y, stride); break;
        case 5: visit<5, add, Row>(m, some, vectors, b, y, stride); break;
        case 6: visit<6, add, Row>(m, some, vectors, b, y, stride); break;
        case 7: visit<7, add, Row>(m, some, vectors, b, y, stride); break;
        default: visit<8, add, Row>(m, some, vectors, b, y, stride);
      }
  }
}

template <bool add>
void multiply(const Matrix& m, Range rows, const Vectors& vectors, int64_t batch, float* y, int64_t stride) {
  switch (m.kind) {
    case kFloat32: return multiply_rows<add, Float32Row>(m, rows, vectors, batch, y, stride);
    case kBfloat16: return multiply_rows<add, Bfloat16Row>(m, rows, vectors, batch, y, stride);
    case kBytes: return multiply_rows<add, IntegerRow<8>>(m, rows, vectors, batch, y, stride);
    default: return multiply_rows<add, IntegerRow<4>>(m, rows, vectors, batch, y, stride);
  }
}

// loc_S and scale_S of one read of W -----------------------------------------------------------------------------

template <int C, typename Row>
void visit_pairs(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t b,
                 const Scores& scores) {
  constexpr int kSums = C == 1 ? 4 : C == 2 ? 2 : 1;
  const int64_t columns = m.columns;
  const float *loc = locs.x + b * columns, *scale = scales.x + b * columns;
  for (int64_t r = rows.first; r < rows.last; ++r) {
    const Row row(m, r);
    Floats loc_sums[C][kSums] = {}, scale_sums[C][kSums] = {};
    int64_t i = 0;
    for (; i + kGroup <= columns; i += kGroup)
      for (int part = 0; part < kParts; ++part) {
        const Floats w = row.at(i, part), size = absolute(w);
        for (int c = 0; c < C; ++c) {
          loc_sums[c][part % kSums] += w * load<Floats>(loc + c * columns + i + part * kLanes);
          scale_sums[c][part % kSums] += size * load<Floats>(scale + c * columns + i + part * kLanes);
        }
      }
    for (int c = 0; c < C; ++c) {
      for (int part = 1; part < kSums; ++part)
        loc_sums[c][0] += loc_sums[c][part], scale_sums[c][0] += scale_sums[c][part];
      float loc_sum = sum(loc_sums[c][0]), scale_sum = sum(scale_sums[c][0]);
      for (int64_t rest = i; rest < columns; ++rest) {
        loc_sum += row.one(rest) * loc[c * columns + rest];
        scale_sum += std::fabs(row.one(rest)) * scale[c * columns + rest];
      }
      if (m.bias) loc_sum += m.bias[r];
      if (scores.balance) scale_sum += scores.balance[r] * scores.mean[b + c];
      scores.loc_S[(b + c) * m.rows + r] = loc_sum + scores.loc_U0[b + c];
      scores.scale_S[(b + c) * m.rows + r] = scale_sum + scores.scale_U0[b + c];
    }
  }
}

template <typename Row>
void multiply_pairs(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t batch,
                    const Scores& scores) {
  const int64_t block = rows_at_a_time(rows, batch, kPairs);
  for (int64_t first = rows.first; first < rows.last; first += block) {
    const Range some(first, std::min(first + block, rows.last));
    for (int64_t b = 0; b < batch; b += kPairs) switch (batch - b) {
        case 1: visit_pairs<1, Row>(m, some, locs, scales, b, scores); break;
        case 2: visit_pairs<2, Row>(m, some, locs, scales, b, scores); break;
        case 3: visit_pairs<3, Row>(m, some, locs, scales, b, scores); break;
        default: visit_pairs<4, Row>(m, some, locs, scales, b, scores);
      }
  }
}

// e^x to rounding: 2^n · e^r with |r| ≤ ln 2 / 2. Below −87 it is 0, above 88 it stays at e^88.
inline Floats exponential(Floats x) {
  const Floats capped = x > 88.0f ? Floats{} + 88.0f : x < -87.0f ? Floats{} - 87.0f : x;
  const Words n = nearest(capped * 1.44269504f);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = capped - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = Floats{} + 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) p = p * r + c;
  return x < -87.0f ? Floats{} : p * (Floats)((n + 127) << 23);
}

// Parts of a block --------------------------------------------------------------------------------------------

void normalise(const Decoder& decoder, const float* x, const float* gain, const float* shift, int64_t batch,
               float* y) {
  const int64_t hidden = decoder.hidden;
  for (int64_t b = 0; b < batch; ++b, x += hidden, y += hidden) {
    float mean = 0.0f, square = 0.0f;
    if (decoder.layernorm) {
#pragma omp simd reduction(+ : mean)
      for (int64_t i = 0; i < hidden; ++i) mean += x[i];
      mean /= hidden;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < hidden; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(square / hidden + float(decoder.eps));
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) y[i] = (x[i] - mean) * factor * gain[i];
    if (shift)
      for (int64_t i = 0; i < hidden; ++i) y[i] += shift[i];
  }
}

// cos and sin of the new token's angles, (B, d/2): its position counts the real tokens before it.
struct Angles {
  std::vector<float> cos, sin;
  Angles(const Decoder& decoder, const Step& step) {
    for (int64_t b = 0; b < step.batch; ++b) {
      const uint8_t* valid = step.valid + b * step.capacity;
      const float position = float(std::count(valid, valid + step.slots - 1, 1));
      for (int64_t i = 0; i < decoder.width / 2; ++i) {
        const float angle = position * decoder.frequencies[i];
        cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
      }
    }
  }
};

// Turn the pairs (x_i, x_{i + d/2}) by their angles.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// Rotate queries in place, and put new keys and values at their slot.
void place(const Decoder& decoder, const Step& step, const Angles& angles, int64_t layer, float* qkv,
           Range share) {
  const int64_t heads = decoder.heads, groups = decoder.groups, width = decoder.width;
  const int64_t all = heads + 2 * groups;
  for (int64_t task = share.first; task < share.last; ++task) {
    const int64_t b = task / all, head = task % all;
    float* own = qkv + task * width;
    if (head < heads + groups) rotate(own, angles.cos.data() + b * width / 2, angles.sin.data() + b * width / 2, width / 2);
    if (head < heads) continue;
    float* cache = head < heads + groups ? step.keys[layer] : step.values[layer];
    const int64_t group = (head - heads) % groups;
    std::copy(own, own + width, cache + (((step.slots - 1) * step.batch + b) * groups + group) * width);
  }
}

// softmax(q·k/√d)·v over the valid slots, of some (row, head) pairs; `scores` is scratch.
void attend(const Decoder& decoder, const Step& step, int64_t layer, const float* qkv, Range share,
            float* scores, float* mixed) {
  const int64_t heads = decoder.heads, groups = decoder.groups, width = decoder.width, slots = step.slots;
  const int64_t stride = step.batch * groups * width;
  const float root = 1.0f / std::sqrt(float(width));
  for (int64_t task = share.first; task < share.last; ++task) {
    const int64_t b = task / heads, head = task % heads;
    const float* query = qkv + (b * (heads + 2 * groups) + head) * width;
    const int64_t offset = (b * groups + head / (heads / groups)) * width;
    const float *keys = step.keys[layer] + offset, *values = step.values[layer] + offset;
    const uint8_t* valid = step.valid + b * step.capacity;
    float largest = -INFINITY;
    for (int64_t s = 0; s < slots; ++s) {
      scores[s] = valid[s] ? root * dot(query, keys + s * stride, width) : -INFINITY;
      largest = std::max(largest, scores[s]);
    }
    // `scores` has room for whole vectors; what is behind the last slot counts for nothing.
    for (int64_t s = slots; s % kLanes; ++s) scores[s] = -INFINITY;
    Floats sums = {};
    for (int64_t s = 0; s < slots; s += kLanes) {
      const Floats weights = exponential(load<Floats>(scores + s) - largest);
      std::memcpy(scores + s, &weights, sizeof weights);
      sums += weights;
    }
    const float total = sum(sums);
    float* own = mixed + task * width;
    std::fill(own, own + width, 0.0f);
    for (int64_t s = 0; s < slots; ++s) {
      const float weight = scores[s] / total;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) own[i] += weight * values[s * stride + i];
    }
  }
}

// silu(gate) · up of own columns; `both` is (B, 2F).
void activate(const float* both, int64_t inner, int64_t batch, Range share, float* active) {
  for (int64_t b = 0; b < batch; ++b) {
    const float *gate = both + b * 2 * inner, *up = gate + inner;
    float* own = active + b * inner;
    int64_t i = share.first;
    for (; i + kLanes <= share.last; i += kLanes) {
      const Floats g = load<Floats>(gate + i), y = g / (1.0f + exponential(-g)) * load<Floats>(up + i);
      std::memcpy(own + i, &y, sizeof y);
    }
    for (; i < share.last; ++i) own[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

// What all threads of a step share.
struct Shared {
  std::vector<float> qkv, mixed, both, active;
};

void run_blocks(const Decoder& decoder, const Step& step, Shared& shared, int64_t thread, int64_t threads) {
  const int64_t batch = step.batch, hidden = decoder.hidden, inner = decoder.inner;
  std::vector<float> normed(batch * hidden), scores(step.slots + kLanes);
  const Angles angles(decoder, step);
  Vectors vectors;
  const auto mine = [&](int64_t size) { return Range::share(size, thread, threads); };
  const Range gate = mine(inner), up(gate.first + inner, gate.last + inner);
  for (int64_t layer = 0; layer < decoder.layers; ++layer) {
    const Block& block = decoder.blocks[layer];
    normalise(decoder, step.x, block.attention_gain, block.attention_shift, batch, normed.data());
    vectors.prepare(block.qkv, normed.data(), batch);
    const int64_t rows = block.qkv.rows;
    multiply<false>(block.qkv, mine(rows), vectors, batch, shared.qkv.data(), rows);
#pragma omp barrier
    place(decoder, step, angles, layer, shared.qkv.data(), mine(batch * rows / decoder.width));
#pragma omp barrier
    attend(decoder, step, layer, shared.qkv.data(), mine(batch * decoder.heads), scores.data(),
           shared.mixed.data());
#pragma omp barrier
    vectors.prepare(block.output, shared.mixed.data(), batch);
    multiply<true>(block.output, mine(hidden), vectors, batch, step.x, hidden);
#pragma omp barrier
    normalise(decoder, step.x, block.mlp_gain, block.mlp_shift, batch, normed.data());
    vectors.prepare(block.gate_up, normed.data(), batch);
    for (const Range& part : {gate, up})
      multiply<false>(block.gate_up, part, vectors, batch, shared.both.data(), 2 * inner);
    activate(shared.both.data(), inner, batch, gate, shared.active.data());
#pragma omp barrier
    vectors.prepare(block.down, shared.active.data(), batch);
    multiply<true>(block.down, mine(hidden), vectors, batch, step.x, hidden);
#pragma omp barrier
  }
  if (thread == 0) normalise(decoder, step.x, decoder.gain, decoder.shift, batch, step.x);
}

// work(thread, threads) on every thread.
template <typename Work>
void in_parallel(int64_t threads, Work work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#else
  work(0, 1);
#endif
}

}  // namespace

extern "C" {

// All blocks and the final norm for one new token per row.
void decoder_step(const Decoder* decoder, const Step* step) {
  const int64_t batch = step->batch;
  Shared shared;
  shared.qkv.resize(batch * (decoder->heads + 2 * decoder->groups) * decoder->width);
  shared.mixed.resize(batch * decoder->heads * decoder->width);
  shared.both.resize(batch * 2 * decoder->inner);
  shared.active.resize(batch * decoder->inner);
  in_parallel(step->threads, [&](int64_t thread, int64_t threads) {
    run_blocks(*decoder, *step, shared, thread, threads);
  });
}

// y (batch, rows) = W x + b for x (batch, columns).
void matrix_product(const Matrix* matrix, const float* x, float* y, int64_t batch, int64_t threads) {
  Vectors vectors;
  vectors.prepare(*matrix, x, batch);
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    const Range rows = Range::share(matrix->rows, thread, all);
    multiply<false>(*matrix, rows, vectors, batch, y, matrix->rows);
  });
}

// The scores of all tokens, for loc_U and scale_U (batch, columns).
void token_scores(const Matrix* matrix, const float* loc, const float* scale, const Scores* scores, int64_t batch,
                  int64_t threads) {
  const Matrix& m = *matrix;
  Vectors locs, scales;
  locs.prepare(m, loc, batch);
  scales.prepare(m, scale, batch);
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    const Range rows = Range::share(m.rows, thread, all);
    switch (m.kind) {
      case kFloat32: return multiply_pairs<Float32Row>(m, rows, locs, scales, batch, *scores);
      case kBfloat16: return multiply_pairs<Bfloat16Row>(m, rows, locs, scales, batch, *scores);
      case kBytes: return multiply_pairs<IntegerRow<8>>(m, rows, locs, scales, batch, *scores);
      default: return multiply_pairs<IntegerRow<4>>(m, rows, locs, scales, batch, *scores);
    }
  });
}
}
