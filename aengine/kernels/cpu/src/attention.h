// Causal attention of ragged rows over paged KV, and what is done with the output of the fused QKV projection before it.
#pragma once
#include "attention_plan.h"
#include "rows.h"

namespace aengine {

constexpr i64 KV_RUN = 128;                            // tokens scored at a time

// Bytes of scratch that each thread needs where pages are not blocked, for heads of these widths in them.
inline i64 gathered_bytes(const Pool& pool, i64 key_dim, i64 value_dim) {
  if (pool.element == INT4) return KV_RUN * (key_dim + KV_SCALE_BYTES + value_dim);  // as int8
  return KV_RUN * (pool.key_bytes(key_dim) + pool.value_bytes(value_dim));
}

// Softmax(q k^T) v for all query rows of a plan. Needs `plan_attention` and, where pages are not blocked, `gathered_bytes` per thread.
template <class E>
void attend(const Member& member, const AttentionOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows,
            const AttentionPlan& plan, const Buffers& space);

// Heads of q and k are normalised and rotated in place, k and v go to their pages. A token with slot -1 is written nowhere.
template <class E>
void rotate_and_write(const Member& member, const AttentionOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows);

}  // namespace aengine
