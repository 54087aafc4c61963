// One instruction set's micro-kernels: a table of functions. No allocation, no threads, no state, no globals.
//
// Layout `int4-b16-1` of a weight [N, K] with groups of g columns and b = 4 or 8 bits (docs/kernels.md): blocks of 16
// channels (zero channels pad N); a block is K/g records; a record is 16*g*b/8 bytes of codes, then 16 bf16 scales, then
// 16 bf16 zeros. Codes are dwords, one a channel: 8 codes of 4 bits (column 8s + i in bits 4i) or 4 codes of 8 bits.
// w = (code - 2^(b-1)) * scale + zero.
//
// Activations are int16 per (row, group): x ~ q * scale. They are stored in the order in which codes are unpacked to
// pairs: of 8 columns 0 4 1 5 2 6 3 7 for 4 bits and 0 2 1 3 4 6 5 7 for 8 bits. One dword = one pair.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace int4 {

constexpr int kBlock = 16;       // channels of a block
constexpr int kQuantMax = 32512; // |q| of the largest activation of a group
constexpr int kFewRows = 16;     // up to here weights are unpacked in registers, once for kRowsAtOnce rows

// CPU features a variant may need; all also need the operating system to keep the registers (XGETBV).
enum Feature : uint32_t {
  kHasAvx2 = 1, kHasFma = 2, kHasAvxVnni = 4, kHasAvx512f = 8, kHasAvx512bw = 16, kHasAvx512vl = 32, kHasAvx512vnni = 64,
};

enum Type : int32_t { kF32 = 0, kBF16 = 1 };

// A weight in the layout above.
struct Weight {
  const uint8_t* data;
  int64_t n, k;
  int32_t group, bits;
  int64_t groups() const { return k / group; }
  int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
  int64_t code_bytes() const { return (int64_t)kBlock * group * bits / 8; }
  int64_t record_bytes() const { return code_bytes() + 4 * kBlock; }
  int64_t block_bytes() const { return groups() * record_bytes(); }
  const uint8_t* block(int64_t b) const { return data + b * block_bytes(); }
};

// Quantized activations: scale [m, groups], sum [m, groups] (sum of q, times scale), and q: [m, k], or with `tile` > 0
// tiles of that many rows, each [k/2][tile] pairs. A tile is one run of memory: rows of a power of two apart would all
// fall into the same few lines of the cache.
struct Rows {
  int16_t* q;
  float* scale;
  float* sum;
  int64_t k, groups, tile;
};

struct Variant {
  const char* name;

  uint32_t needs; // CPU features, bits of Feature

  // One row x[k] to row `row` of `out` (not in tiles), in the order for `bits`. A group that holds NaN or Inf gets scale NaN.
  void (*quantize)(const float* x, int64_t row, int32_t group, int32_t bits, const Rows& out);

  // y[r][0..16) = rows first..first+count of x times one block, count <= kFewRows. Weights are read once from memory.
  void (*few)(const Weight& w, int64_t block, const Rows& x, int64_t first, int64_t count, float (*y)[kBlock]);

  // Codes of groups from..to of one block as int16 pairs: [(to-from)*group/2][16] dwords; scale and offset
  // (zero - 2^(b-1)*scale) as fp32 [to-from][16].
  void (*unpack)(const Weight& w, int64_t block, int64_t from, int64_t to, int16_t* codes, float* scale, float* offset);

  // y[r][0..16*many_blocks) += rows (in tiles of many_rows, `first` begins one) times unpacked blocks, over groups
  // from..to. Block b's codes begin at b*code_stride, its scales at b*scale_stride. Any row count.
  void (*many)(const int16_t* codes, const float* scale, const float* offset, int64_t code_stride, int64_t scale_stride,
               int32_t group, int64_t from, int64_t to, const Rows& x, int64_t first, int64_t count, float* y,
               int64_t y_stride);
  int32_t many_blocks, many_rows;

  // The weights of one block by column, for a library GEMM: out[c * stride + lane], c in 0..k.
  void (*columns)(const Weight& w, int64_t block, Type type, int64_t stride, void* out);

  // One channel of the weight, fp32 [k].
  void (*channel)(const Weight& w, int64_t channel, float* out);

  // bf16 to fp32 and back (round to nearest even, NaN kept), any length.
  void (*widen)(const uint16_t* x, int64_t count, float* out);
  void (*narrow)(const float* x, int64_t count, uint16_t* out);

  // Between the multiplications of a decoder layer (elementwise.h).
  void (*norm)(float* total, const float* add, const uint16_t* weight, float epsilon, int64_t count, float* out);
  void (*gate)(const float* gate, const float* up, int64_t count, float* out);
  void (*head)(float* x, const uint16_t* weight, float epsilon, const float* cos_sin, int64_t rotary, int64_t size,
               uint16_t* out);
};

// The variants of this build, the preferred one first; the last, scalar, runs everywhere.
extern const Variant kScalar, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni;

} // namespace int4
