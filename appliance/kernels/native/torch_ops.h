// torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h), found by name in the process: nothing of torch is
// needed to build. A boxed operator gets its arguments as 64-bit slots: a tensor handle that it owns, an integer, a
// double's or a bool's bits; it leaves its results in the same slots.
#pragma once
#include <stdint.h>
#include "variant.h"

namespace int4 {

using Slot64 = uint64_t;
using BoxedOp = void (*)(Slot64* stack, uint64_t inputs, uint64_t outputs);

struct Torch {
  using Handle = void*;
  int32_t (*get_data_ptr)(Handle, void**);
  int32_t (*get_dim)(Handle, int64_t*);
  int32_t (*get_sizes)(Handle, int64_t**);
  int32_t (*get_strides)(Handle, int64_t**);
  int32_t (*get_dtype)(Handle, int32_t*);
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*delete_tensor)(Handle);
  int32_t (*library_def)(const char*, const char*, uint32_t, Handle*);
  int32_t (*library_impl)(const char*, const char*, const char*, uint32_t, Handle*);
  int32_t (*define)(Handle, const char*);
  int32_t (*implement)(Handle, const char*, BoxedOp);
  int32_t f32, bf16, i64, u8, cpu;
};

// The functions found by int4_register_torch.
const Torch& torch();

// An argument or result tensor: its handle, freed with it unless released to the stack.
class Tensor {
 public:
  explicit Tensor(Slot64 handle);
  static Tensor empty(int64_t rows, int64_t columns, int32_t dtype);
  Tensor(Tensor&& other) noexcept;
  Tensor(const Tensor&) = delete;
  ~Tensor();
  Slot64 release();
  template <class T> T* data() const { return static_cast<T*>(data_); }
  int64_t dims() const { return dims_; }
  int64_t size(int i) const { return sizes_[i]; }
  int64_t stride(int i) const { return strides_[i]; }
  int32_t dtype() const { return dtype_; }
  bool empty_tensor() const { return dims_ == 1 && sizes_[0] == 0; }

 private:
  void read();
  void* handle_;
  void* data_;
  int64_t dims_, *sizes_, *strides_;
  int32_t dtype_;
};

// Throws std::runtime_error, which becomes RuntimeError in Python.
void check(bool fits, const char* what);

// The weight in `blob`, after checking that it is of this shape and that kernels take the shape.
Weight weight_of(const Tensor& blob, int64_t n, int64_t k, int64_t group, int64_t bits);

// A bf16 vector of `count`, or null for the empty tensor that stands for none.
const uint16_t* bf16_or_null(const Tensor& t, int64_t count);

inline double slot_double(Slot64 slot) {
  double value;
  __builtin_memcpy(&value, &slot, 8);
  return value;
}

// Operators of decoder.cpp.
struct OpEntry {
  const char* schema;
  const char* name;
  BoxedOp call;
};
extern const OpEntry kDecoderOps[];
extern const int kDecoderOpCount;

} // namespace int4
