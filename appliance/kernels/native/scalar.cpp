// Variant `scalar`: plain C++, any CPU. The emulation that the vector variants are compared with, and the last resort.
#include "elementwise.h"

namespace int4 {
namespace {

struct Scalar {
  static constexpr int kLanes = 16, kRows = 4, kManyRows = 4, kManyBlocks = 1;
  struct I { int32_t v[16]; };
  struct F { float v[16]; };
  static I splat(int32_t x) { I r; for (auto& e : r.v) e = x; return r; }
  static F splat_f(float x) { F r; for (auto& e : r.v) e = x; return r; }
  static I hold(I a) { return a; }
  static I zero() { return splat(0); }
  static F zero_f() { return splat_f(0); }
  static I load(const void* p) { I r; __builtin_memcpy(r.v, p, 64); return r; }
  static void store(void* p, I a) { __builtin_memcpy(p, a.v, 64); }
  static F load_f(const float* p) { F r; __builtin_memcpy(r.v, p, 64); return r; }
  static void store_f(float* p, F a) { __builtin_memcpy(p, a.v, 64); }
  static I mask(I a, I b) { for (int i = 0; i < 16; i++) a.v[i] &= b.v[i]; return a; }
  static I add(I a, I b) { for (int i = 0; i < 16; i++) a.v[i] += b.v[i]; return a; }
  template <int N> static I shift(I a) {
    for (auto& e : a.v) e = (int32_t)((uint32_t)e >> N);
    return a;
  }
  static I shift(I a, int n) {
    for (auto& e : a.v) e = (int32_t)((uint32_t)e >> n);
    return a;
  }
  template <int N> static I shift16(I a) {
    for (auto& e : a.v) e = (int32_t)(((uint32_t)e >> 16 >> N << 16) | (((uint32_t)e & 0xffff) >> N));
    return a;
  }
  static I dot(I acc, I a, I b) {
    for (int i = 0; i < 16; i++)
      acc.v[i] += (int16_t)a.v[i] * (int16_t)b.v[i] + (a.v[i] >> 16) * (b.v[i] >> 16);
    return acc;
  }
  static F to_float(I a) { F r; for (int i = 0; i < 16; i++) r.v[i] = (float)a.v[i]; return r; }
  static F mul(F a, F b) { for (int i = 0; i < 16; i++) a.v[i] *= b.v[i]; return a; }
  static F fma(F a, F b, F c) { for (int i = 0; i < 16; i++) c.v[i] += a.v[i] * b.v[i]; return c; }
  static F widen(const uint16_t* p) { F r; for (int i = 0; i < 16; i++) r.v[i] = bf16_value(p[i]); return r; }
};

void quantize(const float* x, int64_t row, int32_t group, int32_t bits, const Rows& out) {
  static constexpr int kOrder4[8] = {0, 4, 1, 5, 2, 6, 3, 7}, kOrder8[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  const int* order = bits == 4 ? kOrder4 : kOrder8;
  int16_t* q = out.q + row * out.k;
  for (int64_t g = 0; g < out.groups; g++, x += group, q += group) {
    float max = 0;
    bool finite = true;
    for (int i = 0; i < group; i++) {
      const float size = __builtin_fabsf(x[i]);
      finite = finite && size <= 3.402823466e38f;
      max = size > max ? size : max;
    }
    const bool zero = max < 1e-30f;
    const float inverse = finite && !zero ? (float)kQuantMax / max : 0.0f;
    int32_t sum = 0;
    for (int i = 0; i < group; i++) {
      const float value = finite ? x[i / 8 * 8 + order[i % 8]] * inverse : 0.0f;
      q[i] = (int16_t)__builtin_lrintf(value);
      sum += q[i];
    }
    const float scale = !finite ? __builtin_nanf("") : zero ? 0.0f : max / (float)kQuantMax;
    out.scale[row * out.groups + g] = scale;
    out.sum[row * out.groups + g] = scale * (float)sum;
  }
}

} // namespace

const Variant kScalar = {
    "scalar", 0, quantize, few<Scalar>, unpack<Scalar>, many<Scalar>, Scalar::kManyBlocks, Scalar::kManyRows, columns<Scalar>, channel, widen_all,
    narrow_all, norm_row, gate_row, head_row,
};

} // namespace int4
