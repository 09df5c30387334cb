// The functions of interface.py: products, causes, token scores and decoding steps, on all threads.
//
// Structures are filled field by field from Python; nothing here knows tensors or tokens.

#include <iterator>
#include <numeric>

#include "blocks.h"
#include "causes.h"
#include "matrices.h"
#include "scores.h"
#include "selection.h"

namespace {

// The vectors that multiply W, and the means of scale_U, which multiply balance.
struct Causes {
  Vectors locs, scales;
  std::vector<float> means;
  Causes(const Matrix& m, const float* loc, const float* scale, int64_t batch) {
    locs.prepare(m, loc, batch);
    if (!scale) return;
    scales.prepare(m, scale, batch);
    for (int64_t b = 0; b < batch; ++b, scale += m.columns)
      means.push_back(std::accumulate(scale, scale + m.columns, 0.0f) / m.columns);
  }
};

}  // namespace

extern "C" {

// The bytes of each structure, which Python's must take too; 0 beyond the last.
void structure_sizes(int64_t* sizes, int64_t count) {
  const int64_t own[] = {sizeof(Matrix), sizeof(Scores), sizeof(Abduction), sizeof(Block), sizeof(Decoder),
                         sizeof(Text),   sizeof(Step)};
  for (int64_t i = 0; i < count; ++i) sizes[i] = i < int64_t(std::size(own)) ? own[i] : 0;
}

// All blocks and the final norm for some new tokens.
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

// y (batch, rows) = W x + b for x (batch, columns); unless null, `best` (batch) are their argmax.
void matrix_product(const Matrix* matrix, const float* x, float* y, int64_t* best, int64_t batch,
                    int64_t threads) {
  Vectors vectors;
  vectors.prepare(*matrix, x, batch);
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    const Range rows = Range::share(matrix->rows, thread, all);
    multiply<false>(*matrix, rows, vectors, batch, y, matrix->rows);
  });
  for (int64_t b = 0; best && b < batch; ++b) best[b] = argmax(y + b * matrix->rows, matrix->rows);
}

// U (2, batch, D) and loc_U0 (batch) of features (batch, columns).
void causes(const Abduction* abduction, const float* features, float* U, float* loc_U0, int64_t batch,
            int64_t threads) {
  abduce(*abduction, features, batch, threads, U, loc_U0);
}

// y (rows, columns) = W of integers.
void matrix_widened(const Matrix* matrix, float* y, int64_t threads) {
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    const Range rows = Range::share(matrix->rows, thread, all);
    matrix->kind == kBytes ? widen<8>(*matrix, rows, y) : widen<4>(*matrix, rows, y);
  });
}

// The scores of all tokens, for loc_U and scale_U (batch, columns); b is the matrix's bias.
void token_scores(const Matrix* matrix, const float* loc, const float* scale, const Scores* scores,
                  int64_t batch, int64_t threads) {
  const Matrix& m = *matrix;
  const Causes causes(m, loc, scale, batch);
  in_parallel(threads, [&](int64_t thread, int64_t all) {
    visits(Range::share(m.rows, thread, all), batch, kPairs, [&](Range rows, Visit visit) {
      score(m, rows, causes.locs, causes.scales, visit, causes.means.data(), *scores);
    });
  });
  for (int64_t b = 0; scores->best && b < batch; ++b)
    scores->best[b] = argmax(scores->z_scores + b * m.rows, m.rows);
}

// The same only where logits (batch, rows) are among their k largest; without `scale`, W u + b for u = `loc`.
void token_scores_among(const Matrix* matrix, const float* logits, int64_t k, const float* loc,
                        const float* scale, const Scores* scores, int64_t batch) {
  const Matrix& m = *matrix;
  const Causes causes(m, loc, scale, batch);
  for (int64_t b = 0; b < batch; ++b)
    score_among(m, logits + b * m.rows, k, causes.locs, scale ? &causes.scales : nullptr, b,
                causes.means.data(), *scores);
}
}
