// The search of appliance/quantize/search.py for many groups: the same arithmetic in the same order, so that both give
// the same bits. One source for every CPU: the compiler makes a copy for each instruction set and picks one at load.
#include <cstdint>
#include <cstring>

namespace {

typedef float Lanes __attribute__((vector_size(64)));  // one lane is one group
typedef uint32_t Words __attribute__((vector_size(64)));
constexpr int kLanes = 16, kMaxGroup = 256;

#define INLINE static inline __attribute__((always_inline))
// Macros, because a function that returns such a vector has no fixed calling convention.
#define FILL(x) ((x) - Lanes{})
#define BF16(x) ((Lanes)((((Words)(x)) + 0x7fffu + (((Words)(x)) >> 16 & 1u)) & 0xffff0000u))

// Scale and zero of each lane, the zero also seen from the middle of the group.
struct Candidate {
  Lanes scale, zero, shifted;

  INLINE void set(Candidate& c, const Lanes& step, const Lanes& offset, const Lanes& centre) {
    const Lanes smallest = FILL(0x1p-126f);
    const Lanes bounded = step > smallest ? step : smallest;
    c.scale = BF16(bounded);
    c.zero = BF16(offset);
    c.shifted = c.zero - centre;
  }
};

// Error of each lane, and the sums of the least squares fit: codes, codes squared, codes times weights.
struct Sums {
  Lanes error, codes, squares, products;
};

template <bool kWeighted>
INLINE void measure(const Lanes* u, const float* counts, int group, float low, float high, const Candidate& c, Sums& out) {
  const Lanes lo = FILL(low), hi = FILL(high), shift = FILL(12582912.0f), inverse = 1.0f / c.scale;
  Sums s = {};
  for (int i = 0; i < group; i++) {
    Lanes q = (u[i] - c.shifted) * inverse;
    q = q > lo ? q : lo;
    q = q < hi ? q : hi;
    q = (q + shift) - shift;  // the nearest whole number, ties to even
    const Lanes d = (q * c.scale + c.shifted) - u[i];
    const Lanes counted = kWeighted ? q * counts[i] : q;
    s.error += kWeighted ? d * d * counts[i] : d * d;
    s.codes += counted;
    s.squares += counted * q;
    s.products += counted * u[i];
  }
  out = s;
}

template <bool kWeighted>
INLINE void search(const float* weights, const float* counts, int64_t groups, int group, int bits, const float* clips,
                   int count, int refine, float* scales, float* zeros) {
  float size = 0;
  for (int i = 0; i < group; i++) size += kWeighted ? counts[i] : 1.0f;
  const float low = -(float)(1 << (bits - 1)), high = (float)((1 << (bits - 1)) - 1), steps = (float)((1 << bits) - 1);
  Lanes u[kMaxGroup];
  for (int64_t base = 0; base < groups; base += kLanes) {
    const int lanes = groups - base < kLanes ? (int)(groups - base) : kLanes;
    Lanes scale, zero;
    for (int lane = 0; lane < kLanes; lane++) {
      const int64_t g = base + (lane < lanes ? lane : 0);  // lanes without a group repeat the first
      scale[lane] = scales[g], zero[lane] = zeros[g];
      for (int i = 0; i < group; i++) ((float*)u)[i * kLanes + lane] = weights[g * group + i];
    }
    Lanes first = u[0], last = u[0];
    for (int i = 1; i < group; i++) {
      first = u[i] < first ? u[i] : first;
      last = u[i] > last ? u[i] : last;
    }
    const Lanes centre = last * 0.5f + first * 0.5f, half = last * 0.5f - first * 0.5f;
    Lanes mean = {};
    for (int i = 0; i < group; i++) {
      u[i] -= centre;
      mean += kWeighted ? u[i] * counts[i] : u[i];
    }
    mean /= size;
    Candidate c, best;
    Sums sums;
    Candidate::set(c, scale, zero, centre);  // rounds nothing: both are bf16 already
    measure<kWeighted>(u, counts, group, low, high, c, sums);
    best = c;
    Lanes least = sums.error;
    for (int i = 0; i < count; i++) {
      const Lanes from = centre - half * clips[2 * i], to = centre + half * clips[2 * i + 1];
      const Lanes step = (to - from) / steps;
      Candidate::set(c, step, from - low * step, centre);
      for (int fit = 0;; fit++) {
        measure<kWeighted>(u, counts, group, low, high, c, sums);
        best.scale = sums.error < least ? c.scale : best.scale;
        best.zero = sums.error < least ? c.zero : best.zero;
        least = sums.error < least ? sums.error : least;
        if (fit == refine) break;
        const Lanes q = sums.codes / size;
        const Lanes slope = (sums.products - sums.codes * mean) / (sums.squares - sums.codes * q);
        Candidate::set(c, slope, (mean - q * slope) + centre, centre);
      }
    }
    for (int lane = 0; lane < lanes; lane++) scales[base + lane] = best.scale[lane], zeros[base + lane] = best.zero[lane];
  }
}

#ifdef __GLIBC__  // other C libraries cannot pick a copy at load
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void search_alike(const float* weights, int64_t groups, int group, int bits, const float* clips, int count, int refine,
                  float* scales, float* zeros) {
  search<false>(weights, nullptr, groups, group, bits, clips, count, refine, scales, zeros);
}

#ifdef __GLIBC__  // other C libraries cannot pick a copy at load
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void search_weighted(const float* weights, const float* counts, int64_t groups, int group, int bits, const float* clips,
                     int count, int refine, float* scales, float* zeros) {
  search<true>(weights, counts, groups, group, bits, clips, count, refine, scales, zeros);
}

}  // namespace

// weights [groups, group], group up to 256; counts [group]: how much an error in each column counts, or null; clips
// [count][2]; scales and zeros in and out.
extern "C" __attribute__((visibility("default"))) void int4_fit_groups(
    const float* weights, const float* counts, int64_t groups, int32_t group, int32_t bits, const float* clips,
    int32_t count, int32_t refine, float* scales, float* zeros) {
  if (counts)
    search_weighted(weights, counts, groups, group, bits, clips, count, refine, scales, zeros);
  else
    search_alike(weights, groups, group, bits, clips, count, refine, scales, zeros);
}
