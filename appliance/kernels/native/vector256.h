// 256-bit vectors for tile.h, all but `dot`.
#pragma once
#include <immintrin.h>
#include "elementwise.h"
#include "quantize_avx2.h"

namespace int4 {
namespace {

struct Vector256 {
  static constexpr int kLanes = 8, kRows = 4, kManyRows = 4, kManyBlocks = 1;
  using I = __m256i;
  using F = __m256;
  static I hold(I a) {
    __asm__("" : "+x"(a));
    return a;
  }
  static I zero() { return _mm256_setzero_si256(); }
  static F zero_f() { return _mm256_setzero_ps(); }
  static I splat(int32_t x) { return _mm256_set1_epi32(x); }
  static F splat_f(float x) { return _mm256_set1_ps(x); }
  static I load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void store(void* p, I a) { _mm256_storeu_si256((__m256i*)p, a); }
  static F load_f(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f(float* p, F a) { _mm256_storeu_ps(p, a); }
  static I mask(I a, I b) { return _mm256_and_si256(a, b); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  template <int N> static I shift(I a) { return _mm256_srli_epi32(a, N); }
  static I shift(I a, int n) { return _mm256_srlv_epi32(a, _mm256_set1_epi32(n)); }
  template <int N> static I shift16(I a) { return _mm256_srli_epi16(a, N); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F widen(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
  }
};

} // namespace
} // namespace int4
