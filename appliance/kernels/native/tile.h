// The micro-kernels, written once over a vector type V; each instruction set's .cpp includes this and makes its table.
//
// V gives: I, F (int32 and fp32 vectors), hold (this value, in a register), kLanes (8 or 16), kRows (rows at once, few), kManyRows, kManyBlocks, and
// zero, zero_f, load, store, splat (a dword), splat_f, mask, shift<n> and shift(n) (dwords), shift16<n> (words), dot (acc + pairs of
// int16 products), to_float, load_f, store_f, mul, fma, widen (bf16 to fp32).
//
// Everything here has internal linkage and uses nothing of the standard library: a function that the linker shares
// between instruction sets would run on the wrong one.
#pragma once
#include "variant.h"

namespace int4 {
namespace {

inline float bf16_value(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t bf16_bits(float value) {
  uint32_t wide;
  __builtin_memcpy(&wide, &value, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((wide >> 16) | 0x40);
  return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <class V, int BITS>
struct Unpack {
  static constexpr int kPairs = BITS == 4 ? 4 : 2;   // code vectors that one load gives
  static constexpr int kColumns = 2 * kPairs;        // columns of one load

  template <int J>
  static inline typename V::I pair(typename V::I w) {
    if constexpr (BITS == 4) {
      const typename V::I m = V::splat(0x000F000F);
      if constexpr (J == 0) return V::mask(w, m);
      else if constexpr (J == 3) return V::template shift16<12>(w);
      else return V::mask(V::template shift<4 * J>(w), m);
    } else {
      if constexpr (J == 0) return V::mask(w, V::splat(0x00FF00FF));
      else return V::template shift16<8>(w);
    }
  }
};

inline int32_t dword(const int16_t* at) {
  int32_t value;
  __builtin_memcpy(&value, at, 4);
  return value;
}

// Bytes of the stream that are asked for ahead of their use: early into the second-level cache, which can wait for more
// lines at once, then into the first. Either alone gives a tenth less.
constexpr int kFar = 8192, kNear = 1024;

inline void fetch_ahead(const uint8_t* at) {
  __builtin_prefetch(at + kFar, 0, 2);
  __builtin_prefetch(at + kNear, 0, 3);
}

constexpr int kUnrolled = 4;  // lines of codes

// One line of codes times R rows. `packed` is held in a register: GCC would read it from memory for each of its codes.
template <class V, int BITS, int R, int CHAINS>
inline __attribute__((always_inline)) void few_line(typename V::I packed, const int16_t* const* q, int column,
                                                    typename V::I (*acc)[CHAINS]) {
  using U = Unpack<V, BITS>;
  packed = V::hold(packed);
  const typename V::I first = U::template pair<0>(packed), second = U::template pair<1>(packed);
  for (int r = 0; r < R; r++) {
    acc[r][0] = V::dot(acc[r][0], first, V::splat(dword(q[r] + column)));
    acc[r][1 % CHAINS] = V::dot(acc[r][1 % CHAINS], second, V::splat(dword(q[r] + column + 2)));
  }
  if constexpr (BITS == 4) {
    const typename V::I third = U::template pair<2>(packed), fourth = U::template pair<3>(packed);
    for (int r = 0; r < R; r++) {
      acc[r][2 % CHAINS] = V::dot(acc[r][2 % CHAINS], third, V::splat(dword(q[r] + column + 4)));
      acc[r][3 % CHAINS] = V::dot(acc[r][3 % CHAINS], fourth, V::splat(dword(q[r] + column + 6)));
    }
  }
}

// One pass over a block for R rows. Few rows need several accumulators each, or the latency of `dot` is the limit.
template <class V, int BITS, int R>
void few_pass(const Weight& w, int64_t block, const Rows& x, int64_t first, float (*y)[kBlock]) {
  using U = Unpack<V, BITS>;
  constexpr int kHalves = kBlock / V::kLanes;
  constexpr int kChains = R >= 4 ? 1 : R >= 2 ? 2 : U::kPairs;
  const uint8_t* record = w.block(block);
  const int64_t record_bytes = w.record_bytes(), code_bytes = w.code_bytes();
  const int lines = w.group / U::kColumns;  // groups are whole multiples of 32 columns
  const int16_t* q[R];
  for (int r = 0; r < R; r++) q[r] = x.q + (first + r) * x.k;
  typename V::F sums[R][kHalves];
  for (int r = 0; r < R; r++)
    for (int h = 0; h < kHalves; h++) sums[r][h] = V::zero_f();
  for (int64_t g = 0; g < x.groups; g++, record += record_bytes) {
    for (int h = 0; h < kHalves; h++) {
      typename V::I acc[R][kChains];
      for (int r = 0; r < R; r++)
        for (int c = 0; c < kChains; c++) acc[r][c] = V::zero();
      const uint8_t* line = record + h * V::kLanes * 4;
      for (int s = 0; s < lines; s += kUnrolled) {
#pragma GCC unroll 4
        for (int u = 0; u < kUnrolled; u++) {
          if (h == 0) fetch_ahead(line + (s + u) * 64);
          few_line<V, BITS, R, kChains>(V::load(line + (s + u) * 64), q, (s + u) * U::kColumns, acc);
        }
      }
      if (h == 0) fetch_ahead(record + code_bytes);
      const uint16_t* scales = (const uint16_t*)(record + code_bytes) + h * V::kLanes;
      const typename V::F scale = V::widen(scales);
      const typename V::F offset = V::fma(scale, V::splat_f(-(float)(1 << (BITS - 1))), V::widen(scales + kBlock));
      for (int r = 0; r < R; r++) {
        typename V::I total = acc[r][0];
        for (int c = 1; c < kChains; c++) total = V::add(total, acc[r][c]);
        const int64_t at = (first + r) * x.groups + g;
        sums[r][h] = V::fma(V::mul(V::to_float(total), V::splat_f(x.scale[at])), scale, sums[r][h]);
        sums[r][h] = V::fma(offset, V::splat_f(x.sum[at]), sums[r][h]);
      }
    }
    for (int r = 0; r < R; r++) q[r] += w.group;
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < kHalves; h++) V::store_f(y[r] + h * V::kLanes, sums[r][h]);
}

template <class V, int BITS, int R = V::kRows>
void few_exactly(int rows, const Weight& w, int64_t block, const Rows& x, int64_t first, float (*y)[kBlock]) {
  if constexpr (R > 1) {
    if (rows < R) return few_exactly<V, BITS, R - 1>(rows, w, block, x, first, y);
  }
  few_pass<V, BITS, R>(w, block, x, first, y);
}

// Passes of nearly equal size; after the first the block comes from the cache.
template <class V>
void few(const Weight& w, int64_t block, const Rows& x, int64_t first, int64_t count, float (*y)[kBlock]) {
  int64_t passes = (count + V::kRows - 1) / V::kRows;
  for (int64_t done = 0; passes > 0; passes--) {
    const int rows = (int)((count - done + passes - 1) / passes);
    if (w.bits == 4) few_exactly<V, 4>(rows, w, block, x, first + done, y + done);
    else few_exactly<V, 8>(rows, w, block, x, first + done, y + done);
    done += rows;
  }
}

template <class V, int BITS>
void unpack_bits(const Weight& w, int64_t block, int64_t from, int64_t to, int16_t* codes, float* scale,
                 float* offset) {
  using U = Unpack<V, BITS>;
  const uint8_t* record = w.block(block) + from * w.record_bytes();
  const int steps = w.group / U::kColumns;
  for (int64_t g = from; g < to; g++, record += w.record_bytes()) {
    for (int s = 0; s < steps; s++) {
      fetch_ahead(record + s * 64);
      for (int h = 0; h < kBlock; h += V::kLanes) {
        const typename V::I packed = V::load(record + s * 64 + h * 4);
        V::store(codes + 2 * h, U::template pair<0>(packed));
        V::store(codes + 2 * h + 32, U::template pair<1>(packed));
        if constexpr (BITS == 4) {
          V::store(codes + 2 * h + 64, U::template pair<2>(packed));
          V::store(codes + 2 * h + 96, U::template pair<3>(packed));
        }
      }
      codes += 32 * U::kPairs;
    }
    const uint16_t* scales = (const uint16_t*)(record + w.code_bytes());
    for (int h = 0; h < kBlock; h += V::kLanes) {
      const typename V::F s = V::widen(scales + h);
      V::store_f(scale + h, s);
      V::store_f(offset + h, V::fma(s, V::splat_f(-(float)(1 << (BITS - 1))), V::widen(scales + h + kBlock)));
    }
    scale += kBlock;
    offset += kBlock;
  }
}

template <class V>
void unpack(const Weight& w, int64_t block, int64_t from, int64_t to, int16_t* codes, float* scale, float* offset) {
  if (w.bits == 4) unpack_bits<V, 4>(w, block, from, to, codes, scale, offset);
  else unpack_bits<V, 8>(w, block, from, to, codes, scale, offset);
}

template <class V, int BLOCKS, int R>
void many_tile(const int16_t* codes, const float* scale, const float* offset, int64_t code_stride, int64_t scale_stride,
               int32_t group, int64_t from, int64_t to, const Rows& x, int64_t first, float* y, int64_t y_stride) {
  constexpr int kHalves = kBlock / V::kLanes, kVectors = BLOCKS * kHalves;
  const int16_t* q = x.q + first * x.k + from * group * V::kManyRows;
  for (int64_t g = from; g < to; g++) {
    typename V::I acc[R][kVectors];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) acc[r][v] = V::zero();
    for (int c = 0; c < group; c += 2) {
      typename V::I pairs[kVectors];
      for (int v = 0; v < kVectors; v++)
        pairs[v] = V::load(codes + (v / kHalves) * code_stride + 16 * c + (v % kHalves) * 2 * V::kLanes);
      for (int r = 0; r < R; r++) {
        const typename V::I two = V::splat(dword(q + c * V::kManyRows + 2 * r));
        for (int v = 0; v < kVectors; v++) acc[r][v] = V::dot(acc[r][v], pairs[v], two);
      }
    }
    for (int r = 0; r < R; r++) {
      const int64_t at = (first + r) * x.groups + g;
      const typename V::F row_scale = V::splat_f(x.scale[at]), row_sum = V::splat_f(x.sum[at]);
      for (int v = 0; v < kVectors; v++) {
        const int64_t lane = (v / kHalves) * scale_stride + (v % kHalves) * V::kLanes;
        float* target = y + r * y_stride + v * V::kLanes;
        typename V::F sum = V::fma(V::load_f(offset + lane), row_sum, V::load_f(target));
        sum = V::fma(V::mul(V::to_float(acc[r][v]), row_scale), V::load_f(scale + lane), sum);
        V::store_f(target, sum);
      }
    }
    codes += 16 * group;
    scale += kBlock;
    offset += kBlock;
    q += group * V::kManyRows;
  }
}

template <class V, int BLOCKS, int R = V::kManyRows>
void many_exactly(int64_t rows, const int16_t* codes, const float* scale, const float* offset, int64_t code_stride,
                  int64_t scale_stride, int32_t group, int64_t from, int64_t to, const Rows& x, int64_t first, float* y,
                  int64_t y_stride) {
  if constexpr (R > 1) {
    if (rows < R)
      return many_exactly<V, BLOCKS, R - 1>(rows, codes, scale, offset, code_stride, scale_stride, group, from, to, x,
                                            first, y, y_stride);
  }
  many_tile<V, BLOCKS, R>(codes, scale, offset, code_stride, scale_stride, group, from, to, x, first, y, y_stride);
}

template <class V, int BLOCKS = V::kManyBlocks>
void many(const int16_t* codes, const float* scale, const float* offset, int64_t code_stride, int64_t scale_stride,
          int32_t group, int64_t from, int64_t to, const Rows& x, int64_t first, int64_t count, float* y,
          int64_t y_stride) {
  for (int64_t done = 0; done < count;) {
    const int64_t left = count - done, rows = left < V::kManyRows ? left : V::kManyRows;
    many_exactly<V, BLOCKS>(rows, codes, scale, offset, code_stride, scale_stride, group, from, to, x, first + done,
                            y + done * y_stride, y_stride);
    done += rows;
  }
}

// A block's weights by column: out[c * stride + 0..16) for c in 0..k, bf16 or fp32.
template <class V, int BITS>
void columns_bits(const Weight& w, int64_t block, Type type, int64_t stride, void* out) {
  const uint8_t* record = w.block(block);
  constexpr int kCodes = 32 / BITS;
  const typename V::I mask = V::splat((1 << BITS) - 1);
  for (int64_t g = 0; g < w.groups(); g++, record += w.record_bytes()) {
    const uint16_t* scales = (const uint16_t*)(record + w.code_bytes());
    float values[kBlock];
    for (int s = 0; s < w.group / kCodes; s++) {
      for (int i = 0; i < kCodes; i++) {
        for (int h = 0; h < kBlock; h += V::kLanes) {
          const typename V::F scale = V::widen(scales + h);
          const typename V::F offset = V::fma(scale, V::splat_f(-(float)(1 << (BITS - 1))), V::widen(scales + h + kBlock));
          const typename V::I codes = V::mask(V::shift(V::load(record + s * 64 + h * 4), BITS * i), mask);
          V::store_f(values + h, V::fma(V::to_float(codes), scale, offset));
        }
        const int64_t at = (g * w.group + s * kCodes + i) * stride;
        if (type == kF32) __builtin_memcpy((float*)out + at, values, sizeof values);
        else for (int c = 0; c < kBlock; c++) ((uint16_t*)out)[at + c] = bf16_bits(values[c]);
      }
    }
  }
}

template <class V>
void columns(const Weight& w, int64_t block, Type type, int64_t stride, void* out) {
  if (w.bits == 4) columns_bits<V, 4>(w, block, type, stride, out);
  else columns_bits<V, 8>(w, block, type, stride, out);
}

// A row of the table, for the embedding lookup: short, so plain code.
void channel(const Weight& w, int64_t channel, float* out) {
  const uint8_t* record = w.block(channel / kBlock);
  const int lane = (int)(channel % kBlock), columns = 32 / w.bits, middle = 1 << (w.bits - 1);
  for (int64_t g = 0; g < w.groups(); g++, record += w.record_bytes()) {
    const uint16_t* scales = (const uint16_t*)(record + w.code_bytes());
    const float scale = bf16_value(scales[lane]), zero = bf16_value(scales[kBlock + lane]);
    for (int s = 0; s < w.group / columns; s++) {
      uint32_t codes;
      __builtin_memcpy(&codes, record + s * 64 + lane * 4, 4);
      for (int i = 0; i < columns; i++, codes >>= w.bits)
        *out++ = (float)((int)(codes & ((1u << w.bits) - 1)) - middle) * scale + zero;
    }
  }
}

void widen_all(const uint16_t* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = bf16_value(x[i]);
}

void narrow_all(const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = bf16_bits(x[i]);
}

} // namespace
} // namespace int4
