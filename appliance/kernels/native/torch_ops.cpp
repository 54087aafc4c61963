// Registration of all operators, and those of single weights: cpu_int4::linear, rows, columns.
#include "torch_ops.h"
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include "int4.h"
#include "linear.h"

namespace int4 {
namespace {

Torch functions;

// Rows of x with a column stride other than 1, side by side.
template <class T>
void gather(const Tensor& x, T* out) {
  for (int64_t r = 0; r < x.size(0); r++)
    for (int64_t c = 0; c < x.size(1); c++) *out++ = x.data<T>()[r * x.stride(0) + c * x.stride(1)];
}

// linear(Tensor x, Tensor weight, Tensor bias, int n, int k, int group, int bits, bool wide) -> Tensor
void linear_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor x(stack[0]), weight(stack[1]), bias(stack[2]);
  const Weight w = weight_of(weight, (int64_t)stack[3], (int64_t)stack[4], (int64_t)stack[5], (int64_t)stack[6]);
  const bool wide = (stack[7] & 0xff) != 0;
  const bool f32 = x.dtype() == torch().f32;
  check(x.dims() == 2 && x.size(1) == w.k && (f32 || x.dtype() == torch().bf16), "cpu_int4::linear wants fp32 or bf16 [M, K]");
  const uint16_t* added = bf16_or_null(bias, w.n);
  const int64_t m = x.size(0);
  Matrix source{x.data<void>(), f32 ? kF32 : kBF16, x.stride(0)};
  if (m > 0 && x.stride(1) != 1) {
    source = {scratch(kGatherSlot, m * w.k * 4), source.type, w.k};
    if (f32) gather(x, (float*)source.data);
    else gather(x, (uint16_t*)source.data);
  }
  Tensor y = Tensor::empty(m, w.n, wide ? torch().f32 : torch().bf16);
  linear(w, source, m, {y.data<void>(), wide ? kF32 : kBF16, w.n}, added);
  stack[0] = y.release();
}

// rows(Tensor ids, Tensor weight, int n, int k, int group, int bits, bool wide) -> Tensor
void rows_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor ids(stack[0]), weight(stack[1]);
  const Weight w = weight_of(weight, (int64_t)stack[2], (int64_t)stack[3], (int64_t)stack[4], (int64_t)stack[5]);
  const bool wide = (stack[6] & 0xff) != 0;
  check(ids.dims() == 1 && ids.dtype() == torch().i64 && (ids.size(0) <= 1 || ids.stride(0) == 1),
        "cpu_int4::rows wants contiguous int64 ids [T]");
  Tensor out = Tensor::empty(ids.size(0), w.k, wide ? torch().f32 : torch().bf16);
  int4_rows(w.data, w.n, w.k, w.group, w.bits, ids.data<int64_t>(), ids.size(0), out.data<void>(), wide ? kF32 : kBF16);
  stack[0] = out.release();
}

// columns(Tensor weight, int n, int k, int group, int bits, int first, int blocks, bool wide) -> Tensor
void columns_op(Slot64* stack, uint64_t, uint64_t) {
  Tensor weight(stack[0]);
  const Weight w = weight_of(weight, (int64_t)stack[1], (int64_t)stack[2], (int64_t)stack[3], (int64_t)stack[4]);
  const int64_t first = (int64_t)stack[5], blocks = (int64_t)stack[6];
  const Type type = (stack[7] & 0xff) ? kF32 : kBF16;
  check(first >= 0 && blocks >= 0 && first + blocks <= w.blocks(), "cpu_int4::columns: the weight has no such blocks");
  Tensor out = Tensor::empty(w.k, blocks * kBlock, type == kF32 ? torch().f32 : torch().bf16);
  auto body = [&](const Member& me) {
    for (int64_t b; (b = me.team.next(0)) < blocks;)
      variant().columns(w, first + b, type, blocks * kBlock, out.data<char>() + b * kBlock * (type == kF32 ? 4 : 2));
  };
  Team::run(blocks > 1 ? Team::available() : 1, body);
  stack[0] = out.release();
}

const OpEntry kOps[] = {
    {"linear(Tensor x, Tensor weight, Tensor bias, int n, int k, int group, int bits, bool wide) -> Tensor", "linear",
     linear_op},
    {"rows(Tensor ids, Tensor weight, int n, int k, int group, int bits, bool wide) -> Tensor", "rows", rows_op},
    {"columns(Tensor weight, int n, int k, int group, int bits, int first, int blocks, bool wide) -> Tensor", "columns",
     columns_op},
};

template <class F>
bool find(void* library, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(library, name));
  return out != nullptr;
}

bool find_dtype(void* library, const char* name, int32_t& out) {
  int32_t (*get)() = nullptr;
  if (find(library, name, get)) out = get();
  return get != nullptr;
}

bool find_all(void* t, Torch& f) {
  return find(t, "aoti_torch_get_data_ptr", f.get_data_ptr) && find(t, "aoti_torch_get_dim", f.get_dim) &&
         find(t, "aoti_torch_get_sizes", f.get_sizes) && find(t, "aoti_torch_get_strides", f.get_strides) &&
         find(t, "aoti_torch_get_dtype", f.get_dtype) && find(t, "aoti_torch_empty_strided", f.empty_strided) &&
         find(t, "aoti_torch_delete_tensor_object", f.delete_tensor) &&
         find(t, "aoti_torch_library_init_def", f.library_def) &&
         find(t, "aoti_torch_library_init_impl", f.library_impl) && find(t, "aoti_torch_library_def", f.define) &&
         find(t, "aoti_torch_library_impl", f.implement) && find_dtype(t, "aoti_torch_dtype_float32", f.f32) &&
         find_dtype(t, "aoti_torch_dtype_bfloat16", f.bf16) && find_dtype(t, "aoti_torch_dtype_int64", f.i64) &&
         find_dtype(t, "aoti_torch_dtype_uint8", f.u8) && find_dtype(t, "aoti_torch_device_type_cpu", f.cpu);
}

const char* add(void* define, void* implement, const OpEntry& op) {
  if (functions.define(define, op.schema)) return "torch does not take an operator's schema";
  if (functions.implement(implement, op.name, op.call)) return "torch does not take an operator";
  return nullptr;
}

const char* register_all() {
  void* t = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW);
  if (!t) return "libtorch_cpu.so is not loaded in this process";
  variant();  // decided now, by one thread
  if (!find_all(t, functions)) return "this torch lacks functions of the C interface (torch 2.13 has them)";
  void *define, *implement;  // live as long as the process
  if (functions.library_def("cpu_int4", __FILE__, __LINE__, &define) ||
      functions.library_impl("cpu_int4", "CPU", __FILE__, __LINE__, &implement))
    return "torch does not take the operator library cpu_int4";
  for (const OpEntry& op : kOps)
    if (const char* reason = add(define, implement, op)) return reason;
  for (int i = 0; i < kDecoderOpCount; i++)
    if (const char* reason = add(define, implement, kDecoderOps[i])) return reason;
  return nullptr;
}

} // namespace

const Torch& torch() { return functions; }

void check(bool fits, const char* what) {
  if (!fits) throw std::runtime_error(what);
}

Weight weight_of(const Tensor& blob, int64_t n, int64_t k, int64_t group, int64_t bits) {
  check((bits == 4 || bits == 8) && (group == 32 || group == 64 || group == 128 || group == 256) && n >= 0 && k > 0 &&
            k % group == 0,
        "cpu_int4: no kernel takes a weight of this shape");
  const Weight w{blob.data<uint8_t>(), n, k, (int32_t)group, (int32_t)bits};
  check(blob.dims() == 1 && blob.dtype() == torch().u8 && blob.size(0) == w.blocks() * w.block_bytes(),
        "cpu_int4: a weight is not of its layer's shape");
  return w;
}

const uint16_t* bf16_or_null(const Tensor& t, int64_t count) {
  if (t.empty_tensor()) return nullptr;
  check(t.dtype() == torch().bf16 && t.dims() == 1 && t.size(0) == count && (count <= 1 || t.stride(0) == 1),
        "cpu_int4: a norm's weight or a bias is not bf16 of its layer's width");
  return t.data<uint16_t>();
}

Tensor::Tensor(Slot64 handle) : handle_(reinterpret_cast<void*>(handle)) { read(); }

Tensor::Tensor(Tensor&& other) noexcept : handle_(other.handle_) {
  other.handle_ = nullptr;
  read();
}

Tensor::~Tensor() {
  if (handle_) functions.delete_tensor(handle_);
}

void Tensor::read() {
  functions.get_data_ptr(handle_, &data_);
  functions.get_dim(handle_, &dims_);
  functions.get_sizes(handle_, &sizes_);
  functions.get_strides(handle_, &strides_);
  functions.get_dtype(handle_, &dtype_);
}

Tensor Tensor::empty(int64_t rows, int64_t columns, int32_t dtype) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
  void* handle = nullptr;
  if (functions.empty_strided(2, sizes, strides, dtype, functions.cpu, 0, &handle))
    throw std::runtime_error("cpu_int4: no memory for a result");
  return Tensor(reinterpret_cast<Slot64>(handle));
}

Slot64 Tensor::release() {
  const Slot64 slot = reinterpret_cast<Slot64>(handle_);
  handle_ = nullptr;
  return slot;
}

} // namespace int4

const char* int4_register_torch(void) {
  static const char* const result = int4::register_all();
  return result;
}
