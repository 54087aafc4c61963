#include "team.h"
#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>

namespace int4 {
namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread)() = nullptr;
  int (*threads)() = nullptr;
  int (*most)() = nullptr;
  int (*inside)() = nullptr;

  Runtime() {
    // torch has loaded its runtime already: a preloaded one is found by its symbol, else the library by its name.
    static const char* const kNames[] = {"libgomp.so.1", "libiomp5.so", "libomp.so"};
    void* handle = RTLD_DEFAULT;
    bool found = dlsym(handle, "GOMP_parallel") != nullptr;
    for (const char* name : kNames) {
      if (found) break;
      handle = dlopen(name, RTLD_NOLOAD | RTLD_NOW);
      found = handle != nullptr;
    }
    if (!found) return;
    thread = (int (*)())dlsym(handle, "omp_get_thread_num");
    threads = (int (*)())dlsym(handle, "omp_get_num_threads");
    most = (int (*)())dlsym(handle, "omp_get_max_threads");
    inside = (int (*)())dlsym(handle, "omp_in_parallel");
    if (thread && threads && most && inside) parallel = (decltype(parallel))dlsym(handle, "GOMP_parallel");
  }
};

const Runtime& runtime() {
  static const Runtime found;
  return found;
}

} // namespace

int Team::available() {
  const Runtime& r = runtime();
  return r.parallel && !r.inside() ? r.most() : 1;
}

void Team::entry(void* self) {
  Team& team = *static_cast<Team*>(self);
  const Runtime& r = runtime();
  const Member me{team, r.thread(), r.threads()};
  team.call_(team.body_, me);
}

void Team::start(int threads) {
  const Runtime& r = runtime();
  if (threads > 1 && r.parallel) {
    r.parallel(entry, this, (unsigned)threads, 0);
  } else {
    call_(body_, Member{*this, 0, 1});
  }
}

void Member::barrier() const {
  if (count == 1) return;
  std::atomic<int64_t>&arrived = team.arrived_.value, &phase = team.phase_.value;
  const int64_t mine = phase.load(std::memory_order_relaxed);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    arrived.store(0, std::memory_order_relaxed);
    phase.store(mine + 1, std::memory_order_release);
    return;
  }
  // Spin briefly; give the core away when another process holds the one that we wait for.
  for (int spins = 0; phase.load(std::memory_order_acquire) == mine; spins++) {
    if (spins < 4000) __builtin_ia32_pause();
    else sched_yield();
  }
}

} // namespace int4
