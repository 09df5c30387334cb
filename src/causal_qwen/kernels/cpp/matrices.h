// W x for a few vectors from one read of W.
//
// A product of a few vectors is bound by reading W, so the code is a loop over its rows: each is widened on
// the way and meets all vectors while it is in the cache. Vectors of eight floats are the compiler's own type,
// which any target has.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

// W: (rows, columns). Floats, or integers by groups of 32 columns with scale and (unless null) shift.
struct Matrix {
  const void* weight;
  const float* scale;  // (rows, columns / 32)
  const float* shift;  // (rows, columns / 32)
  const float* bias;   // (rows), or null
  int64_t rows, columns, kind;
};

enum Kind : int64_t { kFloat32, kBfloat16, kBytes, kNibbles };

constexpr int kLanes = 8;
constexpr int kParts = 4;  // vectors of eight floats that are read at a time
constexpr int64_t kGroup = kLanes * kParts;

// Short loops of constant length over registers, which must not become arrays in memory.
#ifdef __GNUC__
#define CAUSAL_UNROLL _Pragma("GCC unroll 8")
#else
#define CAUSAL_UNROLL
#endif

using Floats = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Shorts = int16_t __attribute__((vector_size(32)));

template <typename T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A value that is used again stays in its register: compilers would rather load it twice, and loads are what
// the processor has too few of.
template <bool again>
inline Floats held(Floats v) {
#ifdef __AVX2__
  if (again) asm("" : "+x"(v));
#endif
  return v;
}

inline float sum(Floats v) {
#ifdef __AVX2__
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}

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

inline float dot(const float* a, const float* b, int64_t size) {
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

// One row of W, widened on the way: at(i, part) are eight of the 32 columns from i on ------------------------

struct Float32Row {
  const float* row;
  Float32Row(const Matrix& m, int64_t r) : row(static_cast<const float*>(m.weight) + r * m.columns) {}
  Floats at(int64_t i, int part) const { return load<Floats>(row + i + part * kLanes); }
  void prefetch(int64_t i) const {
    __builtin_prefetch(row + i, 0, 2);
    __builtin_prefetch(row + i + kGroup / 2, 0, 2);
  }
  float one(int64_t i) const { return row[i]; }
};

// bfloat16 is the upper half of a float32, so a word holds two: even columns come first, then odd ones. The
// vectors are put into that order once, which is cheaper than sorting every row.
struct Bfloat16Row {
  const uint16_t* row;
  Bfloat16Row(const Matrix& m, int64_t r) : row(static_cast<const uint16_t*>(m.weight) + r * m.columns) {}
  void prefetch(int64_t i) const { __builtin_prefetch(row + i, 0, 2); }
  Floats at(int64_t i, int part) const {
    const Words pairs = load<Words>(row + i + part / 2 * 2 * kLanes);
    return (Floats)(part % 2 ? pairs & ~0xffff : pairs << 16);
  }
  float one(int64_t i) const {
    const uint32_t bits = uint32_t(row[i]) << 16;
    return load<float>(&bits);
  }
};

// Integers of 8 or 4 bits, in 32-bit words. Byte p of word j of a group belongs to column j + 8p; with 4 bits
// two groups share the words, the first in the lower halves of the bytes.
template <int bits>
struct Levels {
  const int32_t* row;
  Levels(const Matrix& m, int64_t r)
      : row(static_cast<const int32_t*>(m.weight) + r * m.columns * bits / 32) {}
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

// Rows of integers as floats, (rows, columns).
template <int bits>
void widen(const Matrix& m, Range rows, float* y) {
  for (int64_t r = rows.first; r < rows.last; ++r) {
    const IntegerRow<bits> row(m, r);
    for (int64_t i = 0; i < m.columns; i += kLanes) {
      const Floats values = row.at(i, int(i % kGroup / kLanes));
      std::memcpy(y + r * m.columns + i, &values, sizeof values);
    }
  }
}

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

  // 16 bits per group of 32, which err by less than a hundredth of what 8-bit weights do: their products
  // with weights are then exact in 32-bit integers. In the order of `Levels::lanes`.
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
      sums[g] = sum(total);
      scales[g] = most / 32767.0f + 0.0f * sums[g];  // not a number where x is none
      const float factor = most > 0.0f ? 32767.0f / most : 0.0f;
      Words level[kParts];
      for (int p = 0; p < kParts; ++p) level[p] = nearest(part[p] * factor);
      const Words even = (level[0] & 0xffff) | level[2] << 16, odd = (level[1] & 0xffff) | level[3] << 16;
      std::memcpy(&levels[g * kGroup], &even, sizeof even);
      std::memcpy(&levels[g * kGroup + kGroup / 2], &odd, sizeof odd);
    }
  }
};

// Products ---------------------------------------------------------------------------------------------------

// Vectors that meet a row in one visit: their sums stay in registers.
constexpr int64_t kVectors = 8, kPairs = 4;

// How many of the vectors that are left meet a row next.
inline int64_t next_count(int64_t left, int64_t most) { return left >= most ? most : left > 4 ? 4 : left; }

// All, or few enough that the next vectors of a large batch find them in the cache.
inline int64_t rows_at_a_time(Range rows, int64_t batch, int64_t most) {
  return next_count(batch, most) < batch ? 8 : rows.last - rows.first;
}

// Σ over lanes and over sums that were kept side by side.
template <int R, int C, int S>
inline void add_up(Floats (&total)[R][C][S], float (&sums)[R][C]) {
  CAUSAL_UNROLL
  for (int k = 0; k < R; ++k)
    CAUSAL_UNROLL
    for (int c = 0; c < C; ++c) {
      for (int part = 1; part < S; ++part) total[k][c][0] += total[k][c][part];
      sums[k][c] = sum(total[k][c][0]);
    }
}

// The sums of R rows of floats with C vectors, which start at vector b.
template <int R, int C, typename Row>
inline void row_sums(Row*, const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, int64_t b,
                     float (&sums)[R][C]) {
  // Sums side by side, because one alone would wait for its own additions.
  constexpr int kSums = R * C <= 2 ? 4 : R * C <= 4 ? 2 : 1;
  const int64_t columns = m.columns;
  const float* x = vectors.x + b * columns;
  Floats total[R][C][kSums] = {};
  int64_t i = 0;
  for (; i + kGroup <= columns; i += kGroup) {
    // Where there is much to compute the processor does not look far enough ahead by itself.
    if (C > 4) Row(m, r[0] + 4).prefetch(i);
    for (int part = 0; part < kParts; ++part) {
      Floats own[C];
      for (int c = 0; c < C; ++c) own[c] = held<(R > 1)>(load<Floats>(x + c * columns + i + part * kLanes));
      for (int k = 0; k < R; ++k) {
        const Floats w = held<(C > 1)>(Row(m, r[k]).at(i, part));
        for (int c = 0; c < C; ++c) total[k][c][part % kSums] += w * own[c];
      }
    }
  }
  add_up(total, sums);
  for (; i < columns; ++i)
    for (int k = 0; k < R; ++k)
      for (int c = 0; c < C; ++c) sums[k][c] += Row(m, r[k]).one(i) * x[c * columns + i];
}

// The same for integers: whole numbers within a group, then its two scales; a shift meets the sums of x.
template <int R, int C, int bits>
inline void integer_sums(const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, int64_t b,
                         float (&sums)[R][C]) {
  constexpr int kSums = R * C == 1 ? 4 : 2;
  const int64_t groups = m.columns / kGroup;
  const float* x_scale = vectors.scales.data() + b * groups;
  const int16_t* x = vectors.levels.data() + b * m.columns;
  Floats total[R][C][kSums] = {};
  const auto meet = [&](int64_t g, int part, int half) {
    for (int k = 0; k < R; ++k) {
      Shorts even, odd;
      Levels<bits>(m, r[k]).lanes(g, half, even, odd);
      const float scale = m.scale[r[k] * groups + g];
      for (int c = 0; c < C; ++c) {
        const int16_t* levels = x + c * m.columns + g * kGroup;
        const Words term = products_of_pairs(even, load<Shorts>(levels)) +
                           products_of_pairs(odd, load<Shorts>(levels + kGroup / 2));
        total[k][c][part] += __builtin_convertvector(term, Floats) * scale * x_scale[c * groups + g];
      }
    }
  };
  int64_t g = 0;
  for (; g + kSums <= groups; g += kSums)
    for (int part = 0; part < kSums; ++part) meet(g + part, part, part % 2);
  for (; g < groups; ++g) meet(g, 0, g % 2);
  add_up(total, sums);
  if (!m.shift) return;
  for (int k = 0; k < R; ++k)
    for (int c = 0; c < C; ++c)
      sums[k][c] += dot(m.shift + r[k] * groups, vectors.sums.data() + (b + c) * groups, groups);
}

template <int R, int C>
inline void row_sums(IntegerRow<8>*, const Matrix& m, const int64_t (&r)[R], const Vectors& v, int64_t b,
                     float (&sums)[R][C]) {
  integer_sums<R, C, 8>(m, r, v, b, sums);
}

template <int R, int C>
inline void row_sums(IntegerRow<4>*, const Matrix& m, const int64_t (&r)[R], const Vectors& v, int64_t b,
                     float (&sums)[R][C]) {
  integer_sums<R, C, 4>(m, r, v, b, sums);
}

// y[c · stride + row] (+)= W x + b for R rows and C vectors, which start at vector b.
template <int R, int C, bool add, typename Row>
inline void meet(const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, int64_t b, float* y,
                 int64_t stride) {
  float sums[R][C];
  row_sums<R, C>(static_cast<Row*>(nullptr), m, r, vectors, b, sums);
  CAUSAL_UNROLL
  for (int k = 0; k < R; ++k)
    CAUSAL_UNROLL
    for (int c = 0; c < C; ++c) {
      float& target = y[(b + c) * stride + r[k]];
      target = (add ? target : 0.0f) + sums[k][c] + (m.bias ? m.bias[r[k]] : 0.0f);
    }
}

// call(r) for all rows, R at a time from as many places of W: one alone does not keep the memory busy.
template <int R, typename Many, typename One>
inline void from_places(Range rows, Many many, One one) {
  const int64_t each = (rows.last - rows.first) / R;
  for (int64_t row = rows.first; row < rows.first + each; ++row) {
    int64_t r[R];
    for (int k = 0; k < R; ++k) r[k] = row + k * each;
    many(r);
  }
  for (int64_t row = rows.first + each * R; row < rows.last; ++row) one(row);
}

template <int R, int C, bool add, typename Row>
void visit_from(const Matrix& m, Range rows, const Vectors& vectors, int64_t b, float* y, int64_t stride) {
  from_places<R>(
      rows, [&](const int64_t (&r)[R]) { meet<R, C, add, Row>(m, r, vectors, b, y, stride); },
      [&](int64_t row) { meet<1, C, add, Row>(m, {row}, vectors, b, y, stride); });
}

template <int C, bool add, typename Row>
void visit(const Matrix& m, Range rows, const Vectors& vectors, int64_t b, float* y, int64_t stride) {
  // Many long vectors do not fit the first cache: two rows at a time load them half as often.
  if (C > 4 && m.columns > 1024) return visit_from<2, C, add, Row>(m, rows, vectors, b, y, stride);
  visit_from<C <= 2 ? 4 : C <= 4 ? 2 : 1, C, add, Row>(m, rows, vectors, b, y, stride);
}

template <bool add, typename Row>
void multiply_rows(const Matrix& m, Range rows, const Vectors& vectors, int64_t batch, float* y,
                   int64_t stride) {
  const int64_t block = rows_at_a_time(rows, batch, kVectors);
  for (int64_t first = rows.first; first < rows.last; first += block) {
    const Range some(first, std::min(first + block, rows.last));
    for (int64_t b = 0, count; b < batch; b += count) {
      count = next_count(batch - b, kVectors);
      switch (count) {
        case 1: visit<1, add, Row>(m, some, vectors, b, y, stride); break;
        case 2: visit<2, add, Row>(m, some, vectors, b, y, stride); break;
        case 3: visit<3, add, Row>(m, some, vectors, b, y, stride); break;
        case 4: visit<4, add, Row>(m, some, vectors, b, y, stride); break;
        default: visit<8, add, Row>(m, some, vectors, b, y, stride);
      }
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
