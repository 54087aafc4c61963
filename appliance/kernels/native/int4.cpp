#include "int4.h"
#include "linear.h"

using namespace int4;

namespace {
constexpr int64_t kAlone = 32 << 10;  // numbers looked up that are not worth a second thread
}

int32_t int4_abi(void) { return INT4_ABI; }

const char* int4_variant_name(int32_t index) {
  const Variant* v = variant_at(index);
  return v ? v->name : nullptr;
}

int32_t int4_variant_runs(int32_t index) {
  const Variant* v = variant_at(index);
  return v && (v->needs & ~features()) == 0;
}

const char* int4_variant(void) { return variant().name; }

int32_t int4_use(const char* name) { return use_variant(name); }

void int4_linear(const uint8_t* w, int64_t n, int64_t k, int32_t group, int32_t bits, const void* x, int32_t x_type,
                 int64_t x_stride, int64_t m, void* y, int32_t y_type, int64_t y_stride, const uint16_t* bias) {
  linear({w, n, k, group, bits}, {const_cast<void*>(x), (Type)x_type, x_stride}, m, {y, (Type)y_type, y_stride}, bias);
}

void int4_rows(const uint8_t* w, int64_t n, int64_t k, int32_t group, int32_t bits, const int64_t* ids, int64_t count,
               void* out, int32_t out_type) {
  const Weight weight{w, n, k, group, bits};
  const Variant& v = variant();
  auto body = [&](const Member& me) {
    float* wide = (float*)scratch(kWideSlot, k * 4);
    for (int64_t i; (i = me.team.next(0)) < count;) {
      float* row = out_type == kF32 ? (float*)out + i * k : wide;
      if (ids[i] >= 0 && ids[i] < n) v.channel(weight, ids[i], row);
      else __builtin_memset(row, 0, k * 4);
      if (out_type == kBF16) v.narrow(wide, k, (uint16_t*)out + i * k);
    }
  };
  Team::run(count * k > kAlone ? Team::available() : 1, body);
}
