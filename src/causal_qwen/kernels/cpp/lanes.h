// Eight numbers at a time, in the compiler's own type, which any target has; and the threads that share work.

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

constexpr int kLanes = 8;

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
inline Floats in_register(Floats v) {
#ifdef __AVX2__
  if (again) asm("" : "+x"(v));
#endif
  return v;
}

// a·b + c, rounded once where the processor can. It is said and not left to the compiler, which is told to join
// nothing (-ffp-contract=off): its choice would depend on the loop, and sums on how many rows share one.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __FMA__
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#else
  return a * b + c;
#endif
}

inline Floats fused(Floats a, float b, Floats c) { return fused(a, Floats{} + b, c); }

// Eight numbers of 16 bits (float16) as floats.
inline Floats widen_halves(const uint16_t* from) {
#ifdef __F16C__
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
  using Halves = uint16_t __attribute__((vector_size(16)));
  const Words bits = __builtin_convertvector(load<Halves>(from), Words);
  // The exponent moves to its new place and is raised from a bias of 15 to one of 127.
  const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  const Words special = (Words)(size >= 65536.0f) & 0x7f800000;  // infinite, or not a number
  return (Floats)((Words)size | special | (bits & 0x8000) << 16);
#endif
}

// ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)).
inline float sum(Floats v) {
#ifdef __AVX2__
  const __m256 pairs = _mm256_add_ps((__m256)v, _mm256_permute_ps((__m256)v, 0x4e));
  const __m256 both = _mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0xb1));
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
  return ((v[0] + v[2]) + (v[1] + v[3])) + ((v[4] + v[6]) + (v[5] + v[7]));
#endif
}

// The sums of four vectors at a time, side by side, each in the same order.
inline void sum(const Floats (&v)[4], float* sums) {
#ifdef __AVX2__
  const auto pair = [](Floats a, Floats b) {
    return _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
  };
  const __m256 ab = pair(v[0], v[1]), cd = pair(v[2], v[3]);
  const __m256 both = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
  for (int i = 0; i < 4; ++i) sums[i] = sum(v[i]);
#endif
}

inline Words nearest(Floats v) {
  return __builtin_convertvector(v + (v < 0.0f ? Floats{} - 0.5f : Floats{} + 0.5f), Words);
}

inline Floats absolute(Floats v) { return (Floats)((Words)v & 0x7fffffff); }

inline Shorts absolute(Shorts v) {
#ifdef __AVX2__
  return (Shorts)_mm256_abs_epi16((__m256i)v);
#else
  return v < 0 ? -v : v;
#endif
}

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
  for (; i + kLanes <= size; i += kLanes) total = fused(load<Floats>(a + i), load<Floats>(b + i), total);
  float rest = 0.0f;
  for (; i < size; ++i) rest = fused(a[i], b[i], rest);
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
