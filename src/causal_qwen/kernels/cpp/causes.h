// The causes of features, from the linear maps of abduction.

#pragma once

#include "matrices.h"

enum Activation : int64_t { kExp, kSoftplus, kAbs };

// z → loc_U = W_loc z + b_loc, scale_U = activation(W_scale z + b_scale) and loc_U0 = −(a·z + c).
struct Abduction {
  Matrix maps;  // (2D + 1, H): W_loc, W_scale and a, with their biases
  int64_t activation;
  double bound;  // scale_U stays within e^±bound
};

inline float activated(const Abduction& abduction, float pre) {
  const float bound = float(abduction.bound);
  if (abduction.activation == kExp) return std::exp(std::clamp(pre, -bound, bound));
  if (abduction.activation == kAbs) return std::max(std::fabs(pre), std::exp(-bound));
  const float x = std::max(pre, -bound);
  return x > 20.0f ? x : std::log1p(std::exp(x));  // beyond 20 they are equal
}

// U: loc_U and scale_U, (2, B, D); loc_U0: (B).
void abduce(const Abduction& abduction, const float* features, int64_t batch, int64_t threads, float* U,
            float* loc_U0) {
  const Matrix& m = abduction.maps;
  const int64_t size = m.rows / 2;
  std::vector<float> maps(batch * m.rows);
  Vectors vectors;
  vectors.prepare(m, features, batch);
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    multiply<false>(m, Range::share(m.rows, thread, all), vectors, batch, maps.data(), m.rows);
  });
  for (int64_t b = 0; b < batch; ++b) {
    const float* own = maps.data() + b * m.rows;
    float *loc = U + b * size, *scale = loc + batch * size;
    std::copy(own, own + size, loc);
    for (int64_t i = 0; i < size; ++i) scale[i] = activated(abduction, own[size + i]);
    loc_U0[b] = -own[2 * size];
  }
}
