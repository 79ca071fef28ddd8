// The threads of one call: they enter a parallel region once and meet at barriers between the operations.
//
// The cores are shared with an event loop, so nothing here waits by spinning alone: a thread that was pushed off its core would
// keep all others spinning for it, and off the core that it needs.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>

#include "simd.h"

namespace aengine {

// What the threads of a team share.
struct Team {
  alignas(64) std::atomic<i64> next_task{0};
  alignas(64) std::atomic<i32> arrived{0};
  alignas(64) std::atomic<u32> generation{0};
};

// One thread's view of its team. Every thread calls the same functions in the same order.
class Member {
 public:
  Member(Team& team, int index, int size) : team_(team), index_(index), size_(size) {}

  int index() const { return index_; }
  int size() const { return size_; }

  // Runs f(0) .. f(count - 1), each on whichever thread is free, and returns when all are done.
  template <class F>
  void each(i64 count, F&& f) const {
    for (i64 task; (task = team_.next_task.fetch_add(1, std::memory_order_relaxed)) < count;) f(task);
    barrier();
  }

  // Runs f(task, next) likewise; `next` is what this thread does after that, -1 for nothing, so that f can fetch for it.
  template <class F>
  void each_ahead(i64 count, F&& f) const {
    const auto claim = [&] { return team_.next_task.fetch_add(1, std::memory_order_relaxed); };
    for (i64 task = claim(); task < count;) {
      const i64 next = claim();
      f(task, next < count ? next : -1);
      task = next;
    }
    barrier();
  }

  // Runs f(begin, end) for runs of `run` out of `count` things.
  template <class F>
  void each_run(i64 count, i64 run, F&& f) const {
    each(ceil_div(count, run), [&](i64 task) { f(task * run, smaller(count, (task + 1) * run)); });
  }

 private:
  void barrier() const {
    const u32 generation = team_.generation.load(std::memory_order_relaxed);
    if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      team_.arrived.store(0, std::memory_order_relaxed);
      team_.next_task.store(0, std::memory_order_relaxed);
      team_.generation.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; team_.generation.load(std::memory_order_acquire) == generation;) {
      if (spins < SPINS_BEFORE_YIELDING) {
        spins++;
        pause();
      } else {
        sched_yield();
      }
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static constexpr int SPINS_BEFORE_YIELDING = 1000;  // some 15 us: longer than a barrier takes when nobody was pushed away
  Team& team_;
  int index_, size_;
};

// Runs body(member) on `threads` threads, or on as many as there are.
template <class Body>
void run_team(int threads, Body&& body) {
  Team team;
  if (threads <= 1) return body(Member(team, 0, 1));
#pragma omp parallel num_threads(threads)
  body(Member(team, omp_get_thread_num(), omp_get_num_threads()));
}

}  // namespace aengine
