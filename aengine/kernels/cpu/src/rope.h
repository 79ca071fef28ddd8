// What is done with queries, keys and values before attention; see attention.h.
#pragma once
#include "attention.h"
#include "norm.h"

namespace aengine {

// One head in place: its norm if there is one, then the rotation of its first `rotary` elements, which pairs their halves (the "neox" form).
template <class E>
void rotate_head(E* head, i64 head_dim, const Norm& norm, i64 rotary, const float* cos_sin) {
  alignas(64) float x[MAX_KEY_DIM], y[MAX_KEY_DIM];
  load_padded(head, head_dim, x);
  if (norm.weight) {
    const Moments moments = moments_of(x, head_dim, norm.eps, norm.kind);
    for (i64 i = 0; i < head_dim; i += LANES) store(x + i, normed(x, i, norm, moments));
  }
  if (cos_sin) {
    const i64 half = rotary / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    for (i64 i = 0; i < half; i++) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    memcpy(x, y, (size_t)rotary * sizeof(float));
  }
  store_first(x, head_dim, head);
}

// The key and the value of a head, wider by zeros in the pages where they do not fill them.
template <class E>
void write_padded(const LayerPages<E>& pages, i64 slot, i64 head, const E* key, const E* value, i64 head_dim) {
  if (head_dim == pages.key_dim && head_dim == pages.value_dim) return pages.write(slot, head, key, value);
  E wide_key[MAX_KEY_DIM] = {}, wide_value[MAX_VALUE_DIM] = {};
  memcpy(static_cast<void*>(wide_key), key, (size_t)head_dim * sizeof(E));
  memcpy(static_cast<void*>(wide_value), value, (size_t)head_dim * sizeof(E));
  pages.write(slot, head, wide_key, wide_value);
}

// A task is up to 16 tokens of one KV head and its query heads, so that their writes to a page stay in the L1 cache.
template <class E>
void rotate_and_write(const Member& member, const AttentionOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows) {
  const LayerPages<E> pages = layer_pages<E>(pool, op.layer);
  const i64 dim = op.head_dim, group = op.heads / op.kv_heads, num_tokens = step.num_tokens;
  const i64 run = larger(1, smaller(BLOCK, num_tokens * op.kv_heads / (2 * member.size())));
  member.each(ceil_div(num_tokens, run) * op.kv_heads, [&](i64 task) {
    const i64 head = task % op.kv_heads, begin = task / op.kv_heads * run;
    for (i64 token = begin; token < smaller(num_tokens, begin + run); token++) {
      E* row = rows[op.in].row(token);
      const float* cos_sin = op.cos_sin ? op.cos_sin + step.positions[token] * op.rotary_dim : nullptr;
      for (i64 q = head * group; q < (head + 1) * group; q++) rotate_head(row + q * dim, dim, op.q_norm, op.rotary_dim, cos_sin);
      E* key = row + (op.heads + head) * dim;
      rotate_head(key, dim, op.k_norm, op.rotary_dim, cos_sin);
      if (step.slots[token] >= 0) write_padded(pages, step.slots[token], head, key, key + op.kv_heads * dim, dim);
    }
  });
}

}  // namespace aengine
