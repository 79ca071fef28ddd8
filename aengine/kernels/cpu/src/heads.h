// A linear for each head, as multi-head latent attention has them around its attention (DeepSeek-V2, 2024).
#pragma once
#include "gemm.h"

namespace aengine {

constexpr i64 MAX_HEADS = 256;  // of one `Heads`

// The results of each head go to columns of their own.
template <class E>
struct StoreHeads final : Output {
  StoreHeads(const Heads& all, const E* from, i64 by, E* to, i64 to_by) : heads(all), in(from), in_stride(by), out(to), out_stride(to_by) {}
  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    const i64 head = group.w - heads.weights, width = smaller(PANEL, group.w->out_features - panel * PANEL);
    for (i64 i = 0; i < count; i++) {
      E* to = out + (row + i) * out_stride + heads.out_first + head * heads.out_stride;
      alignas(64) E narrowed[PANEL];
      for (i64 j = 0; j < PANEL; j += LANES) store(narrowed + j, load(values[i] + j));
      memcpy(static_cast<void*>(to + panel * PANEL), narrowed, (size_t)width * sizeof(E));
      if (panel) continue;
      const E* from = in + (row + i) * in_stride + heads.in_first + head * heads.in_stride;
      memcpy(static_cast<void*>(to - heads.copied), from - heads.copied, (size_t)heads.copied * sizeof(E));
    }
  }
  const Heads& heads;
  const E* in;
  i64 in_stride;
  E* out;
  i64 out_stride;
};

// Needs `reserve_prepared` for whole rows of x.
template <class E>
void multiply_heads(const Member& member, const Heads& heads, const E* x, i64 stride, i64 rows, E* out, i64 out_stride,
                    const Buffers& space) {
  Group groups[MAX_HEADS];
  for (i64 i = 0; i < heads.num_heads; i++) groups[i] = {heads.weights + i, nullptr, rows, 0, heads.in_first + i * heads.in_stride};
  multiply_groups(member, x, stride, rows, stride, {groups, heads.num_heads, rows}, *heads.weights,
                  StoreHeads<E>(heads, x, stride, out, out_stride), space);
}

}  // namespace aengine
