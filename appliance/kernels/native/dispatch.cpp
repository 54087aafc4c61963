// Which variant runs here: CPUID says what the CPU has, XGETBV what the operating system keeps. APPLIANCE_KERNEL forces
// one that the machine can run.
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include "linear.h"

namespace int4 {
namespace {

const Variant* const kVariants[] = {&kAvx512Vnni, &kAvx512, &kAvxVnni, &kAvx2, &kScalar};

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}

uint32_t read_features() {
  uint32_t a, b, c, d, a7, b7, c7, d7, a71 = 0, ignored;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  const uint64_t state = enabled_state();
  if ((state & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return 0;
  if (a7 >= 1) __get_cpuid_count(7, 1, &a71, &ignored, &ignored, &ignored);
  uint32_t found = 0;
  if (b7 & (1u << 5)) found |= kHasAvx2;
  if (c & bit_FMA) found |= kHasFma;
  if (a71 & (1u << 4)) found |= kHasAvxVnni;
  if ((state & 0xe6) == 0xe6) {
    if (b7 & (1u << 16)) found |= kHasAvx512f;
    if (b7 & (1u << 30)) found |= kHasAvx512bw;
    if (b7 & (1u << 31)) found |= kHasAvx512vl;
    if (c7 & (1u << 11)) found |= kHasAvx512vnni;
  }
  return found;
}

const Variant* choose() {
  const uint32_t found = features();
  const char* wanted = getenv("APPLIANCE_KERNEL");
  if (wanted && *wanted)
    for (const Variant* v : kVariants)
      if (!strcmp(v->name, wanted) && (v->needs & ~found) == 0) return v;
  for (const Variant* v : kVariants)
    if ((v->needs & ~found) == 0) return v;
  return &kScalar;
}

const Variant* current = nullptr;

} // namespace

uint32_t features() {
  static const uint32_t found = read_features();
  return found;
}

const Variant* variant_at(int index) {
  return index >= 0 && index < (int)(sizeof kVariants / sizeof *kVariants) ? kVariants[index] : nullptr;
}

const Variant& variant() {
  if (!current) current = choose();
  return *current;
}

bool use_variant(const char* name) {
  for (const Variant* v : kVariants)
    if (!strcmp(v->name, name) && (v->needs & ~features()) == 0) {
      current = v;
      return true;
    }
  return false;
}

} // namespace int4
