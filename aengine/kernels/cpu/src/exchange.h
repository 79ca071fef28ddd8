// How ranks, which each compute a part of the same step, give each other their parts: in rounds, as many on every rank. What a rank wrote to
// its slot before a round can be read by all after it.
//
// There are two slots for each rank, of which rounds use one after the other. So nothing waits until all have read: a rank that begins a round
// has read what came of the round before, and only then the slot of that round is written again.
#pragma once
#include <chrono>

#include "rows.h"

namespace aengine {

constexpr i64 MAX_RANKS = 64, EXCHANGE_HEADER = 16384;  // bytes before the slots in memory that ranks share

// What `self` of an Exchange over shared memory is.
struct SharedRanks {
  void* memory;
  double timeout;  // seconds
  i32 index, size;
  i32 yields;  // from the first moment of a wait on: where there are more ranks than cores
};

// Its `meet`. When a rank has not come within the timeout the exchange fails on all ranks.
i32 meet_in_memory(void* self, i64 bytes);

inline i32 failure_of(const Exchange& x) { return __atomic_load_n(&x.status, __ATOMIC_ACQUIRE); }

// One round, of a thread of each rank: `bytes` is the most that any rank wrote.
inline void meet(Exchange& x, i64 bytes) {
  if (failure_of(x)) return;
  const i32 status = x.meet(x.self, bytes);
  if (status) __atomic_store_n(&x.status, status, __ATOMIC_RELEASE);
  else x.round++;
}

// Adds the time that it lives to that of an exchange, for one thread of a rank.
class ExchangeTime {
 public:
  ExchangeTime(const Member& member, Exchange& x) : x_(member.index() ? nullptr : &x), begin_(std::chrono::steady_clock::now()) {}
  ExchangeTime(const ExchangeTime&) = delete;
  ExchangeTime& operator=(const ExchangeTime&) = delete;
  ~ExchangeTime() {
    if (x_) x_->nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  Exchange* x_;
  std::chrono::steady_clock::time_point begin_;
};

// Calls take(row, column, piece) for all rows of T and pieces of their columns: piece(rank) is what that rank had in the row of `in` from
// `column` on, a pointer and how many. Rank r has width_of(r) columns, `widest` at most. Ends early if the exchange fails.
template <class T, class Width, class Take>
void exchange_rows(const Member& member, Exchange& x, const T* in, i64 stride, i64 rows, i64 widest, const Width& width_of, const Take& take) {
  constexpr i64 TASK_BYTES = 16384;
  const ExchangeTime time(member, x);
  const i64 elements = x.slot_bytes / (i64)sizeof(T), columns = smaller(widest, elements), most = columns ? elements / columns : 0;
  for (i64 column = 0; column < widest; column += columns) {
    const auto width = [&](i64 rank) { return larger(0, smaller(columns, width_of(rank) - column)); };
    for (i64 first = 0; first < rows; first += most) {
      const i64 count = smaller(most, rows - first), bytes = count * columns * (i64)sizeof(T);
      const auto put = [&](i64 begin, i64 end) {
        T* slot = reinterpret_cast<T*>(x.slots[x.round % 2 * x.size + x.index]);
        const i64 own = width(x.index);
        for (i64 i = begin; i < end; i++) {
          memcpy(static_cast<void*>(slot + i * own), in + (first + i) * stride + column, (size_t)own * sizeof(T));
        }
      };
      const auto get = [&](i64 begin, i64 end) {
        const u8* const* slots = x.slots + (x.round + 1) % 2 * x.size;
        for (i64 i = begin; i < end; i++) {
          take(first + i, column, [&](i64 rank) {
            return std::pair<const T*, i64>(reinterpret_cast<const T*>(slots[rank]) + i * width(rank), width(rank));
          });
        }
      };
      if (bytes <= TASK_BYTES) {  // one thread is faster than three operations of all
        member.each(1, [&](i64) {
          put(0, count);
          meet(x, bytes);
          if (!failure_of(x)) get(0, count);
        });
      } else {
        const i64 run = larger(1, TASK_BYTES * count / bytes);
        member.each_run(count, run, put);
        member.each(1, [&](i64) { meet(x, bytes); });
        if (failure_of(x)) return;
        member.each_run(count, run, get);
      }
    }
  }
}

// Rows of `out` become the columns of all ranks, rank r's from firsts[r] to firsts[r + 1]; what follows the last one becomes zero up to
// `padded`. A null `out` takes nothing.
template <class T>
void gather_ranks(const Member& member, Exchange& x, const T* in, i64 stride, i64 rows, const i64* firsts, T* out, i64 out_stride, i64 padded) {
  const auto width_of = [&](i64 rank) { return firsts[rank + 1] - firsts[rank]; };
  i64 widest = 0;
  for (i64 rank = 0; rank < x.size; rank++) widest = larger(widest, width_of(rank));
  exchange_rows(member, x, in, stride, rows, widest, width_of, [&](i64 row, i64 column, const auto& piece) {
    if (!out) return;
    T* to = out + row * out_stride;
    for (i64 rank = 0; rank < x.size; rank++) {
      const auto [data, count] = piece(rank);
      memcpy(static_cast<void*>(to + firsts[rank] + column), data, (size_t)count * sizeof(T));
    }
    if (padded > firsts[x.size]) memset(static_cast<void*>(to + firsts[x.size]), 0, (size_t)(padded - firsts[x.size]) * sizeof(T));
  });
}

// out = the sums of all ranks' float32 rows of `width` columns, a multiple of 16; or out += multiplier times those. They are taken in the
// order of the ranks, so they are equal on all of them.
template <class E>
void sum_ranks(const Member& member, Exchange& x, const Rows<float>& in, i64 rows, i64 width, bool adds, float multiplier, const Rows<E>& out) {
  exchange_rows(member, x, in.data, in.stride, rows, width, [&](i64) { return width; }, [&](i64 row, i64 column, const auto& piece) {
    E* to = out.row(row) + column;
    const i64 count = piece(0).second;
    for (i64 i = 0; i < count; i += LANES) {
      VecF total = load(piece(0).first + i);
      for (i64 rank = 1; rank < x.size; rank++) total += load(piece(rank).first + i);
      store(to + i, adds ? fma(total, splat(multiplier), load(to + i)) : total);
    }
  });
}

}  // namespace aengine
