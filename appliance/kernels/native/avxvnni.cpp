// Variant `avx-vnni`: AVX2 with the 256-bit dot product of small cores (Alder Lake N and later).
#include "vector256.h"

namespace int4 {
namespace {

struct AvxVnni : Vector256 {
  // Written out: around the intrinsic GCC 12 copies and spills accumulators in the inner loops.
  static I dot(I acc, I a, I b) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
    return acc;
  }
};

} // namespace

const Variant kAvxVnni = {
    "avx-vnni", kHasAvx2 | kHasFma | kHasAvxVnni, quantize_avx2, few<AvxVnni>, unpack<AvxVnni>, many<AvxVnni>,
    AvxVnni::kManyBlocks, AvxVnni::kManyRows, columns<AvxVnni>, channel, widen_all, narrow_all, norm_row, gate_row, head_row,
};

} // namespace int4
