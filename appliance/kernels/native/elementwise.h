// What stands between the multiplications of a decoder layer, on fp32 rows: RMSNorm with the residual sum, SiLU gate,
// rotation of heads. Plain loops over 16 lanes, which the compiler turns into each instruction set's vectors.
//
// Internal linkage and nothing of the standard library, as in tile.h. NaN goes through.
#pragma once
#include "tile.h"

namespace int4 {
namespace {

constexpr int kWide = 16;

// e^x for x in -87..88 (clamped), relative error below 2e-7.
inline float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float whole = shifted - 12582912.0f;
  const float f = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  float p = 1.98756915e-4f;
  p = p * f + 1.39819995e-3f;
  p = p * f + 8.33345190e-3f;
  p = p * f + 4.16657960e-2f;
  p = p * f + 1.66666655e-1f;
  p = p * f + 5.00000012e-1f;
  p = p * f * f + f + 1.0f;
  uint32_t bits, exponent;
  __builtin_memcpy(&bits, &p, 4);
  __builtin_memcpy(&exponent, &shifted, 4);
  bits += exponent << 23;
  __builtin_memcpy(&p, &bits, 4);
  return p;
}

inline float squares(const float* x, int64_t count) {
  float parts[kWide] = {};
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide)
    for (int j = 0; j < kWide; j++) parts[j] += x[i + j] * x[i + j];
  for (int j = 0; i + j < count; j++) parts[j] += x[i + j] * x[i + j];
  for (int half = kWide / 2; half; half /= 2)
    for (int j = 0; j < half; j++) parts[j] += parts[j + half];
  return parts[0];
}

// out = x * factor * weight, in place too.
inline void scale_by(const float* x, float factor, const uint16_t* weight, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    float lanes[kWide];
    for (int j = 0; j < kWide; j++) lanes[j] = x[i + j] * factor * bf16_value(weight[i + j]);
    for (int j = 0; j < kWide; j++) out[i + j] = lanes[j];
  }
  for (; i < count; i++) out[i] = x[i] * factor * bf16_value(weight[i]);
}

inline float root_mean_inverse(float sum, int64_t count, float epsilon) {
  return 1.0f / __builtin_sqrtf(sum / (float)count + epsilon);
}

// total += add (may be null); out = RMSNorm(total) * weight.
void norm_row(float* total, const float* add, const uint16_t* weight, float epsilon, int64_t count, float* out) {
  if (add) {
    int64_t i = 0;
    for (; i + kWide <= count; i += kWide)
      for (int j = 0; j < kWide; j++) total[i + j] += add[i + j];
    for (; i < count; i++) total[i] += add[i];
  }
  scale_by(total, root_mean_inverse(squares(total, count), count, epsilon), weight, count, out);
}

// out = gate / (1 + e^-gate) * up.
void gate_row(const float* gate, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    float lanes[kWide];
    for (int j = 0; j < kWide; j++) lanes[j] = gate[i + j] / (1.0f + exponential(-gate[i + j])) * up[i + j];
    for (int j = 0; j < kWide; j++) out[i + j] = lanes[j];
  }
  for (; i < count; i++) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

// One head x[size], changed in place, to bf16: RMSNorm (weight may be null), then the first `rotary` columns rotated in
// neox order by cos_sin (may be null): rotary/2 cosines, then rotary/2 sines.
void head_row(float* x, const uint16_t* weight, float epsilon, const float* cos_sin, int64_t rotary, int64_t size,
              uint16_t* out) {
  if (weight) scale_by(x, root_mean_inverse(squares(x, size), size, epsilon), weight, size, x);
  if (cos_sin) {
    const int64_t half = rotary / 2;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    for (int64_t i = 0; i < half; i++) {
      const float a = x[i], b = x[half + i];
      x[i] = a * cosine[i] - b * sine[i];
      x[half + i] = b * cosine[i] + a * sine[i];
    }
  }
  narrow_all(x, size, out);
}

} // namespace
} // namespace int4
