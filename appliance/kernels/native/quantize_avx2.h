// Quantization of activations with AVX2, shared by every x86 variant above scalar.
#pragma once
#include <immintrin.h>
#include "variant.h"

namespace int4 {
namespace {

inline uint32_t largest(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(m);
}

inline int32_t total(__m256i v) {
  __m128i m = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

void quantize_avx2(const float* x, int64_t row, int32_t group, int32_t bits, const Rows& out) {
  int16_t* q = out.q + row * out.k;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t g = 0; g < out.groups; g++, x += group, q += group) {
    __m256i top = _mm256_setzero_si256();  // magnitudes of floats compare like integers, with NaN above infinity
    for (int i = 0; i < group; i += 8)
      top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    const uint32_t bits_max = largest(top);
    float max;
    __builtin_memcpy(&max, &bits_max, 4);
    const bool finite = bits_max < 0x7f800000u, zero = max < 1e-30f;
    const __m256 inverse = _mm256_set1_ps(finite && !zero ? (float)kQuantMax / max : 0.0f);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < group; i += 8) {
      __m256i v = _mm256_setzero_si256();
      if (finite) v = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
      sum = _mm256_add_epi32(sum, v);
      if (bits == 4) {  // 0 4 1 5 2 6 3 7
        const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
        _mm_storeu_si128((__m128i*)(q + i), _mm_blend_epi16(low, _mm_slli_epi32(high, 16), 0xaa));
      } else {  // 0 2 1 3 4 6 5 7
        const __m256i pairs = _mm256_blend_epi16(v, _mm256_slli_epi32(_mm256_srli_si256(v, 8), 16), 0xaa);
        _mm_storeu_si128((__m128i*)(q + i), _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
      }
    }
    const float scale = !finite ? __builtin_nanf("") : zero ? 0.0f : max / (float)kQuantMax;
    out.scale[row * out.groups + g] = scale;
    out.sum[row * out.groups + g] = scale * (float)total(sum);
  }
}

} // namespace
} // namespace int4
