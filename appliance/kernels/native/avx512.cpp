// Variant `avx512`: AVX-512 F, BW and VL without a dot product instruction.
#include "vector512.h"

namespace int4 {
namespace {

struct Avx512 : Vector512 {
  static I dot(I acc, I a, I b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
};

} // namespace

const Variant kAvx512 = {
    "avx512", kHasAvx2 | kHasFma | kHasAvx512f | kHasAvx512bw | kHasAvx512vl, quantize_avx2, few<Avx512>,
    unpack<Avx512>, many<Avx512>, Avx512::kManyBlocks, Avx512::kManyRows, columns<Avx512>, channel, widen_all, narrow_all, norm_row, gate_row, head_row,
};

} // namespace int4
