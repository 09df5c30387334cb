// W x for a few vectors from one read of W.
//
// A product of a few vectors is bound by reading W, so the code is a loop over its rows: each is widened on
// the way and multiplied by all vectors while it is in the cache.

#pragma once

#include "lanes.h"

// W: (rows, columns). Floats, or integers by groups of 32 columns with scale and (unless null) shift.
struct Matrix {
  const void* weight;
  const float* scale;  // (rows, columns / 32)
  const float* shift;  // (rows, columns / 32)
  const float* bias;   // (rows), or null
  int64_t rows, columns, kind;
};

enum Kind : int64_t { kFloat32, kBfloat16, kFloat16, kBytes, kNibbles };

constexpr int kParts = 4;  // vectors of eight floats that are read at a time
constexpr int64_t kGroup = kLanes * kParts;

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

struct Float16Row {
  const uint16_t* row;
  Float16Row(const Matrix& m, int64_t r) : row(static_cast<const uint16_t*>(m.weight) + r * m.columns) {}
  void prefetch(int64_t i) const { __builtin_prefetch(row + i, 0, 2); }
  Floats at(int64_t i, int part) const { return widen_halves(row + i + part * kLanes); }
  float one(int64_t i) const {
    const uint16_t halves[kLanes] = {row[i]};
    return widen_halves(halves)[0];
  }
};

// Integers of 8 or 4 bits, in 32-bit words. Byte p of word j of a group belongs to column j + 8p; with 4 bits
// two groups share the words, the first in the lower halves of the bytes.
template <int bits>
struct Levels {
  const int32_t* row;
  Levels(const Matrix& m, int64_t r)
      : row(static_cast<const int32_t*>(m.weight) + r * m.columns * bits / 32) {}
  void prefetch(int64_t i) const { __builtin_prefetch(row + i * bits / 32, 0, 2); }
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
    return fused(__builtin_convertvector(levels.part(g, part), Floats), scale[g], Floats{} + (shift ? shift[g] : 0.0f));
  }
  void prefetch(int64_t i) const { levels.prefetch(i); }
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

// What the rows of a matrix are multiplied by: vectors (B, columns) in the order and the form of its kind.
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

// Vectors that multiply a row in one visit: their sums stay in registers.
constexpr int64_t kVectors = 4, kPairs = 2;

// Which vectors multiply the rows: `count` from the first one on. The last visit to some rows fetches those that
// come `ahead`, because the memory would rest meanwhile.
struct Visit {
  int64_t first, count, ahead;
};

// call(rows, visit) until all vectors have multiplied all rows: all rows at one time, or few enough that they
// are still in the cache for the next vectors of a large batch.
template <typename Call>
inline void visits(Range rows, int64_t batch, int64_t most, Call call) {
  const int64_t block = batch > most ? 16 : std::max<int64_t>(rows.last - rows.first, 1);
  for (int64_t row = rows.first; row < rows.last; row += block)
    for (int64_t b = 0; b < batch; b += most)
      call(Range(row, std::min(row + block, rows.last)),
           Visit{b, std::min(batch - b, most), b && b + most >= batch ? block : 0});
}

// Σ over lanes and over sums that were kept side by side.
template <int R, int C, int S>
inline void add_up(const Floats (&total)[R][C][S], float (&sums)[R][C]) {
  const auto one = [&](int i) {
    Floats all = total[i / C][i % C][0];
    for (int part = 1; part < S; ++part) all += total[i / C][i % C][part];
    return all;
  };
  int i = 0;
  CAUSAL_UNROLL
  for (; i + 4 <= R * C; i += 4) sum({one(i), one(i + 1), one(i + 2), one(i + 3)}, &sums[0][0] + i);
  CAUSAL_UNROLL
  for (; i < R * C; ++i) sums[i / C][i % C] = sum(one(i));
}

// The sums of R rows of floats with C vectors, which start at vector b. Each is added up in one order, however
// many rows and vectors come at a time: a product does not depend on its neighbours.
template <int R, int C, typename Row>
inline void row_sums(Row*, const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, Visit visit,
                     float (&sums)[R][C]) {
  const int64_t columns = m.columns;
  const float* x = vectors.x + visit.first * columns;
  Floats total[R][C][1] = {};
  int64_t i = 0;
  for (; i + kGroup <= columns; i += kGroup) {
    if (visit.ahead)
      for (int k = 0; k < R; ++k) Row(m, r[k] + visit.ahead).prefetch(i);
    for (int part = 0; part < kParts; ++part) {
      Floats own[C];
      for (int c = 0; c < C; ++c)
        own[c] = in_register<(R > 1)>(load<Floats>(x + c * columns + i + part * kLanes));
      for (int k = 0; k < R; ++k) {
        const Floats w = in_register<(C > 1)>(Row(m, r[k]).at(i, part));
        for (int c = 0; c < C; ++c) total[k][c][0] = fused(w, own[c], total[k][c][0]);
      }
    }
  }
  add_up(total, sums);
  for (; i < columns; ++i)
    for (int k = 0; k < R; ++k)
      for (int c = 0; c < C; ++c) sums[k][c] = fused(Row(m, r[k]).one(i), x[c * columns + i], sums[k][c]);
}

// The same for integers: whole numbers within a group, then its two scales; a shift multiplies the sums of x.
template <int R, int C, int bits>
inline void integer_sums(const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, Visit visit,
                         float (&sums)[R][C]) {
  constexpr int kSums = 2;  // side by side, because one alone would wait for its own additions
  const int64_t groups = m.columns / kGroup;
  const float* x_scale = vectors.scales.data() + visit.first * groups;
  const int16_t* x = vectors.levels.data() + visit.first * m.columns;
  Floats total[R][C][kSums] = {};
  const auto add_group = [&](int64_t g, int part, int half) {
    for (int k = 0; k < R; ++k) {
      Shorts even, odd;
      Levels<bits>(m, r[k]).lanes(g, half, even, odd);
      const float scale = m.scale[r[k] * groups + g];
      for (int c = 0; c < C; ++c) {
        const int16_t* levels = x + c * m.columns + g * kGroup;
        const Words term = products_of_pairs(even, load<Shorts>(levels)) +
                           products_of_pairs(odd, load<Shorts>(levels + kGroup / 2));
        const Floats scaled = __builtin_convertvector(term, Floats) * scale;
        total[k][c][part] = fused(scaled, x_scale[c * groups + g], total[k][c][part]);
      }
    }
  };
  int64_t g = 0;
  for (; g + kSums <= groups; g += kSums)
    for (int part = 0; part < kSums; ++part) add_group(g + part, part, part % 2);
  for (; g < groups; ++g) add_group(g, 0, g % 2);
  add_up(total, sums);
  if (!m.shift) return;
  for (int k = 0; k < R; ++k)
    for (int c = 0; c < C; ++c)
      sums[k][c] += dot(m.shift + r[k] * groups, vectors.sums.data() + (visit.first + c) * groups, groups);
}

template <int R, int C>
inline void row_sums(IntegerRow<8>*, const Matrix& m, const int64_t (&r)[R], const Vectors& v, Visit visit,
                     float (&sums)[R][C]) {
  integer_sums<R, C, 8>(m, r, v, visit, sums);
}

template <int R, int C>
inline void row_sums(IntegerRow<4>*, const Matrix& m, const int64_t (&r)[R], const Vectors& v, Visit visit,
                     float (&sums)[R][C]) {
  integer_sums<R, C, 4>(m, r, v, visit, sums);
}

// y[c · stride + row] (+)= W x + b for R rows and C vectors.
template <int R, int C, bool add, typename Row>
inline void multiply_rows(const Matrix& m, const int64_t (&r)[R], const Vectors& vectors, Visit visit,
                          float* y, int64_t stride) {
  float sums[R][C];
  row_sums<R, C>(static_cast<Row*>(nullptr), m, r, vectors, visit, sums);
  CAUSAL_UNROLL
  for (int k = 0; k < R; ++k)
    CAUSAL_UNROLL
    for (int c = 0; c < C; ++c) {
      float& target = y[(visit.first + c) * stride + r[k]];
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

template <int C, bool add, typename Row>
void multiply_range(const Matrix& m, Range rows, const Vectors& vectors, Visit visit, float* y,
                    int64_t stride) {
  constexpr int R = C <= 2 ? 4 : 2;
  from_places<R>(
      rows,
      [&](const int64_t (&r)[R]) { multiply_rows<R, C, add, Row>(m, r, vectors, visit, y, stride); },
      [&](int64_t row) { multiply_rows<1, C, add, Row>(m, {row}, vectors, visit, y, stride); });
}

template <bool add, typename Row>
void multiply_range(const Matrix& m, Range rows, const Vectors& vectors, Visit visit, float* y,
                    int64_t stride) {
  switch (visit.count) {
    case 1: return multiply_range<1, add, Row>(m, rows, vectors, visit, y, stride);
    case 2: return multiply_range<2, add, Row>(m, rows, vectors, visit, y, stride);
    case 3: return multiply_range<3, add, Row>(m, rows, vectors, visit, y, stride);
    default: return multiply_range<4, add, Row>(m, rows, vectors, visit, y, stride);
  }
}

// y (+)= W x + b of some rows for the vectors of a visit.
template <bool add>
void multiply_visit(const Matrix& m, Range rows, const Vectors& vectors, Visit visit, float* y,
                    int64_t stride) {
  switch (m.kind) {
    case kFloat32: return multiply_range<add, Float32Row>(m, rows, vectors, visit, y, stride);
    case kBfloat16: return multiply_range<add, Bfloat16Row>(m, rows, vectors, visit, y, stride);
    case kFloat16: return multiply_range<add, Float16Row>(m, rows, vectors, visit, y, stride);
    case kBytes: return multiply_range<add, IntegerRow<8>>(m, rows, vectors, visit, y, stride);
    default: return multiply_range<add, IntegerRow<4>>(m, rows, vectors, visit, y, stride);
  }
}

template <bool add>
void multiply(const Matrix& m, Range rows, const Vectors& vectors, int64_t batch, float* y, int64_t stride) {
  visits(rows, batch, kVectors,
         [&](Range some, Visit visit) { multiply_visit<add>(m, some, vectors, visit, y, stride); });
}
