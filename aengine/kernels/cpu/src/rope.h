// What is done with queries, keys and values before attention; see attention.h.
#pragma once
#include "attention.h"
#include "int8.h"
#include "norm.h"

namespace aengine {

// One head in place: its norm if there is one, then the rotation of its first `rotary` elements, which pairs their halves
// (the "neox" form), and the product with `scale`.
template <class E>
void rotate_head(E* head, i64 head_dim, const Norm& norm, i64 rotary, const float* cos_sin, float scale) {
  alignas(64) float x[MAX_KEY_DIM], y[MAX_KEY_DIM];
  const i64 size = norm.weight || scale != 1.f ? head_dim : cos_sin ? rotary : 0;  // what is changed
  load_padded(head, size, x);
  if (norm.weight) {
    const Moments moments = moments_of(x, head_dim, norm.eps, norm.kind);
    for (i64 i = 0; i < head_dim; i += LANES) store(x + i, normed(x, i, norm, moments));
  }
  if (!cos_sin) return store_scaled(x, scale, size, head);
  const i64 half = rotary / 2;
  const float *cos = cos_sin, *sin = cos_sin + half;
  for (i64 i = 0; i < half; i++) {
    y[i] = fma(x[i], cos[i], -(x[half + i] * sin[i]));
    y[half + i] = fma(x[half + i], cos[i], x[i] * sin[i]);
  }
  if (rotary < size) memcpy(y + rotary, x + rotary, (size_t)(size - rotary) * sizeof(float));
  store_scaled(y, scale, size, head);
}

// The key and the value of a head, wider by zeros in the pages where they do not fill them.
template <class E>
void write_padded(const LayerPages<E>& pages, i64 slot, i64 head, const AttentionOp& op, const E* key, const E* value) {
  if (op.key_dim == pages.key_dim && op.value_dim == pages.value_dim) return pages.write(slot, head, key, value);
  E wide_key[MAX_KEY_DIM] = {}, wide_value[MAX_VALUE_DIM] = {};
  memcpy(static_cast<void*>(wide_key), key, (size_t)op.key_dim * sizeof(E));
  memcpy(static_cast<void*>(wide_value), value, (size_t)op.value_dim * sizeof(E));
  pages.write(slot, head, wide_key, wide_value);
}

template <class E>
void write_padded(const LayerPages<i8>& pages, i64 slot, i64 head, const AttentionOp& op, const E* key, const E* value) {
  alignas(64) float wide[MAX_KEY_DIM];
  alignas(64) i8 integers[MAX_KEY_DIM + KV_SCALE_BYTES], value_integers[MAX_VALUE_DIM];
  load_padded(key, op.key_dim, wide);
  const float limit = pages.halves ? 7.f : INT8_MAX_VALUE;
  const float key_scale = quantise_row<Int8Values>(wide, integers, pages.key_dim, limit);
  load_padded(value, op.value_dim, wide);
  const float scales[] = {key_scale, quantise_row<Int8Values>(wide, value_integers, pages.value_dim, limit)};
  memcpy(integers + pages.key_dim, scales, sizeof scales);
  pages.write(slot, head, integers, value_integers);
}

// A task is up to 16 tokens of one KV head and its query heads, so that their writes to a page stay in the L1 cache.
template <class E>
void rotate_and_write(const Member& member, const AttentionOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows) {
  const i32* slots = step.group_slots(op.group);
  const i64 dim = op.key_dim, group = op.heads / op.kv_heads, num_tokens = step.num_tokens;
  const auto norm_of = [&](Norm norm, i64 head) {
    if (norm.weight) norm.weight += head * op.norm_stride;
    if (norm.bias) norm.bias += head * op.norm_stride;
    return norm;
  };
  const i64 run = larger(1, smaller(BLOCK, num_tokens * op.kv_heads / (2 * member.size())));
  member.each(ceil_div(num_tokens, run) * op.kv_heads, [&](i64 task) {
    const i64 head = task % op.kv_heads, begin = task / op.kv_heads * run;
    for (i64 token = begin; token < smaller(num_tokens, begin + run); token++) {
      E* query = rows[op.query].row(token);
      const float* cos_sin = op.cos_sin ? op.cos_sin + step.positions[token] * op.rotary_dim : nullptr;
      const float scale = op.query_scales ? op.query_scales[step.positions[token]] : 1.f;
      for (i64 q = head * group; q < (head + 1) * group; q++) {
        rotate_head(query + q * dim, dim, norm_of(op.q_norm, q), op.rotary_dim, cos_sin, scale);
      }
      if (op.key < 0) continue;
      E* key = rows[op.key].row(token) + op.key_first + head * dim;
      const E* value = rows[op.value].row(token) + op.value_first + head * op.value_dim;
      E own_value[MAX_VALUE_DIM];  // the value may be what the key was
      if (op.v_norm.weight) {
        memcpy(static_cast<void*>(own_value), value, (size_t)op.value_dim * sizeof(E));
        rotate_head(own_value, op.value_dim, op.v_norm, 0, nullptr, 1.f);
        value = own_value;
      }
      rotate_head(key, dim, norm_of(op.k_norm, head), op.rotary_dim, cos_sin, 1.f);
      if (slots[token] < 0) continue;
      with_pages<E>(pool, op, [&](const auto& pages) { write_padded(pages, slots[token], head, op, key, value); });
    }
  });
}

}  // namespace aengine
