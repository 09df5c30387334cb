// The blocks of a decoder for the new tokens of some texts: one each, or several of a prompt.
//
// What is computed of a token depends on its own text alone, bit for bit: neither on its neighbours nor on how many
// tokens of a prompt come at one time.
//
// Shapes: B new tokens, S visible slots, H hidden size, N query heads, K key and value heads, d head width, F inner
// width of the MLP.

#pragma once

#include "matrices.h"

struct Block {
  const float *attention_gain, *attention_shift;  // a shift is a LayerNorm's; an RMSNorm has none
  const float *query_gain, *key_gain;             // (d) of the heads' RMSNorm, or null
  const float *mlp_gain, *mlp_shift;
  Matrix qkv, output, gate_up, down;
};

struct Decoder {
  const Block* blocks;
  const float *gain, *shift;  // of the final norm
  const float* frequencies;   // (d/2), radians per position
  int64_t layers, hidden, heads, groups, width, inner;
  double eps;
};

// What is cached of one text.
struct Text {
  float *const *keys, *const *values;  // per layer
  const uint8_t* valid;                // (S): 0 at padding, or null where there is none
  int64_t first, stride;               // where its K·d numbers of slot 0 begin, and how far it is to the next slot
};

struct Step {
  float* x;              // (B, H): embeddings in, features after the final norm out
  const Text* texts;
  const int64_t *owner;  // (B): the text of each new token
  const int64_t *slot;   // (B): its slot, which is valid; those of one text follow each other
  int64_t batch, threads;
};

// e^x to rounding: 2^n · e^r with |r| ≤ ln 2 / 2. Below −87 it is 0, above 88 it stays at e^88.
inline Floats exponential(Floats x) {
  const Floats capped = x > 88.0f ? Floats{} + 88.0f : x < -87.0f ? Floats{} - 87.0f : x;
  const Words n = nearest(capped * 1.44269504f);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = capped - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = Floats{} + 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) p = fused(p, r, Floats{} + c);
  return x < -87.0f ? Floats{} : p * (Floats)((n + 127) << 23);
}

// The norm of each of `count` vectors: LayerNorm where there is a shift, else RMSNorm.
void normalise(const float* x, const float* gain, const float* shift, float eps, int64_t size, int64_t count,
               float* y) {
  for (int64_t n = 0; n < count; ++n, x += size, y += size) {
    float mean = 0.0f, square = 0.0f;
    if (shift) {
#pragma omp simd reduction(+ : mean)
      for (int64_t i = 0; i < size; ++i) mean += x[i];
      mean /= size;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < size; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(square / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) y[i] = (x[i] - mean) * factor * gain[i];
    if (shift)
      for (int64_t i = 0; i < size; ++i) y[i] += shift[i];
  }
}

// cos and sin of the new token's angles, (B, d/2): its position counts the real tokens before it.
struct Angles {
  std::vector<float> cos, sin;
  Angles(const Decoder& decoder, const Step& step) {
    for (int64_t b = 0; b < step.batch; ++b) {
      const uint8_t* valid = step.texts[step.owner[b]].valid;
      const float position = float(valid ? std::count(valid, valid + step.slot[b], 1) : step.slot[b]);
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

// Normalise and rotate queries and keys in place, and put new keys and values at their slot.
void place(const Decoder& decoder, const Step& step, const Angles& angles, int64_t layer, float* qkv,
           Range share) {
  const int64_t heads = decoder.heads, groups = decoder.groups, width = decoder.width;
  const int64_t all = heads + 2 * groups;
  const Block& block = decoder.blocks[layer];
  for (int64_t task = share.first; task < share.last; ++task) {
    const int64_t b = task / all, head = task % all;
    float* own = qkv + task * width;
    const int64_t angle = b * width / 2;
    if (head < heads + groups) {
      const float* gain = head < heads ? block.query_gain : block.key_gain;
      if (gain) normalise(own, gain, nullptr, float(decoder.eps), width, 1, own);
      rotate(own, &angles.cos[angle], &angles.sin[angle], width / 2);
    }
    if (head < heads) continue;
    const Text& text = step.texts[step.owner[b]];
    float* cache = head < heads + groups ? text.keys[layer] : text.values[layer];
    std::copy(own, own + width, cache + text.first + step.slot[b] * text.stride + (head - heads) % groups * width);
  }
}

// Columns of values whose sums stay in registers.
constexpr int64_t kWide = 8 * kLanes;

// Σ weight · value / total over the slots, for 8·P columns.
template <int P>
void mix(const float* weights, const float* values, int64_t stride, int64_t slots, float total, float* mixed) {
  Floats sums[P] = {};
  for (int64_t s = 0; s < slots; ++s)
    for (int p = 0; p < P; ++p) sums[p] = fused(load<Floats>(values + s * stride + p * kLanes), weights[s], sums[p]);
  for (int p = 0; p < P; ++p) {
    const Floats mean = sums[p] / total;
    std::memcpy(mixed + p * kLanes, &mean, sizeof mean);
  }
}

// softmax(q·k/√d)·v over the valid slots up to a token's own, of some (token, head) pairs; `scores` is scratch.
void attend(const Decoder& decoder, const Step& step, int64_t layer, const float* qkv, Range share,
            float* scores, float* mixed) {
  const int64_t heads = decoder.heads, groups = decoder.groups, width = decoder.width;
  const float root = 1.0f / std::sqrt(float(width));
  for (int64_t task = share.first; task < share.last; ++task) {
    const int64_t b = task / heads, head = task % heads;
    const float* query = qkv + (b * (heads + 2 * groups) + head) * width;
    const Text& text = step.texts[step.owner[b]];
    const int64_t offset = text.first + head / (heads / groups) * width;
    const int64_t slots = step.slot[b] + 1, stride = text.stride;
    const float *keys = text.keys[layer] + offset, *values = text.values[layer] + offset;
    float largest = -INFINITY;
    for (int64_t s = 0; s < slots; ++s) {
      scores[s] = !text.valid || text.valid[s] ? root * dot(query, keys + s * stride, width) : -INFINITY;
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
    int64_t i = 0;
    for (; i + kWide <= width; i += kWide)
      mix<kWide / kLanes>(scores, values + i, stride, slots, total, own + i);
    for (; i + kLanes <= width; i += kLanes) mix<1>(scores, values + i, stride, slots, total, own + i);
    for (; i < width; ++i) {
      float rest = 0.0f;
      for (int64_t s = 0; s < slots; ++s) rest += scores[s] * values[s * stride + i];
      own[i] = rest / total;
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
  const int64_t last = *std::max_element(step.slot, step.slot + batch);
  std::vector<float> normed(batch * hidden), scores(last + 1 + kLanes);
  const float eps = float(decoder.eps);
  const Angles angles(decoder, step);
  Vectors vectors;
  const auto mine = [&](int64_t size) { return Range::share(size, thread, threads); };
  const Range gate = mine(inner), up(gate.first + inner, gate.last + inner);
  for (int64_t layer = 0; layer < decoder.layers; ++layer) {
    const Block& block = decoder.blocks[layer];
    normalise(step.x, block.attention_gain, block.attention_shift, eps, hidden, batch, normed.data());
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
    normalise(step.x, block.mlp_gain, block.mlp_shift, eps, hidden, batch, normed.data());
    vectors.prepare(block.gate_up, normed.data(), batch);
    for (const Range& part : {gate, up})
      multiply<false>(block.gate_up, part, vectors, batch, shared.both.data(), 2 * inner);
    activate(shared.both.data(), inner, batch, gate, shared.active.data());
#pragma omp barrier
    vectors.prepare(block.down, shared.active.data(), batch);
    multiply<true>(block.down, mine(hidden), vectors, batch, step.x, hidden);
#pragma omp barrier
  }
  if (thread == 0) normalise(step.x, decoder.gain, decoder.shift, eps, hidden, batch, step.x);
}
