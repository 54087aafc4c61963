// Drivers over the micro-kernels: quantize rows, multiply, on the threads of one region.
#pragma once
#include "team.h"
#include "variant.h"

namespace int4 {

// Many rows: those whose activations stay in the cache while all blocks pass; whole tiles of every variant.
constexpr int64_t kRowsChunk = 252;

// The variant in use: the best this CPU runs, or the one that APPLIANCE_KERNEL names. Decided at the first call.
const Variant& variant();

// Every variant of this build by index, the preferred one first, null past the end; CPU features found; switch to a
// variant that this machine runs (tests, benchmarks, self-test; never while another thread multiplies).
const Variant* variant_at(int index);
uint32_t features();
bool use_variant(const char* name);

// Scratch of this thread: grows, never shrinks, freed with the thread. 64-byte aligned; slots do not share memory.
enum Slot { kLinearSlot, kWideSlot, kGatherSlot, kTileSlot, kPanelSlot, kDecoderSlot = kPanelSlot + 3, kSlots = kDecoderSlot + 8 };
void* scratch(int slot, size_t bytes);

// Rows in scratch `slot` for m rows of a weight's shape.
Rows rows_in(int slot, int64_t m, int64_t k, int32_t group);

// Source or target of a multiplication.
struct Matrix {
  void* data;
  Type type;
  int64_t stride; // elements from row to row
};

// Within a region: quantize rows of x [m, k]; all members call it; ends without a barrier. `phase` as in Team::next.
void quantize_rows(const Member& me, int phase, const Matrix& x, int64_t m, const Weight& w, const Rows& out);

// Rows that one thread should quantize together: a tile, or one row where there are no tiles.
inline int64_t rows_of_unit(const Rows& out) { return out.tile ? out.tile : 1; }

// Groups from..from+groups of rows first..first+count; `first` begins a unit, count <= rows_of_unit. x.data is the first
// row's first column of that part.
void quantize_part(const Matrix& x, int64_t first, int64_t count, int64_t from, int64_t groups, const Weight& w,
                   const Rows& out);

// Within a region, after a barrier: y = (x * w^T) [+ bias bf16], or y += with `accumulate`. All members call it; ends
// without a barrier.
struct Product {
  const Weight& w;
  const Rows& x;
  int64_t m;
  Matrix y;
  const uint16_t* bias = nullptr;
  bool accumulate = false; // fp32 y only
};
void multiply(const Member& me, int phase, const Product& p);

// Threads worth using for m rows of this weight.
int threads_for(const Weight& w, int64_t m);

// The whole operation: one region.
void linear(const Weight& w, const Matrix& x, int64_t m, const Matrix& y, const uint16_t* bias = nullptr);

} // namespace int4
