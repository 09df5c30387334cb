// loc_S and scale_S of all tokens from one read of W: |W| is never stored.

#pragma once

#include "matrices.h"

// loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean + scale_U0, (B, rows) each.
struct Scores {
  float *loc_S, *scale_S;
  const float* balance;                   // (rows), or null
  const float *mean, *loc_U0, *scale_U0;  // (B)
};

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

inline void score(const Matrix& m, Range rows, const Vectors& locs, const Vectors& scales, int64_t batch,
                  const Scores& scores) {
  switch (m.kind) {
    case kFloat32: return multiply_pairs<Float32Row>(m, rows, locs, scales, batch, scores);
    case kBfloat16: return multiply_pairs<Bfloat16Row>(m, rows, locs, scales, batch, scores);
    case kBytes: return multiply_pairs<IntegerRow<8>>(m, rows, locs, scales, batch, scores);
    default: return multiply_pairs<IntegerRow<4>>(m, rows, locs, scales, batch, scores);
  }
}
