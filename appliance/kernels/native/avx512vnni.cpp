// Variant `avx512-vnni`: AVX-512 F, BW and VL with the dot product of AVX-512-VNNI.
#include "vector512.h"

namespace int4 {
namespace {

struct Avx512Vnni : Vector512 {
  // Written out: around the intrinsic GCC 12 copies and spills accumulators in the inner loops.
  static I dot(I acc, I a, I b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
};

} // namespace

const Variant kAvx512Vnni = {
    "avx512-vnni",
    kHasAvx2 | kHasFma | kHasAvx512f | kHasAvx512bw | kHasAvx512vl | kHasAvx512vnni,
    quantize_avx2,
    few<Avx512Vnni>,
    unpack<Avx512Vnni>,
    many<Avx512Vnni>,
    Avx512Vnni::kManyBlocks, Avx512Vnni::kManyRows, columns<Avx512Vnni>,
    channel,
    widen_all,
    narrow_all,
    norm_row,
    gate_row,
    head_row,
};

} // namespace int4
