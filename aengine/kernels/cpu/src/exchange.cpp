// An exchange between processes, or threads, over memory that they share: for each rank the number of its rounds, which the others wait for.
#include "exchange.h"

#include <chrono>

namespace aengine {

namespace {

// By itself in its cache lines, also where these are fetched in pairs.
struct alignas(128) Counter {
  std::atomic<i64> value;
};

// The beginning of the memory, initially zero.
struct SharedRounds {
  Counter aborted;
  Counter rounds[MAX_RANKS];  // that a rank has begun
};
static_assert(sizeof(SharedRounds) <= EXCHANGE_HEADER);

}  // namespace

i32 meet_in_memory(void* self, i64) {
  const SharedRanks& ranks = *static_cast<const SharedRanks*>(self);
  SharedRounds& shared = *static_cast<SharedRounds*>(ranks.memory);
  if (shared.aborted.value.load(std::memory_order_relaxed)) return EXCHANGE_ABORTED;
  const i64 round = shared.rounds[ranks.index].value.fetch_add(1, std::memory_order_release) + 1;
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> timeout(ranks.timeout);
  i32 status = OK;
  for (i32 rank = 0; rank < ranks.size && !status; rank++) {
    i64 checks = 0;
    spin_until([&] {
      if (shared.rounds[rank].value.load(std::memory_order_acquire) >= round) return true;
      if (shared.aborted.value.load(std::memory_order_relaxed)) {
        status = EXCHANGE_ABORTED;
      } else if (++checks % 64 == 0 && std::chrono::steady_clock::now() - begin > timeout) {
        status = EXCHANGE_TIMED_OUT;
        shared.aborted.value.store(1, std::memory_order_relaxed);
      }
      return status != OK;
    }, ranks.yields ? 0 : SPINS_BEFORE_YIELDING);
  }
  return status;
}

}  // namespace aengine
