// The threads of one call, a team: each runs the same operations and takes the next free task of each operation.
//
// The cores are shared with Python threads, so nothing depends on how many threads take part: an operation is finished when its tasks are
// done, also if a thread starts late, is preempted or never starts. After a while a thread that waits yields its core instead of spinning.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "simd.h"

namespace aengine {

// What the threads of a team share: counts of the tasks of all operations so far. They only grow, so that a thread which is behind sees
// that an operation is finished.
struct Team {
  alignas(64) std::atomic<i64> taken{0};
  alignas(64) std::atomic<i64> done{0};
};

inline void pause_spinning() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int SPINS_BEFORE_YIELDING = 1000;  // some 15 us: longer than it takes unless a thread was preempted

// Waits for `condition()`, which is expected soon.
template <class Condition>
void spin_until(Condition&& condition, int most_spins = SPINS_BEFORE_YIELDING) {
  for (int spins = 0; !condition();) {
    if (spins < most_spins) {
      spins++;
      pause_spinning();
    } else {
      sched_yield();
    }
  }
}

// One thread of a team. Every thread calls the same functions in the same order.
class Member {
 public:
  Member(Team& team, int index, int size) : team_(team), index_(index), size_(size) {}

  int index() const { return index_; }
  int size() const { return size_; }  // the most threads that take part

  // Runs f(0) .. f(count - 1), each on whichever thread is free, and returns when all are done.
  template <class F>
  void each(i64 count, F&& f) const {
    i64 mine = 0;
    for (i64 task; (task = take(count)) >= 0; mine++) f(task);
    finish(count, mine);
  }

  // Runs f(task, next) likewise; `next` is what this thread does after that, -1 for nothing, so that f can prefetch for it.
  template <class F>
  void each_ahead(i64 count, F&& f) const {
    i64 mine = 0;
    for (i64 task = take(count); task >= 0; mine++) {
      const i64 next = take(count);
      f(task, next);
      task = next;
    }
    finish(count, mine);
  }

  // Runs f(begin, end) for runs of `run` out of `count` things.
  template <class F>
  void each_run(i64 count, i64 run, F&& f) const {
    each(ceil_div(count, run), [&](i64 task) { f(task * run, smaller(count, (task + 1) * run)); });
  }

 private:
  // One of the `count` tasks of this operation, -1 when all are taken.
  i64 take(i64 count) const {
    i64 next = team_.taken.load(std::memory_order_relaxed);
    while (next < finished_ + count) {
      if (team_.taken.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) return next - finished_;
    }
    return -1;
  }

  // Ends an operation: returns when all its tasks are done, `mine` of them by this thread.
  void finish(i64 count, i64 mine) const {
    finished_ += count;
    if (mine) team_.done.fetch_add(mine, std::memory_order_acq_rel);
    spin_until([&] { return team_.done.load(std::memory_order_acquire) >= finished_; });
  }

  Team& team_;
  int index_, size_;
  mutable i64 finished_ = 0;  // tasks of the operations that this thread has finished
};

// Runs body(member) on the caller's thread and on `threads` - 1 new ones, or on as many as can be created. For what is long: weights. What is
// done in each step is run by a workspace's `WorkerThreads`.
template <class Body>
void run_team(int threads, Body&& body) {
  struct Region {
    Team team;
    Body& body;
    int size;
    std::atomic<int> started{0};
  } region{{}, body, threads};
  std::vector<pthread_t> others;
  for (int i = 1; i < threads; i++) {
    pthread_t other;
    const auto run = [](void* data) -> void* {
      Region& of = *static_cast<Region*>(data);
      of.body(Member(of.team, of.started.fetch_add(1, std::memory_order_relaxed) + 1, of.size));
      return nullptr;
    };
    if (pthread_create(&other, nullptr, run, &region)) break;
    others.push_back(other);
  }
  body(Member(region.team, 0, threads));
  for (pthread_t other : others) pthread_join(other, nullptr);
}

}  // namespace aengine
