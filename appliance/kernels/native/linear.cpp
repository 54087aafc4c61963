#include "linear.h"
#include <stdlib.h>
#include <string.h>

namespace int4 {
namespace {

constexpr int64_t kPanelColumns = 1024; // many: columns unpacked at a time
constexpr int64_t kTileColumns = 256;   // many: columns of a tile that are quantized together
constexpr int64_t kPieceBytes = 96 << 10; // few: weights of one piece of work

struct Memory {
  void* data = nullptr;
  size_t bytes = 0;
  ~Memory() { free(data); }
};

int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// y[count][16] of rows first.. and block `b` to the output, with bias.
void store(const Product& p, int64_t b, int64_t first, int64_t count, const float* tile, int64_t tile_stride) {
  const int64_t channel = b * kBlock;
  const int channels = (int)(p.w.n - channel < kBlock ? p.w.n - channel : kBlock);
  for (int64_t r = 0; r < count; r++) {
    const float* from = tile + r * tile_stride;
    float sums[kBlock];
    for (int c = 0; c < channels; c++) sums[c] = from[c];
    if (p.bias) {
      float bias[kBlock];
      variant().widen(p.bias + channel, channels, bias);
      for (int c = 0; c < channels; c++) sums[c] += bias[c];
    }
    const int64_t at = (first + r) * p.y.stride + channel;
    if (p.y.type == kBF16) {
      variant().narrow(sums, channels, (uint16_t*)p.y.data + at);
    } else {
      float* to = (float*)p.y.data + at;
      if (p.accumulate) for (int c = 0; c < channels; c++) to[c] += sums[c];
      else for (int c = 0; c < channels; c++) to[c] = sums[c];
    }
  }
}

void multiply_few(const Member& me, int phase, const Product& p) {
  const int64_t blocks = p.w.blocks();
  int64_t piece = kPieceBytes / p.w.block_bytes();
  const int64_t share = (blocks + me.count * 4 - 1) / (me.count * 4);
  piece = piece > share ? share : piece < 1 ? 1 : piece;
  float tile[kFewRows][kBlock];
  for (int64_t at; (at = me.team.next(phase) * piece) < blocks;) {
    const int64_t stop = at + piece < blocks ? at + piece : blocks;
    for (int64_t b = at; b < stop; b++) {
      variant().few(p.w, b, p.x, 0, p.m, tile);
      store(p, b, 0, p.m, tile[0], kBlock);
    }
  }
}

void multiply_many(const Member& me, int phase, const Product& p) {
  const Variant& v = variant();
  const int64_t blocks = p.w.blocks(), at_once = v.many_blocks;
  const int64_t pieces = (blocks + at_once - 1) / at_once;
  const int64_t panel = kPanelColumns / p.w.group > 0 ? kPanelColumns / p.w.group : 1; // groups
  const int64_t code_stride = panel * p.w.group * kBlock, scale_stride = panel * kBlock;
  int16_t* codes = (int16_t*)scratch(kPanelSlot, at_once * code_stride * 2);
  float* scale = (float*)scratch(kPanelSlot + 1, 2 * at_once * scale_stride * 4);
  float* offset = scale + at_once * scale_stride;
  const int64_t y_stride = at_once * kBlock;
  float* tile = (float*)scratch(kPanelSlot + 2, kRowsChunk * y_stride * 4);
  const int64_t chunks = (p.m + kRowsChunk - 1) / kRowsChunk;
  for (int64_t at; (at = me.team.next(phase)) < pieces * chunks;) {
    const int64_t first = at / pieces * kRowsChunk, b = at % pieces * at_once;
    const int64_t rows = p.m - first < kRowsChunk ? p.m - first : kRowsChunk;
    const int64_t count = blocks - b < at_once ? blocks - b : at_once;
    memset(tile, 0, rows * y_stride * 4);
    for (int64_t from = 0; from < p.x.groups; from += panel) {
      const int64_t to = from + panel < p.x.groups ? from + panel : p.x.groups;
      for (int64_t i = 0; i < count; i++)
        v.unpack(p.w, b + i, from, to, codes + i * code_stride, scale + i * scale_stride, offset + i * scale_stride);
      // A missing last block multiplies what the scratch holds; its columns are not stored.
      v.many(codes, scale, offset, code_stride, scale_stride, p.w.group, from, to, p.x, first, rows, tile, y_stride);
    }
    for (int64_t i = 0; i < count; i++) store(p, b + i, first, rows, tile + i * kBlock, y_stride);
  }
}

} // namespace

void* scratch(int slot, size_t bytes) {
  static thread_local Memory memory[kSlots];
  Memory& m = memory[slot];
  if (m.bytes < bytes) {
    free(m.data);
    m.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    if (posix_memalign(&m.data, 64, m.bytes)) abort();
    memset(m.data, 0, m.bytes);
  }
  return m.data;
}

Rows rows_in(int slot, int64_t m, int64_t k, int32_t group) {
  const int64_t tile = variant().many_rows, groups = k / group;
  const int64_t q = up(up(m, tile) * k * 2, 64), s = up(m * groups * 4, 64);
  char* data = (char*)scratch(slot, q + 2 * s);
  return {(int16_t*)data, (float*)(data + q), (float*)(data + q + s), k, groups, m > kFewRows ? tile : 0};
}

void quantize_part(const Matrix& x, int64_t first, int64_t count, int64_t from, int64_t groups, const Weight& w,
                   const Rows& out) {
  const Variant& v = variant();
  const int64_t at_once = out.tile && kTileColumns / w.group > 0 ? kTileColumns / w.group : out.tile ? 1 : groups;
  float* wide = (float*)scratch(kWideSlot, at_once * w.group * 4);
  int16_t* side = out.tile ? (int16_t*)scratch(kTileSlot, out.tile * at_once * w.group * 2) : nullptr;
  for (int64_t g = 0; g < groups; g += at_once) {
    const int64_t some = groups - g < at_once ? groups - g : at_once, columns = some * w.group;
    for (int64_t r = 0; r < count; r++) {
      const float* source = (const float*)x.data + r * x.stride + g * w.group;
      if (x.type == kBF16) {
        v.widen((const uint16_t*)x.data + r * x.stride + g * w.group, columns, wide);
        source = wide;
      }
      const int64_t at = (first + r) * out.groups + from + g;
      int16_t* q = out.tile ? side + r * columns : out.q + (first + r) * out.k + (from + g) * w.group;
      v.quantize(source, 0, w.group, w.bits, {q, out.scale + at, out.sum + at, columns, some, 0});
    }
    if (!out.tile) continue;
    int32_t* pairs = (int32_t*)(out.q + first * out.k + (from + g) * w.group * out.tile);
    for (int64_t c = 0; c < columns / 2; c++, pairs += out.tile)
      for (int64_t r = 0; r < count; r++) memcpy(pairs + r, side + r * columns + 2 * c, 4);
  }
}

void quantize_rows(const Member& me, int phase, const Matrix& x, int64_t m, const Weight& w, const Rows& out) {
  const int64_t unit = rows_of_unit(out), width = x.type == kBF16 ? 2 : 4;
  for (int64_t at; (at = me.team.next(phase) * unit) < m;) {
    const Matrix rows{(char*)x.data + at * x.stride * width, x.type, x.stride};
    quantize_part(rows, at, m - at < unit ? m - at : unit, 0, out.groups, w, out);
  }
}

void multiply(const Member& me, int phase, const Product& p) {
  if (p.m <= kFewRows) multiply_few(me, phase, p);
  else multiply_many(me, phase, p);
}

int threads_for(const Weight& w, int64_t m) {
  // Below about 64 KB of weights and one row, starting a second thread costs more than it saves.
  const int most = Team::available();
  const int64_t work = w.blocks() * w.block_bytes() * m / (32 << 10);
  return work < 1 ? 1 : work < most ? (int)work : most;
}

void linear(const Weight& w, const Matrix& x, int64_t m, const Matrix& y, const uint16_t* bias) {
  if (m == 0 || w.n == 0) return;
  const Rows rows = rows_in(kLinearSlot, m, w.k, w.group);
  auto body = [&](const Member& me) {
    quantize_rows(me, 0, x, m, w, rows);
    me.barrier();
    multiply(me, 1, {w, rows, m, y, bias, false});
  };
  Team::run(threads_for(w, m), body);
}

} // namespace int4
