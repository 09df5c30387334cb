// loc_S and scale_S of all tokens from one read of W: |W| is never stored.

#pragma once

#include "matrices.h"

// loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean + scale_U0, (B, rows) each, or only
// standing = (loc_S − threshold) / scale_S where there is room for it.
struct Scores {
  float *loc_S, *scale_S, *standing;
  const float *balance, *threshold;  // (rows), or null
  const float *loc_U0, *scale_U0;    // (B), or null
};

// R rows with C pairs of vectors, which start at pair b.
template <int R, int C, typename Row>
inline void meet_pairs(const Matrix& m, const int64_t (&r)[R], const Vectors& locs, const Vectors& scales,
                       int64_t b, const float* means, const Scores& scores) {
  constexpr int kSums = R * C == 1 ? 4 : R * C == 2 ? 2 : 1;
  const int64_t columns = m.columns;
  const float *loc = locs.x + b * columns, *scale = scales.x + b * columns;
  Floats loc_sums[R][C][kSums] = {}, scale_sums[R][C][kSums] = {};
  int64_t i = 0;
  for (; i + kGroup <= columns; i += kGroup)
    for (int part = 0; part < kParts; ++part) {
      Floats loc_x[C], scale_x[C];
      for (int c = 0; c < C; ++c) {
        loc_x[c] = held<(R > 1)>(load<Floats>(loc + c * columns + i + part * kLanes));
        scale_x[c] = held<(R > 1)>(load<Floats>(scale + c * columns + i + part * kLanes));
      }
      for (int k = 0; k < R; ++k) {
        const Floats w = held<true>(Row(m, r[k]).at(i, part)), size = absolute(w);
        for (int c = 0; c < C; ++c) {
          loc_sums[k][c][part % kSums] += w * loc_x[c];
          scale_sums[k][c][part % kSums] += size * scale_x[c];
        }
      }
    }
  float loc_S[R][C], scale_S[R][C];
  add_up(loc_sums, loc_S);
  add_up(scale_sums, scale_S);
  for (; i < columns; ++i)
    for (int k = 0; k < R; ++k)
      for (int c = 0; c < C; ++c) {
        const float w = Row(m, r[k]).one(i);
        loc_S[k][c] += w * loc[c * columns + i], scale_S[k][c] += std::fabs(w) * scale[c * columns + i];
      }
  CAUSAL_UNROLL
  for (int k = 0; k < R; ++k)
    CAUSAL_UNROLL
    for (int c = 0; c < C; ++c) {
      const int64_t row = r[k], at = (b + c) * m.rows + row;
      const float balance = scores.balance ? scores.balance[row] * means[b + c] : 0.0f;
      const float loc_U0 = scores.loc_U0 ? scores.loc_U0[b + c] : 0.0f;
      const float scale_U0 = scores.scale_U0 ? scores.scale_U0[b + c] : 0.0f;
      const float loc = loc_S[k][c] + (m.bias ? m.bias[row] : 0.0f) + loc_U0;
      const float scale = scale_S[k][c] + balance + scale_U0;
      if (scores.standing)
        scores.standing[at] = (loc - (scores.threshold ? scores.threshold[row] : 0.0f)) / scale;
      else
        scores.loc_S[at] = loc, scores.scale_S[at] = scale;
    }
}

template <int C, typename Row>
void visit_pairs(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t b,
                 const float* means, const Scores& scores) {
  constexpr int R = C == 1 ? 4 : C == 2 ? 2 : 1;
  from_places<R>(
      rows, [&](const int64_t (&r)[R]) { meet_pairs<R, C, Row>(m, r, locs, scales, b, means, scores); },
      [&](int64_t row) { meet_pairs<1, C, Row>(m, {row}, locs, scales, b, means, scores); });
}

template <typename Row>
void multiply_pairs(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t batch,
                    const float* means, const Scores& scores) {
  const int64_t block = rows_at_a_time(rows, batch, kPairs);
  for (int64_t first = rows.first; first < rows.last; first += block) {
    const Range some(first, std::min(first + block, rows.last));
    for (int64_t b = 0; b < batch; b += kPairs) switch (batch - b) {
        case 1: visit_pairs<1, Row>(m, some, locs, scales, b, means, scores); break;
        case 2: visit_pairs<2, Row>(m, some, locs, scales, b, means, scores); break;
        case 3: visit_pairs<3, Row>(m, some, locs, scales, b, means, scores); break;
        default: visit_pairs<4, Row>(m, some, locs, scales, b, means, scores);
      }
  }
}

inline void score(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t batch,
                  const float* means, const Scores& scores) {
  switch (m.kind) {
    case kFloat32: return multiply_pairs<Float32Row>(m, rows, locs, scales, batch, means, scores);
    case kBfloat16: return multiply_pairs<Bfloat16Row>(m, rows, locs, scales, batch, means, scores);
    case kBytes: return multiply_pairs<IntegerRow<8>>(m, rows, locs, scales, batch, means, scores);
    default: return multiply_pairs<IntegerRow<4>>(m, rows, locs, scales, batch, means, scores);
  }
}
