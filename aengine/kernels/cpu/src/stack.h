// All layers of a decoder for one step, by one team of threads: what models/decoder.py computes, in the same order.
#pragma once
#include "attention.h"
#include "draw.h"
#include "gemm.h"
#include "norm.h"
#include "workspace.h"

namespace aengine {

// The widths of the activations of a model, in elements, padded so that whole panels can be stored.
struct Strides {
  i64 hidden, qkv, attended, gated;
  explicit Strides(const Model& m)
      : hidden(round_up(m.hidden, PANEL)),
        qkv(round_up((m.heads + 2 * m.kv_heads) * m.head_dim, PANEL)),
        attended(round_up(m.heads * m.head_dim, PANEL)),
        gated(round_up(m.intermediate, PANEL)) {}
};

// Positions and slots of a step's tokens.
inline Status check_tokens(const Model& model, const Pool& pool, const Step& step) {
  for (i64 i = 0; i < step.num_tokens; i++) {
    if (step.positions[i] < 0 || step.positions[i] >= model.num_positions) return BAD_POSITION;
    if (step.slots[i] < -1 || step.slots[i] >= pool.num_pages * pool.page_size) return BAD_SLOT;
  }
  return OK;
}

// Copies the last tokens of the input rows to the token ids, if all rows exist.
inline Status read_last_tokens(const Step& step) {
  const auto exists = [&](i32 row) { return row >= 0 && row < step.num_last_tokens; };
  if (!std::all_of(step.input_rows, step.input_rows + step.num_input_rows, exists)) return BAD_ROW;
  if (!std::all_of(step.output_rows, step.output_rows + step.num_output_rows, exists)) return BAD_ROW;
  for (i64 i = 0; i < step.num_input_rows; i++) step.token_ids[i] = step.last_tokens[step.input_rows[i]];
  return OK;
}

// Token ids and logits indices of a step.
inline Status check_ids(const Model& model, const Step& step) {
  for (i64 i = 0; i < step.num_tokens; i++) {
    if (step.token_ids[i] < 0 || step.token_ids[i] >= model.vocab) return BAD_TOKEN_ID;
  }
  for (i64 i = 0; i < step.num_logits; i++) {
    if (step.logits_indices[i] < 0 || step.logits_indices[i] >= step.num_tokens) return BAD_LOGITS_INDEX;
  }
  return OK;
}

// The rows of a step: that lengths are those of pages that exist, and queries no more than a row has tokens.
inline Status check_rows(const Pool& pool, const Step& step) {
  if (step.qo_indptr[0] != 0 || step.qo_indptr[step.num_rows] != step.num_tokens) return BAD_ROW_LENGTH;
  for (i64 row = 0; row < step.num_rows; row++) {
    const i64 queries = step.qo_indptr[row + 1] - step.qo_indptr[row], last = step.last_page_len[row];
    if (queries < 0 || step.kv_indptr[row + 1] <= step.kv_indptr[row] || last < 1 || last > pool.page_size) return BAD_ROW_LENGTH;
    if (sequence_length(step, row, pool.page_size) < queries) return BAD_ROW_LENGTH;
    for (i64 i = step.kv_indptr[row]; i < step.kv_indptr[row + 1]; i++) {
      if (step.kv_indices[i] < 0 || step.kv_indices[i] >= pool.num_pages) return BAD_PAGE;
    }
  }
  return OK;
}

template <class E>
bool reserve_step(Workspace& space, const Model& model, const Strides& strides, i64 tokens, int threads) {
  const i64 widest = larger(larger(strides.hidden, strides.attended), strides.gated);
  return space.residual.reserve<E>(tokens * strides.hidden) && space.normed.reserve<E>(tokens * strides.hidden) &&
         space.qkv.reserve<E>(tokens * strides.qkv) && space.attended.reserve<E>(tokens * strides.attended) &&
         space.gated.reserve<E>(tokens * strides.gated) && reserve_prepared(space, tokens, widest) &&
         space.gathered.reserve<E>(threads * gathered_elements(model.head_dim));
}

// Copies rows[0..count) of `from`, or its first `count` rows, to `to`; what lies between width and to_stride becomes zero.
template <class E>
void gather_rows(const Member& member, const E* from, i64 stride, const i32* rows, i64 count, i64 width, E* to, i64 to_stride) {
  member.each_run(count, 16, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      memcpy(static_cast<void*>(to + i * to_stride), from + rows[i] * stride, (size_t)width * sizeof(E));
      memset(static_cast<void*>(to + i * to_stride + width), 0, (size_t)(to_stride - width) * sizeof(E));
    }
  });
}

template <class E>
class Stack {
 public:
  Stack(const Model& model, const Pool& pool, const Step& step, const AttentionPlan& plan, const Workspace& space)
      : m_(model), pool_(pool), step_(step), plan_(plan), space_(space), strides_(model) {
    residual_ = space.residual.as<E>(), normed_ = space.normed.as<E>(), qkv_ = space.qkv.as<E>();
    attended_ = space.attended.as<E>(), gated_ = space.gated.as<E>();
  }

  // Embeds the tokens, runs all layers, then stores the normed hidden states at the logits indices, or samples the next tokens there.
  void run(const Member& member) const {
    const E* embedding = static_cast<const E*>(m_.embedding);
    gather_rows(member, embedding, m_.hidden, step_.token_ids, step_.num_tokens, m_.hidden, residual_, strides_.hidden);
    for (i64 i = 0; i < m_.num_layers; i++) {
      const Layer& layer = m_.layers[i];
      attention_half(member, layer, layer_pages<E>(pool_, i));
      if (i + 1 < m_.num_layers) {
        mlp_half(member, layer, residual_, normed_, attended_, step_.num_tokens);
        continue;
      }
      // After the last attention tokens no longer meet, so only those of the logits indices are computed. What they read is moved first.
      gather_rows(member, residual_, strides_.hidden, step_.logits_indices, step_.num_logits, strides_.hidden, normed_, strides_.hidden);
      gather_rows(member, attended_, strides_.attended, step_.logits_indices, step_.num_logits, strides_.attended, qkv_, strides_.attended);
      mlp_half(member, layer, normed_, residual_, qkv_, step_.num_logits);
    }
    E* hidden = step_.hidden ? static_cast<E*>(step_.hidden) : residual_;
    norm_rows(member, normed_, strides_.hidden, m_.final_norm, hidden, strides_.hidden, step_.num_logits, m_.hidden, m_.eps);
    if (!step_.sampled) return;
    if (!step_.draw_params) {
      return multiply(member, hidden, strides_.hidden, step_.num_logits, *m_.head, StoreArgmax::of(step_.sampled, *m_.head), space_);
    }
    float* logits = space_.logits.as<float>();
    const i64 vocab = m_.head->out_features;
    multiply(member, hidden, strides_.hidden, step_.num_logits, *m_.head, StoreLogits{logits, vocab}, space_);
    draw_tokens(member, logits, step_.num_logits, vocab, step_.draw_params, step_.sampled, space_);
  }

 private:
  void attention_half(const Member& member, const Layer& layer, const LayerPages<E>& pages) const {
    const i64 tokens = step_.num_tokens;
    norm_rows(member, residual_, strides_.hidden, layer.attention_norm, normed_, strides_.hidden, tokens, m_.hidden, m_.eps);
    multiply(member, normed_, strides_.hidden, tokens, layer.qkv, StoreRows<E, false>{qkv_, strides_.qkv}, space_);
    rotate_and_write(member, qkv_, strides_.qkv, m_, layer, pages, step_.positions, step_.slots, tokens);
    attend(member, AttentionArguments<E>{qkv_, strides_.qkv, attended_, strides_.attended, pages, &step_, m_.heads / m_.kv_heads,
                                         layer.window, m_.scale, m_.soft_cap}, plan_, space_);
  }

  // The output projection of what was attended, and the MLP; both are added to `residual`.
  void mlp_half(const Member& member, const Layer& layer, E* residual, E* normed, const E* attended, i64 rows) const {
    multiply(member, attended, strides_.attended, rows, layer.output, StoreRows<E, true>{residual, strides_.hidden}, space_);
    norm_rows(member, residual, strides_.hidden, layer.mlp_norm, normed, strides_.hidden, rows, m_.hidden, m_.eps);
    multiply(member, normed, strides_.hidden, rows, layer.gate_up, StoreGated<E>{gated_, strides_.gated}, space_);
    multiply(member, gated_, strides_.gated, rows, layer.down, StoreRows<E, true>{residual, strides_.hidden}, space_);
  }

  const Model& m_;
  const Pool& pool_;
  const Step& step_;
  const AttentionPlan& plan_;
  const Workspace& space_;
  const Strides strides_;
  E *residual_, *normed_, *qkv_, *attended_, *gated_;
};

// One step as a job: what all members need, and the buffers that hold it. Model, pool and step must outlive it.
template <class E>
class StackJob final : public Job {
 public:
  StackJob(const Model& model, const Pool& pool, const Step& step, Workspace& space) : m_(model), pool_(pool), step_(step), space_(space) {}

  Status prepare(int threads) {
    if (!reserve_step<E>(space_, m_, Strides(m_), larger(step_.num_tokens, step_.num_logits), threads)) return OUT_OF_MEMORY;
    if (!plan_attention(step_, m_.heads, m_.kv_heads, m_.head_dim, pool_.page_size, threads, space_, plan_)) return OUT_OF_MEMORY;
    const i64 vocab = m_.head->out_features;
    if (has_draw_params()) {
      if (!space_.logits.reserve<float>(step_.num_logits * vocab)) return OUT_OF_MEMORY;
      if (!reserve_draws(space_, step_.num_logits, vocab, threads)) return OUT_OF_MEMORY;
    } else if (step_.sampled) {
      StoreArgmax::begin(step_.sampled, step_.num_logits);
    }
    return OK;
  }
  AE_NOINLINE void work(const Member& member) const override { Stack<E>(m_, pool_, step_, plan_, space_).run(member); }
  void end() const override {
    if (step_.sampled && !has_draw_params()) StoreArgmax::finish(step_.sampled, step_.num_logits);
    for (i64 i = 0; i < step_.num_output_rows; i++) step_.last_tokens[step_.output_rows[i]] = (i32)step_.sampled[i];
  }

 private:
  bool has_draw_params() const { return step_.sampled && step_.draw_params; }

  const Model& m_;
  const Pool& pool_;
  const Step& step_;
  Workspace& space_;
  AttentionPlan plan_;
};

template <class E>
Status run_layers(const Model& model, const Pool& pool, const Step& step, Workspace& space, int threads) {
  StackJob<E> job(model, pool, step, space);
  if (const Status status = job.prepare(threads)) return status;
  run_team(threads, [&](const Member& member) { job.work(member); });
  job.end();
  return OK;
}

template <class E>
Status begin_layers(const Model& model, const Pool& pool, const Step& step, Workspace& space, int threads) {
  std::unique_ptr<StackJob<E>> job(new (std::nothrow) StackJob<E>(model, pool, step, space));
  if (!job) return OUT_OF_MEMORY;
  if (const Status status = job->prepare(threads)) return status;
  space.workers.begin(std::move(job), threads);
  return OK;
}

}  // namespace aengine
