// Variant `avx2`: AVX2 and FMA.
#include "vector256.h"

namespace int4 {
namespace {

struct Avx2 : Vector256 {
  static I dot(I acc, I a, I b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
};

} // namespace

const Variant kAvx2 = {
    "avx2", kHasAvx2 | kHasFma, quantize_avx2, few<Avx2>, unpack<Avx2>, many<Avx2>, Avx2::kManyBlocks, Avx2::kManyRows, columns<Avx2>, channel,
    widen_all, narrow_all, norm_row, gate_row, head_row,
};

} // namespace int4
