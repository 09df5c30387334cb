// loc_S and scale_S of all tokens from one read of W: |W| is never stored.

#pragma once

#include <type_traits>

#include "matrices.h"
#include "selection.h"

// loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean + scale_U0, (B, rows) each, or only
// z_scores = (loc_S − threshold) / scale_S and their argmax `best` (B) where there is room for them.
struct Scores {
  float *loc_S, *scale_S, *z_scores;
  int64_t* best;
  const float *balance, *threshold;  // (rows), or null
  const float *loc_U0, *scale_U0;    // (B), or null
};

struct PlainBytes {};  // rows of bytes without a shift

// W loc and |W| scale of R rows and C pairs of vectors.
template <int R, int C, typename Row>
inline void pair_sums(const Matrix& m, const int64_t (&r)[R], const Vectors& locs, const Vectors& scales,
                      Visit visit, float (&loc_S)[R][C], float (&scale_S)[R][C]) {
  const int64_t columns = m.columns;
  const float *loc = locs.x + visit.first * columns, *scale = scales.x + visit.first * columns;
  Floats loc_sums[R][C][1] = {}, scale_sums[R][C][1] = {};
  int64_t i = 0;
  for (; i + kGroup <= columns; i += kGroup) {
    if (visit.ahead)
      for (int k = 0; k < R; ++k) Row(m, r[k] + visit.ahead).prefetch(i);
    for (int part = 0; part < kParts; ++part) {
      Floats loc_x[C], scale_x[C];
      for (int c = 0; c < C; ++c) {
        loc_x[c] = in_register<(R > 1)>(load<Floats>(loc + c * columns + i + part * kLanes));
        scale_x[c] = in_register<(R > 1)>(load<Floats>(scale + c * columns + i + part * kLanes));
      }
      for (int k = 0; k < R; ++k) {
        const Floats w = in_register<true>(Row(m, r[k]).at(i, part)), size = absolute(w);
        for (int c = 0; c < C; ++c) {
          loc_sums[k][c][0] = fused(w, loc_x[c], loc_sums[k][c][0]);
          scale_sums[k][c][0] = fused(size, scale_x[c], scale_sums[k][c][0]);
        }
      }
    }
  }
  add_up(loc_sums, loc_S);
  add_up(scale_sums, scale_S);
  for (; i < columns; ++i)
    for (int k = 0; k < R; ++k)
      for (int c = 0; c < C; ++c) {
        const float w = Row(m, r[k]).one(i);
        loc_S[k][c] = fused(w, loc[c * columns + i], loc_S[k][c]);
        scale_S[k][c] = fused(std::fabs(w), scale[c * columns + i], scale_S[k][c]);
      }
}

// The same for bytes without a shift, in whole numbers: |scale · q| = |scale| · |q|.
template <int R, int C>
inline void byte_pair_sums(const Matrix& m, const int64_t (&r)[R], const Vectors& locs, const Vectors& scales,
                           Visit visit, float (&loc_S)[R][C], float (&scale_S)[R][C]) {
  const int64_t groups = m.columns / kGroup;
  Floats loc_sums[R][C][1] = {}, scale_sums[R][C][1] = {};
  const auto term = [&](const Vectors& vectors, int64_t c, int64_t g, Shorts even, Shorts odd) {
    const int16_t* levels = vectors.levels.data() + (c * groups + g) * kGroup;
    const Words sum = products_of_pairs(even, load<Shorts>(levels)) +
                      products_of_pairs(odd, load<Shorts>(levels + kGroup / 2));
    return __builtin_convertvector(sum, Floats) * vectors.scales[c * groups + g];
  };
  for (int64_t g = 0; g < groups; ++g)
    for (int k = 0; k < R; ++k) {
      if (visit.ahead) Levels<8>(m, r[k] + visit.ahead).prefetch(g * kGroup);
      Shorts even, odd;
      Levels<8>(m, r[k]).lanes(g, 0, even, odd);
      const float scale = m.scale[r[k] * groups + g], size = std::fabs(scale);
      for (int c = 0; c < C; ++c) {
        const Floats loc = term(locs, visit.first + c, g, even, odd);
        const Floats width = term(scales, visit.first + c, g, absolute(even), absolute(odd));
        loc_sums[k][c][0] = fused(loc, scale, loc_sums[k][c][0]);
        scale_sums[k][c][0] = fused(width, size, scale_sums[k][c][0]);
      }
    }
  add_up(loc_sums, loc_S);
  add_up(scale_sums, scale_S);
}

// The scores of R rows and C pairs of vectors.
template <int R, int C, typename Row>
inline void score_rows(const Matrix& m, const int64_t (&r)[R], const Vectors& locs, const Vectors& scales,
                       Visit visit, const float* means, const Scores& scores) {
  float loc_S[R][C], scale_S[R][C];
  if constexpr (std::is_same_v<Row, PlainBytes>)
    byte_pair_sums<R, C>(m, r, locs, scales, visit, loc_S, scale_S);
  else
    pair_sums<R, C, Row>(m, r, locs, scales, visit, loc_S, scale_S);
  CAUSAL_UNROLL
  for (int k = 0; k < R; ++k)
    CAUSAL_UNROLL
    for (int c = 0; c < C; ++c) {
      const int64_t row = r[k], b = visit.first + c, at = b * m.rows + row;
      const float loc_U0 = scores.loc_U0 ? scores.loc_U0[b] : 0.0f;
      const float scale_U0 = scores.scale_U0 ? scores.scale_U0[b] : 0.0f;
      const float loc = loc_S[k][c] + (m.bias ? m.bias[row] : 0.0f) + loc_U0;
      const float balanced = scores.balance ? fused(scores.balance[row], means[b], scale_S[k][c]) : scale_S[k][c];
      const float scale = balanced + scale_U0;
      if (scores.z_scores)
        scores.z_scores[at] = (loc - (scores.threshold ? scores.threshold[row] : 0.0f)) / scale;
      else
        scores.loc_S[at] = loc, scores.scale_S[at] = scale;
    }
}

template <int C, typename Row>
void score_range(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, Visit visit,
                 const float* means, const Scores& scores) {
  constexpr int R = C == 1 ? 4 : 2;
  from_places<R>(
      rows, [&](const int64_t (&r)[R]) { score_rows<R, C, Row>(m, r, locs, scales, visit, means, scores); },
      [&](int64_t row) { score_rows<1, C, Row>(m, {row}, locs, scales, visit, means, scores); });
}

template <typename Row>
void score_range(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, Visit visit,
                 const float* means, const Scores& scores) {
  if (visit.count == 1) return score_range<1, Row>(m, rows, locs, scales, visit, means, scores);
  score_range<2, Row>(m, rows, locs, scales, visit, means, scores);
}

// The scores of some rows for the one or two pairs of a visit.
inline void score(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, Visit visit,
                  const float* means, const Scores& scores) {
  switch (m.kind) {
    case kFloat32: return score_range<Float32Row>(m, rows, locs, scales, visit, means, scores);
    case kBfloat16: return score_range<Bfloat16Row>(m, rows, locs, scales, visit, means, scores);
    case kFloat16: return score_range<Float16Row>(m, rows, locs, scales, visit, means, scores);
    case kBytes:
      if (!m.shift) return score_range<PlainBytes>(m, rows, locs, scales, visit, means, scores);
      return score_range<IntegerRow<8>>(m, rows, locs, scales, visit, means, scores);
    default: return score_range<IntegerRow<4>>(m, rows, locs, scales, visit, means, scores);
  }
}

// Scores of row b of the batch where its logit is among the k largest, −∞ elsewhere: z-scores, or W u + b
// where there are no scales. Few rows of W are read for them.
inline void score_among(const Matrix& m, const float* logits, int64_t k, const Vectors& locs,
                        const Vectors* scales, int64_t b, const float* means, const Scores& scores) {
  const float least = kth_largest(logits, m.rows, k);
  const Visit visit{b, 1, 0};
  float* own = scores.z_scores + b * m.rows;
  std::fill(own, own + m.rows, -INFINITY);
  for (int64_t row = 0; row < m.rows; ++row) {
    if (logits[row] < least) continue;
    const Range one(row, row + 1);
    scales ? score(m, one, locs, *scales, visit, means, scores)
           : multiply_visit<false>(m, one, locs, visit, scores.z_scores, m.rows);
  }
  scores.best[b] = argmax(own, m.rows);
}
