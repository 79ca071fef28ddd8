// A linear for each head, as multi-head latent attention has them around its attention (DeepSeek-V2, 2024).
#pragma once
#include "gemm.h"

namespace aengine {

constexpr i64 MAX_HEADS = 256;  // of one operation

// The results of each head go to columns of their own.
template <class E>
struct StoreHeads final : Output {
  StoreHeads(const HeadsOp& all, const Rows<E>& from, const Rows<E>& to) : op(all), in(from), out(to) {}
  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    const i64 head = group.w - op.weights, width = smaller(PANEL, group.w->out_features - panel * PANEL);
    for (i64 i = 0; i < count; i++) {
      E* to = out.row(row + i) + op.out_first + head * op.out_stride;
      alignas(64) E narrowed[PANEL];
      for (i64 j = 0; j < PANEL; j += LANES) store(narrowed + j, load(values[i] + j));
      memcpy(static_cast<void*>(to + panel * PANEL), narrowed, (size_t)width * sizeof(E));
      if (head + 1 == op.num_heads && (panel + 1) * PANEL >= group.w->out_features) {
        const i64 end = op.out_first + head * op.out_stride + group.w->out_features;
        memset(static_cast<void*>(out.row(row + i) + end), 0, (size_t)(round_up(end, 16) - end) * sizeof(E));
      }
      if (panel) continue;
      const E* from = in.row(row + i) + op.in_first + head * op.in_stride;
      memcpy(static_cast<void*>(to - op.copied), from - op.copied, (size_t)op.copied * sizeof(E));
    }
  }
  const HeadsOp& op;
  Rows<E> in, out;
};

// Needs `reserve_prepared` for whole rows of `in`.
template <class E>
void multiply_heads(const Member& member, const HeadsOp& op, const StepRows<E>& buffers, i64 rows, const Buffers& space) {
  const Rows<E>& in = buffers[op.in];
  Group groups[MAX_HEADS];
  for (i64 i = 0; i < op.num_heads; i++) groups[i] = {op.weights + i, nullptr, rows, 0, op.in_first + i * op.in_stride};
  multiply_groups(member, in.data, in.stride, rows, in.stride, {groups, op.num_heads, rows}, *op.weights,
                  StoreHeads<E>(op, in, buffers[op.out]), space);
}

}  // namespace aengine
