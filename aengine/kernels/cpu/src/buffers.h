// Scratch memory that outlives a call, in buffers that grow and never shrink.
#pragma once
#include <cstdlib>

#include "abi.h"

namespace aengine {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }

  // Room for `count` T, whose old contents are lost when it has to grow. False when there is no memory.
  template <class T>
  bool reserve(i64 count) {
    const i64 bytes = count * (i64)sizeof(T);
    if (bytes <= capacity_) return true;
    free(data_);
    const i64 rounded = round_up(bytes, 4096);
    data_ = aligned_alloc(64, (size_t)rounded);
    capacity_ = data_ ? rounded : 0;
    return data_ != nullptr;
  }

  template <class T>
  T* as() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
  i64 capacity_ = 0;
};

constexpr i64 MAX_BUFFERS = 32;  // of a model's activations

// Of the attention of a step, for one head kind.
struct PlanBuffers {
  Buffer tiles, tasks, partials;
};

struct Buffers {
  Buffer activations[MAX_BUFFERS];                // of a step
  Buffer prepared, row_scales;                    // activations as a Dot reads them
  PlanBuffers plans[MAX_HEAD_KINDS];
  Buffer gathered;                                // keys and values of pages that are not blocked
  Buffer routing, choices, groups, expert_ordered, expert_gated, expert_outputs;  // of experts
  Buffer expert_own_gated;                        // of experts whose columns are on several ranks
  Buffer adapted_tokens, adapted_logits, low_rank, deltas;  // which rows have which adapters, and their low-rank products
  Buffer rank_partials;                           // of a product that is summed over the ranks
  Buffer logits, chunk_best, block_best, block_mass, listed;  // of random sampling
};

}  // namespace aengine
