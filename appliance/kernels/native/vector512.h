// 512-bit vectors for tile.h, all but `dot`.
#pragma once
#include <immintrin.h>
#include "elementwise.h"
#include "quantize_avx2.h"

namespace int4 {
namespace {

struct Vector512 {
  static constexpr int kLanes = 16, kRows = 8, kManyRows = 12, kManyBlocks = 2;
  using I = __m512i;
  using F = __m512;
  static I hold(I a) {
    __asm__("" : "+v"(a));
    return a;
  }
  static I zero() { return _mm512_setzero_si512(); }
  static F zero_f() { return _mm512_setzero_ps(); }
  static I splat(int32_t x) { return _mm512_set1_epi32(x); }
  static F splat_f(float x) { return _mm512_set1_ps(x); }
  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, I a) { _mm512_storeu_si512(p, a); }
  static F load_f(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f(float* p, F a) { _mm512_storeu_ps(p, a); }
  static I mask(I a, I b) { return _mm512_and_si512(a, b); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  template <int N> static I shift(I a) { return _mm512_srli_epi32(a, N); }
  static I shift(I a, int n) { return _mm512_srlv_epi32(a, _mm512_set1_epi32(n)); }
  template <int N> static I shift16(I a) { return _mm512_srli_epi16(a, N); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F widen(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
};

} // namespace
} // namespace int4
