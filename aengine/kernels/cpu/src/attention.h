// Causal attention of ragged rows over paged KV, and what is done with the output of the fused QKV projection before it.
#pragma once
#include "attention_plan.h"
#include "team.h"

namespace aengine {

constexpr i64 MAX_HEAD_DIM = 256;
constexpr i64 KV_RUN = 128;  // tokens scored at a time

template <class E>
struct AttentionArguments {
  const E* query;  // [tokens, stride], heads first
  i64 query_stride;
  E* output;
  i64 output_stride;
  LayerPages<E> pages;
  const Step* step;
  i64 group;       // query heads per KV head
  i64 window;      // 0: none
  float scale, soft_cap;
};

// Elements of scratch that each thread needs where pages are not blocked.
inline i64 gathered_elements(i64 head_dim) { return 2 * KV_RUN * head_dim; }

// Softmax(q k^T) v for all query rows of a plan. Needs `plan_attention` and, where pages are not blocked, `gathered_elements` per thread.
template <class E>
void attend(const Member& member, const AttentionArguments<E>& arguments, const AttentionPlan& plan, const Buffers& space);

// Heads of q and k are normalised and rotated in place, k and v go to their pages. Rows of [q heads | k heads | v heads], each head_dim
// wide. A token with slot -1 is written nowhere.
template <class E>
void rotate_and_write(const Member& member, E* qkv, i64 stride, const Model& model, const Layer& layer, const LayerPages<E>& pages,
                      const i32* positions, const i32* slots, i64 num_tokens);

}  // namespace aengine
