// Threads: the OpenMP runtime that the process already has, found by name. The library links none: two runtimes in one
// process fight for the cores. Without one everything runs on the calling thread.
#pragma once
#include <atomic>
#include <stdint.h>

namespace int4 {

class Team;

// Inside a parallel region: who am I. `barrier` waits for all; `next` hands out work items 0..count in order.
struct Member {
  Team& team;
  int id, count;
  void barrier() const;
};

class Team {
 public:
  // Threads to use at most: what the runtime would use.
  static int available();

  // body(member) on `threads` threads (fewer if the runtime gives fewer).
  template <class Body>
  static void run(int threads, Body& body) {
    Team team;
    team.call_ = [](void* b, const Member& m) { (*static_cast<Body*>(b))(m); };
    team.body_ = &body;
    team.start(threads);
  }

  // The next piece of work of `phase` (0..7), counted from 0: pieces are handed out once each, in order.
  int64_t next(int phase) { return next_[phase].value.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend struct Member;
  void start(int threads);
  static void entry(void* team);
  struct alignas(64) Counter { std::atomic<int64_t> value{0}; };
  void (*call_)(void*, const Member&) = nullptr;
  void* body_ = nullptr;
  Counter next_[8];
  Counter arrived_, phase_;
  int count_ = 1;
};

} // namespace int4
