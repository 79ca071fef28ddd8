// What is done with the output of the fused QKV projection before attention; see attention.h.
#pragma once
#include "attention.h"
#include "norm.h"

namespace aengine {

// One head in place: RMSNorm if there is a weight, then the rotation that pairs the halves (the "neox" form).
template <class E>
void rotate_head(E* head, i64 head_dim, const float* norm_weight, float eps, const float* cos_sin) {
  alignas(64) float x[MAX_HEAD_DIM], y[MAX_HEAD_DIM];
  const float factor = norm_weight ? rms_factor(head, head_dim, eps) : 1.f;
  for (i64 i = 0; i < head_dim; i += LANES) {
    VecF v = load(head + i);
    if (norm_weight) v = v * factor * load(norm_weight + i);
    store(x + i, v);
  }
  const i64 half = head_dim / 2;
  const float *cos = cos_sin, *sin = cos_sin + half;
  for (i64 i = 0; i < half; i++) {
    y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
  }
  for (i64 i = 0; i < head_dim; i += LANES) store(head + i, load(y + i));
}

// A task is up to 16 tokens of one KV head and its query heads, so that their writes to a page stay in the L1 cache.
template <class E>
void rotate_and_write(const Member& member, E* qkv, i64 stride, const Model& model, const Layer& layer, const LayerPages<E>& pages,
                      const i32* positions, const i32* slots, i64 num_tokens) {
  const i64 dim = model.head_dim, group = model.heads / model.kv_heads;
  const i64 run = larger(1, smaller(BLOCK, num_tokens * model.kv_heads / (2 * member.size())));
  member.each(ceil_div(num_tokens, run) * model.kv_heads, [&](i64 task) {
    const i64 head = task % model.kv_heads, begin = task / model.kv_heads * run;
    for (i64 token = begin; token < smaller(num_tokens, begin + run); token++) {
      E* row = qkv + token * stride;
      const float* cos_sin = model.cos_sin + positions[token] * dim;
      for (i64 q = head * group; q < (head + 1) * group; q++) rotate_head(row + q * dim, dim, layer.q_norm, model.eps, cos_sin);
      E* key = row + (model.heads + head) * dim;
      rotate_head(key, dim, layer.k_norm, model.eps, cos_sin);
      if (slots[token] >= 0) pages.write(slots[token], head, key, key + model.kv_heads * dim);
    }
  });
}

}  // namespace aengine
