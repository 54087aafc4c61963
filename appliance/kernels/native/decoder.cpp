// Fused operators of a decoder layer: cpu_int4::norm_qkv before attention, cpu_int4::out_mlp after it, and cpu_int4::norm
// at the end. The residual stream is fp32.
//
// One parallel region for each kRowsChunk rows, barriers inside; scratch is bounded by those rows. Work that has one
// cost for every piece is divided beforehand, multiplications are handed out. Any number of threads gives the same bits.
#include "linear.h"
#include "torch_ops.h"

namespace int4 {
namespace {

constexpr int64_t kGateColumns = 512;
enum : int { kRowsSlot = kDecoderSlot, kNarrowSlot, kActiveSlot, kProductSlot, kNormSlot };

// This member's share of `count` equal pieces. A single piece is the first member's, which is awake already.
struct Share {
  int64_t from, to;
  Share(const Member& me, int64_t count) : from(bound(me, count, me.id)), to(bound(me, count, me.id + 1)) {}
  static int64_t bound(const Member& me, int64_t count, int id) { return (count * id + me.count - 1) / me.count; }
};

void check_rows(const Tensor& t, int32_t dtype, int64_t rows, int64_t columns) {
  check(t.dtype() == dtype && t.dims() == 2 && t.size(0) == rows && t.size(1) == columns &&
            (rows == 0 || t.stride(1) == 1) && (rows <= 1 || t.stride(0) == columns),
        "cpu_int4: activations are not dense rows of the layer's width");
}

struct Norm {
  const uint16_t* weight;
  float epsilon;
};

// Rows of the residual stream, after `add`, normalized and quantized for w.
void norm_rows(const Member& me, float* residual, const float* add, const Norm& norm, int64_t m, const Weight& w,
               const Rows& out) {
  const int64_t unit = rows_of_unit(out);
  float* wide = (float*)scratch(kNormSlot, unit * w.k * 4);
  const Share mine(me, (m + unit - 1) / unit);
  for (int64_t at = mine.from * unit; at < mine.to * unit && at < m; at += unit) {
    const int64_t rows = m - at < unit ? m - at : unit;
    for (int64_t r = 0; r < rows; r++)
      variant().norm(residual + (at + r) * w.k, add ? add + (at + r) * w.k : nullptr, norm.weight, norm.epsilon, w.k,
                     wide + r * w.k);
    quantize_part({wide, kF32, w.k}, at, rows, 0, out.groups, w, out);
  }
}

struct Heads {
  int64_t query, key, size, rotary, positions;
  const float* cos_sin;  // [positions, rotary]
  Norm query_norm, key_norm;
  int64_t all() const { return query + 2 * key; }
};

void finish_heads(const Member& me, const Heads& h, const int64_t* positions, float* product, int64_t m,
                  uint16_t* out) {
  static const Norm kNone{nullptr, 0};
  const Share mine(me, m * h.all());
  for (int64_t i = mine.from; i < mine.to; i++) {
    const int64_t head = i % h.all();
    const bool value = head >= h.query + h.key;
    const Norm& norm = head < h.query ? h.query_norm : value ? kNone : h.key_norm;
    const float* angles = value ? nullptr : h.cos_sin + positions[i / h.all()] * h.rotary;
    variant().head(product + i * h.size, norm.weight, norm.epsilon, angles, h.rotary, h.size, out + i * h.size);
  }
}

// norm_qkv(Tensor hidden, Tensor(a!) residual, Tensor norm, float eps, Tensor weight, int group, Tensor bias,
//          Tensor q_norm, Tensor k_norm, float qk_eps, Tensor positions, Tensor cos_sin, int query_heads, int key_heads,
//          Tensor(b!) qkv) -> ()
void norm_qkv_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor hidden(stack[0]), residual(stack[1]), norm(stack[2]), blob(stack[4]), bias(stack[6]), q_norm(stack[7]),
      k_norm(stack[8]), positions(stack[10]), cos_sin(stack[11]), qkv(stack[14]);
  check(residual.dims() == 2 && qkv.dims() == 2 && cos_sin.dims() == 2, "cpu_int4::norm_qkv: a tensor has not two dimensions");
  const int64_t m = residual.size(0), k = residual.size(1), n = qkv.size(1);
  Heads heads{(int64_t)stack[12], (int64_t)stack[13], 0, cos_sin.size(1), cos_sin.size(0), cos_sin.data<float>(), {}, {}};
  check(heads.query > 0 && heads.key > 0 && n % heads.all() == 0, "cpu_int4::norm_qkv: the heads do not divide the channels");
  heads.size = n / heads.all();
  const float qk_epsilon = (float)slot_double(stack[9]);
  heads.query_norm = {bf16_or_null(q_norm, heads.size), qk_epsilon};
  heads.key_norm = {bf16_or_null(k_norm, heads.size), qk_epsilon};
  check_rows(residual, torch().f32, m, k);
  check_rows(qkv, torch().bf16, m, n);
  check_rows(cos_sin, torch().f32, heads.positions, heads.rotary);
  const bool first = hidden.empty_tensor();
  if (!first) check_rows(hidden, torch().f32, m, k);
  check(heads.rotary <= heads.size && heads.rotary % 2 == 0 && positions.dtype() == torch().i64 &&
            positions.dims() == 1 && positions.size(0) == m && (m <= 1 || positions.stride(0) == 1),
        "cpu_int4::norm_qkv: positions or rotary columns do not fit");
  const int64_t* at = positions.data<int64_t>();
  for (int64_t r = 0; r < m; r++) check(at[r] >= 0 && at[r] < heads.positions, "cpu_int4::norm_qkv: a position is too large");
  const Weight w = weight_of(blob, n, k, (int64_t)stack[5], 4);
  const Norm before{bf16_or_null(norm, k), (float)slot_double(stack[3])};
  check(before.weight, "cpu_int4::norm_qkv wants a norm");
  const uint16_t* added = bf16_or_null(bias, n);

  for (int64_t from = 0; from < m; from += kRowsChunk) {
    const int64_t rows = m - from < kRowsChunk ? m - from : kRowsChunk;
    const Rows x = rows_in(kRowsSlot, rows, k, w.group);
    float* product = (float*)scratch(kProductSlot, rows * n * 4);
    auto body = [&](const Member& me) {
      norm_rows(me, residual.data<float>() + from * k, first ? nullptr : hidden.data<float>() + from * k, before, rows, w, x);
      me.barrier();
      multiply(me, 0, {w, x, rows, {product, kF32, n}, added});
      me.barrier();
      finish_heads(me, heads, at + from, product, rows, qkv.data<uint16_t>() + from * n);
    };
    Team::run(threads_for(w, rows), body);
  }
}

struct Mlp {
  Weight out, gate_up, down;
  Norm norm;
};

// silu(gate) * up of product [m, 2 * inner], quantized for w: divided by groups of columns of units of rows.
void gate_rows(const Member& me, const float* product, int64_t m, const Weight& w, const Rows& out) {
  const int64_t unit = rows_of_unit(out), most = unit > 1 && kGateColumns > w.group ? kGateColumns / w.group : out.groups;
  float* wide = (float*)scratch(kNormSlot, unit * most * w.group * 4);
  const Share mine(me, (m + unit - 1) / unit * out.groups);
  for (int64_t at = mine.from, count; at < mine.to; at += count) {
    const int64_t row = at / out.groups * unit, first = at % out.groups, left = mine.to - at;
    count = out.groups - first < left ? out.groups - first : left;
    if (count > most) count = most;
    const int64_t rows = m - row < unit ? m - row : unit, columns = count * w.group;
    for (int64_t r = 0; r < rows; r++) {
      const float* gate = product + (row + r) * 2 * w.k + first * w.group;
      variant().gate(gate, gate + w.k, columns, wide + r * columns);
    }
    quantize_part({wide, kF32, columns}, row, rows, first, count, w, out);
  }
}

void out_mlp_rows(const Mlp& l, const uint16_t* attention, float* residual, int64_t m, float* hidden) {
  const int64_t k = l.out.n, inner = l.down.k;
  const Rows x = rows_in(kRowsSlot, m, l.out.k, l.out.group);
  const Rows narrow = rows_in(kNarrowSlot, m, k, l.gate_up.group);
  const Rows active = rows_in(kActiveSlot, m, inner, l.down.group);
  float* product = (float*)scratch(kProductSlot, m * 2 * inner * 4);
  auto body = [&](const Member& me) {
    quantize_rows(me, 0, {const_cast<uint16_t*>(attention), kBF16, l.out.k}, m, l.out, x);
    me.barrier();
    multiply(me, 1, {l.out, x, m, {residual, kF32, k}, nullptr, true});
    me.barrier();
    norm_rows(me, residual, nullptr, l.norm, m, l.gate_up, narrow);
    me.barrier();
    multiply(me, 2, {l.gate_up, narrow, m, {product, kF32, 2 * inner}});
    me.barrier();
    gate_rows(me, product, m, l.down, active);
    me.barrier();
    multiply(me, 3, {l.down, active, m, {hidden, kF32, k}});
  };
  Team::run(threads_for(l.gate_up, m), body);
}

// out_mlp(Tensor attention, Tensor(a!) residual, Tensor out, int out_group, Tensor norm, float eps, Tensor gate_up,
//         int gate_up_group, Tensor down, int down_group, int inner, Tensor(b!) hidden) -> ()
void out_mlp_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor attention(stack[0]), residual(stack[1]), out(stack[2]), norm(stack[4]), gate_up(stack[6]), down(stack[8]),
      hidden(stack[11]);
  check(residual.dims() == 2 && attention.dims() == 2, "cpu_int4::out_mlp: a tensor has not two dimensions");
  const int64_t m = residual.size(0), k = residual.size(1), inner = (int64_t)stack[10];
  check_rows(residual, torch().f32, m, k);
  check_rows(hidden, torch().f32, m, k);
  check_rows(attention, torch().bf16, m, attention.size(1));
  const Mlp layer{weight_of(out, k, attention.size(1), (int64_t)stack[3], 4),
                  weight_of(gate_up, 2 * inner, k, (int64_t)stack[7], 4), weight_of(down, k, inner, (int64_t)stack[9], 4),
                  {bf16_or_null(norm, k), (float)slot_double(stack[5])}};
  check(layer.norm.weight, "cpu_int4::out_mlp wants a norm");
  for (int64_t from = 0; from < m; from += kRowsChunk)
    out_mlp_rows(layer, attention.data<uint16_t>() + from * layer.out.k, residual.data<float>() + from * k,
                 m - from < kRowsChunk ? m - from : kRowsChunk, hidden.data<float>() + from * k);
}

// norm(Tensor hidden, Tensor(a!) residual, Tensor norm, float eps) -> Tensor
void norm_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor hidden(stack[0]), residual(stack[1]), weight(stack[2]);
  check(residual.dims() == 2, "cpu_int4::norm: the residual has not two dimensions");
  const int64_t m = residual.size(0), k = residual.size(1);
  const float epsilon = (float)slot_double(stack[3]);
  check_rows(residual, torch().f32, m, k);
  check_rows(hidden, torch().f32, m, k);
  const uint16_t* scale = bf16_or_null(weight, k);
  check(scale, "cpu_int4::norm wants a weight");
  Tensor out = Tensor::empty(m, k, torch().f32);
  auto body = [&](const Member& me) {
    const Share mine(me, m);
    for (int64_t r = mine.from; r < mine.to; r++)
      variant().norm(residual.data<float>() + r * k, hidden.data<float>() + r * k, scale, epsilon, k,
                     out.data<float>() + r * k);
  };
  Team::run(m >= kFewRows ? Team::available() : 1, body);
  stack[0] = out.release();
}

} // namespace

const OpEntry kDecoderOps[] = {
    {"norm_qkv(Tensor hidden, Tensor(a!) residual, Tensor norm, float eps, Tensor weight, int group, Tensor bias, "
     "Tensor q_norm, Tensor k_norm, float qk_eps, Tensor positions, Tensor cos_sin, int query_heads, int key_heads, "
     "Tensor(b!) qkv) -> ()",
     "norm_qkv", norm_qkv_op},
    {"out_mlp(Tensor attention, Tensor(a!) residual, Tensor out, int out_group, Tensor norm, float eps, "
     "Tensor gate_up, int gate_up_group, Tensor down, int down_group, int inner, Tensor(b!) hidden) -> ()",
     "out_mlp", out_mlp_op},
    {"norm(Tensor hidden, Tensor(a!) residual, Tensor norm, float eps) -> Tensor", "norm", norm_op},
};
const int kDecoderOpCount = sizeof kDecoderOps / sizeof *kDecoderOps;

} // namespace int4
