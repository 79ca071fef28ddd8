// The operations of a model for one step, by one team of threads: what models/torch/decoder.py computes, in the same order.
// models/cpu/program.py writes them down.
#pragma once
#include "adapters.h"
#include "attention.h"
#include "convolution.h"
#include "draw.h"
#include "exchange.h"
#include "experts.h"
#include "heads.h"
#include "norm.h"
#include "state.h"
#include "workspace.h"

namespace aengine {

// Positions and slots of a step's tokens.
inline Status check_tokens(const Model& model, const Pool& pool, const Step& step) {
  for (i64 i = 0; i < step.num_tokens; i++) {
    if (step.positions[i] < 0 || step.positions[i] >= model.num_positions) return BAD_POSITION;
  }
  const auto is_bad = [&](i32 slot) { return slot < -1 || slot >= pool.num_pages * pool.page_size; };
  if (std::any_of(step.slots, step.slots + step.num_groups * step.num_tokens, is_bad)) return BAD_SLOT;
  if (std::any_of(step.kept_slots, step.kept_slots + step.num_kept, is_bad)) return BAD_SLOT;
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
  for (i64 i = 0; i < step.num_tokens && !step.inputs; i++) {
    if (step.token_ids[i] < -step.num_image_rows || step.token_ids[i] >= model.vocab) return BAD_TOKEN_ID;
  }
  for (i64 i = 0; i < step.num_logits; i++) {
    if (step.logits_indices[i] < 0 || step.logits_indices[i] >= step.num_tokens) return BAD_LOGITS_INDEX;
  }
  return OK;
}

// The pages of a step's recurrent states, and the tokens that those which are kept are of.
inline Status check_states(const Pool& pool, const Step& step) {
  const auto exist = [&](const i32* pages, i64 count) {
    return std::all_of(pages, pages + count * step.state_pages, [&](i32 page) { return page >= 0 && page < pool.num_pages; });
  };
  if (!exist(step.state_reads, step.num_rows) || !exist(step.state_writes, step.num_rows)) return BAD_PAGE;
  if (!exist(step.kept_state_pages, step.num_kept_states)) return BAD_PAGE;
  const auto tokens = [&](i64 row) { return step.qo_indptr[row + 1] - step.qo_indptr[row]; };
  for (i64 row = 0; row < step.num_rows && step.state_replays; row++) {
    if (step.state_replays[row] < 0 || step.state_replays[row] > MAX_PENDING) return BAD_ROW_LENGTH;
    if (step.state_drafts[row] && tokens(row) > MAX_PENDING) return BAD_ROW_LENGTH;
  }
  for (i64 i = 0; i < step.num_kept_states; i++) {
    const i64 row = step.kept_state_rows[i], length = step.kept_state_lengths[i];
    if (row < 0 || row >= step.num_rows || (i && row < step.kept_state_rows[i - 1])) return BAD_ROW_LENGTH;
    if (length < 1 || length > step.state_replays[row] + (step.state_drafts[row] ? 0 : tokens(row))) return BAD_ROW_LENGTH;
  }
  return OK;
}

// The rows of a step: that lengths are those of pages that exist, and queries no more than a row has tokens.
inline Status check_rows(const Pool& pool, const Step& step) {
  if (step.qo_indptr[0] != 0 || step.qo_indptr[step.num_rows] != step.num_tokens) return BAD_ROW_LENGTH;
  for (i64 row = 0; row < step.num_rows; row++) {
    const i64 queries = step.qo_indptr[row + 1] - step.qo_indptr[row], last = step.last_page_len[row];
    if (queries < 0 || step.kv_indptr[row + 1] <= step.kv_indptr[row] || last < 1 || last > pool.page_size) return BAD_ROW_LENGTH;
    const i64 length = sequence_length(step, row, pool.page_size);
    if (length < queries) return BAD_ROW_LENGTH;
    for (i64 token = step.qo_indptr[row]; step.seen && token < step.qo_indptr[row + 1]; token++) {
      if (step.seen[token] <= length - (step.qo_indptr[row + 1] - token) || step.seen[token] > length) return BAD_ROW_LENGTH;
    }
  }
  for (i64 i = 0; i < step.num_groups * step.kv_indptr[step.num_rows]; i++) {
    if (step.kv_indices[i] < 0 || step.kv_indices[i] >= pool.num_pages) return BAD_PAGE;
  }
  return check_states(pool, step);
}

// The adapters of a step's tokens, and of those at its logits indices.
struct StepAdapted {
  AdaptedRows tokens, logits;
};

// Room for all activations of a step, for products of them and for attention.
template <class E>
bool reserve_step(Workspace& space, const Model& model, const Pool& pool, const Step& step, int threads) {
  const i64 rows = larger(step.num_tokens, step.num_logits);
  i64 widest = 0;
  for (i64 i = 0; i < model.num_buffers; i++) {
    if (!space.activations[i].reserve<E>(rows * model.strides[i])) return false;
    widest = larger(widest, model.strides[i]);
  }
  for (const Op* op = model.ops; op < model.ops + model.num_ops; op++) {
    if (op->kind == EXPERTS && !reserve_experts<E>(space, op->as<ExpertsOp>(), rows)) return false;
    if (op->kind == SUM_RANKS && !space.rank_partials.reserve<float>(rows * partial_rows(space, op->as<SumRanksOp>().width).stride)) return false;
  }
  if (step.adapters && !reserve_low_rank(space, *step.adapters, rows)) return false;
  i64 gathered = 0;
  for (i64 i = 0; i < model.num_head_kinds; i++) {
    gathered = larger(gathered, gathered_bytes(pool, model.head_kinds[i].key_dim, model.head_kinds[i].value_dim));
  }
  return reserve_prepared(space, rows, widest) && space.gathered.reserve<u8>(threads * gathered);
}

template <class E>
class Stack {
 public:
  Stack(const Model& model, const Pool& pool, const Step& step, const AttentionPlan* plans, const StepAdapted& adapted, const Workspace& space)
      : m_(model), pool_(pool), step_(step), plans_(plans), adapted_(adapted), space_(space), rows_(model, space, step.hidden) {}

  // Runs all operations, then samples the next tokens at the logits indices if the step does. When the exchange with other ranks fails, a
  // thread leaves out what is left.
  void run(const Member& member) const {
    run_ops(member);
    if (step_.sampled && !has_failed(space_)) sample(member);
  }

 private:
  void run_ops(const Member& member) const {
    i64 rows = step_.num_tokens;
    const AdaptedRows* adapted = &adapted_.tokens;
    for (const Op* op = m_.ops; op < m_.ops + m_.num_ops && !has_failed(space_); op++) {
      switch (static_cast<OpKind>(op->kind)) {
        case EMBED: embed(member, op->as<EmbedOp>()), adapt_embedding(member, op->as<EmbedOp>()); break;
        case NORM: norm_rows(member, op->as<NormOp>(), rows_, rows); break;
        case LINEAR: multiply_rows(member, op->as<LinearOp>(), rows, *adapted); break;
        case ROTATE: rotate_and_write(member, op->as<AttentionOp>(), pool_, step_, rows_); break;
        case ATTEND: attend(member, op->as<AttentionOp>(), pool_, step_, rows_, plans_[op->as<AttentionOp>().kind], space_); break;
        case GATHER: gather(member, op->as<GatherOp>()), rows = step_.num_logits, adapted = &adapted_.logits; break;
        case EXPERTS: run_experts(member, op->as<ExpertsOp>(), rows_, rows, *adapted, space_); break;
        case HEADS: multiply_heads(member, op->as<HeadsOp>(), rows_, rows, space_); break;
        case COPY: copy(member, op->as<CopyOp>(), rows); break;
        case READ_KEPT: read_kept(member, op->as<KeptOp>()); break;
        case WRITE_KEPT: write_kept(member, op->as<KeptOp>()); break;
        case GATHER_RANKS: gather_columns(member, op->as<GatherRanksOp>(), rows); break;
        case CONVOLVE_STATES: convolve_states(member, op->as<RecurOp>(), pool_, step_, rows_); break;
        case RECUR: recur(member, op->as<RecurOp>(), pool_, step_, rows_); break;
        case KEEP_INPUTS: keep_inputs(member, op->as<RecurOp>(), pool_, step_, rows_); break;
        case GATE: gate_rows(member, op->as<GateOp>(), rows_, rows); break;
        case CONVOLVE: convolve(member, op->as<ConvolveOp>(), pool_, step_, rows_); break;
        case SUM_RANKS: sum(member, op->as<SumRanksOp>(), rows); break;
        case ADD_IMAGES: add_images(member, op->as<AddImagesOp>()); break;
      }
    }
  }

  void sample(const Member& member) const {
    const Rows<E>& hidden = rows_[m_.hidden];
    const i64 vocab = m_.head->out_features;
    const auto multiply_head = [&](const Output& out) {
      multiply_logits(member, hidden.data, hidden.stride, step_.num_logits, *m_.head, m_.logit_soft_cap, adapted_.logits, out, space_);
    };
    if (!step_.draw_params) return multiply_head(StoreArgmax::of(step_.sampled, *m_.head));
    float* logits = space_.logits.as<float>();
    multiply_head(StoreLogits{logits, vocab});
    draw_tokens(member, logits, step_.num_logits, vocab, step_.draw_params, step_.sampled, space_);
  }

  void embed(const Member& member, const EmbedOp& op) const {
    const E *embedding = static_cast<const E*>(op.embedding), *positions = static_cast<const E*>(op.positions);
    const Rows<E>& out = rows_[op.out];
    if (!embedding) {
      return member.each_run(step_.num_tokens, 16, [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; i++) put_columns(static_cast<const E*>(step_.inputs) + i * op.width, op.width, out, i, 0);
      });
    }
    const E* const images = static_cast<const E*>(step_.image_rows);
    member.each_run(step_.num_tokens, 16, [&](i64 begin, i64 end) {
      for (i64 token = begin; token < end; token++) {
        const i64 id = step_.token_ids[token];
        const bool is_image = id < 0 && op.image_id < 0;
        const E* from = is_image ? images + ~id * op.width : embedding + (id < 0 ? op.image_id : id) * op.width;
        const E* position = positions ? positions + step_.positions[token] * op.width : nullptr;
        E* to = out.row(token);
        const float scale = is_image ? 1.f : op.scale;
        if (scale == 1.f && !position) memcpy(static_cast<void*>(to), from, (size_t)op.width * sizeof(E));
        else for (i64 i = 0; i < op.width; i++) to[i] = narrow<E>(widen(from[i]) * scale + (position ? widen(position[i]) : 0.f));
        memset(static_cast<void*>(to + op.width), 0, (size_t)(out.stride - op.width) * sizeof(E));
      }
    });
  }
  void add_images(const Member& member, const AddImagesOp& op) const {
    const E* const added = static_cast<const E*>(step_.image_layers) + op.addition * step_.num_image_rows * op.width;
    member.each_run(step_.num_image_rows ? step_.num_tokens : 0, 16, [&](i64 begin, i64 end) {
      for (i64 token = begin; token < end; token++) {
        const i64 row = ~(i64)step_.token_ids[token];
        if (row < 0) continue;
        E* to = rows_[op.out].row(token);
        for (i64 i = 0; i < op.width; i++) to[i] = narrow<E>(widen(to[i]) + widen(added[row * op.width + i]));
      }
    });
  }
  // Computes the rows of adapted tokens again, from what their adapters add to the embedding, which is rounded with them once.
  void adapt_embedding(const Member& member, const EmbedOp& op) const {
    const AdaptedRows& adapted = adapted_.tokens;
    const E *embedding = static_cast<const E*>(op.embedding), *positions = static_cast<const E*>(op.positions);
    const i64 most = embedding ? adapted.most(EMBEDDING) : 0;
    if (!most) return;
    member.each_run(step_.num_tokens, 16, [&](i64 begin, i64 end) {
      for (i64 token = begin; token < end; token++) {
        const i64 id = step_.token_ids[token];
        if (adapted.of_rows[token] < 0 || id < 0) continue;
        const LowRank& low = adapted.of(adapted.of_rows[token], EMBEDDING);
        float* u = space_.low_rank.as<float>() + token * most;
        for (i64 i = 0; i < low.size; i++) u[i] = widen(static_cast<const E*>(low.a)[id * low.size + i]);
        for (i64 first = 0; first < op.width && low.size; first += PANEL) {
          float values[PANEL] = {};
          for (i64 i = 0; i < smaller(PANEL, op.width - first); i++) values[i] = widen(embedding[id * op.width + first + i]);
          add_low_rank<E>(low, first / PANEL, u, values);
          for (i64 i = 0; i < smaller(PANEL, op.width - first); i++) {
            const float position = positions ? widen(positions[step_.positions[token] * op.width + first + i]) : 0.f;
            rows_[op.out].row(token)[first + i] = narrow<E>(values[i] * op.scale + position);
          }
        }
      }
    });
  }
  void multiply_rows(const Member& member, const LinearOp& op, i64 rows, const AdaptedRows& adapted) const {
    const Rows<E>& in = rows_[op.in];
    const auto multiply_to = [&](const Output& out) {
      multiply_adapted(member, in.data, in.stride, rows, *op.weight, op.matrix, adapted, out, space_);
    };
    if (op.epilogue == PARTIAL) {
      return multiply_to(StoreRows<float, false>(partial_rows(space_, op.weight->out_features), 1.f));
    }
    with_output<E>(op, rows_[op.out], multiply_to);
  }
  void gather(const Member& member, const GatherOp& op) const {
    const Rows<E>& in = rows_[op.in];
    gather_rows(member, in.data, in.stride, step_.logits_indices, step_.num_logits, in.stride, rows_[op.out]);
  }
  void copy(const Member& member, const CopyOp& op, i64 rows) const {
    const Rows<E>&in = rows_[op.in], &out = rows_[op.out];
    member.each_run(rows, 16, [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) put_columns(in.row(i) + op.in_first, op.width, out, i, op.out_first);
    });
  }
  void read_kept(const Member& member, const KeptOp& op) const {
    const Rows<E>& out = rows_[op.rows];
    member.each_run(step_.num_tokens, 16, [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) {
        const i64 slot = step_.slots[i];
        put_columns(kept(larger(slot, 0), op), slot < 0 ? 0 : op.width, out, i, op.first);
      }
    });
  }
  void write_kept(const Member& member, const KeptOp& op) const {
    const Rows<E>& in = rows_[op.rows];
    member.each_run(step_.num_kept, 16, [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i++) {
        if (step_.kept_slots[i] >= 0) memcpy(static_cast<void*>(kept(step_.kept_slots[i], op)), in.row(i), (size_t)op.width * sizeof(E));
      }
    });
  }
  void gather_columns(const Member& member, const GatherRanksOp& op, i64 rows) const {
    const Rows<E>&in = rows_[op.in], &out = rows_[op.out];
    const i64 end = op.firsts[space_.exchange->size], padded = round_up(op.out_first + end, 16) - op.out_first;
    gather_ranks(member, *space_.exchange, in.data + op.in_first, in.stride, rows, op.firsts, out.data + op.out_first, out.stride, padded);
  }
  void sum(const Member& member, const SumRanksOp& op, i64 rows) const {
    sum_ranks(member, *space_.exchange, partial_rows(space_, op.width), rows, round_up(op.width, 16), op.epilogue == ADD, op.multiplier,
              rows_[op.out]);
  }
  E* kept(i64 slot, const KeptOp& op) const { return static_cast<E*>(step_.kept) + slot * op.width; }
  // Columns of row i of `out` from `first` on; what follows them becomes zero.
  static void put_columns(const E* from, i64 width, const Rows<E>& out, i64 i, i64 first) {
    memcpy(static_cast<void*>(out.row(i) + first), from, (size_t)width * sizeof(E));
    memset(static_cast<void*>(out.row(i) + first + width), 0, (size_t)(out.stride - first - width) * sizeof(E));
  }

  const Model& m_;
  const Pool& pool_;
  const Step& step_;
  const AttentionPlan* plans_;  // by head kind
  const StepAdapted& adapted_;
  const Workspace& space_;
  const StepRows<E> rows_;
};

// One step as a job: what all members need, and the buffers that hold it. Model, pool and step must outlive it.
template <class E>
class StackJob final : public Job {
 public:
  StackJob(const Model& model, const Pool& pool, const Step& step, Workspace& space) : m_(model), pool_(pool), step_(step), space_(space) {}

  Status prepare(int threads) {
    if (!reserve_step<E>(space_, m_, pool_, step_, threads) || !plan_step_adapters()) return OUT_OF_MEMORY;
    for (i64 i = 0; i < m_.num_head_kinds; i++) {
      if (!plan_attention(step_, m_.head_kinds[i], pool_.page_size, threads, space_.plans[i], plans_[i])) return OUT_OF_MEMORY;
    }
    if (has_draw_params()) {
      const i64 vocab = m_.head->out_features;
      if (!space_.logits.reserve<float>(step_.num_logits * vocab)) return OUT_OF_MEMORY;
      if (!reserve_draws(space_, step_.num_logits, vocab, threads)) return OUT_OF_MEMORY;
    } else if (step_.sampled) {
      StoreArgmax::begin(step_.sampled, step_.num_logits);
    }
    return OK;
  }
  AE_NOINLINE void work(const Member& member) const override { Stack<E>(m_, pool_, step_, plans_, adapted_, space_).run(member); }
  Status end() const override {
    if (has_failed(space_)) return (Status)failure_of(*space_.exchange);
    if (step_.sampled && !has_draw_params()) StoreArgmax::finish(step_.sampled, step_.num_logits);
    for (i64 i = 0; i < step_.num_output_rows; i++) {
      const i64 token = step_.sampled[i];
      step_.last_tokens[step_.output_rows[i]] = (i32)(token < 0 ? ~token : token);
    }
    return OK;
  }

 private:
  bool has_draw_params() const { return step_.sampled && step_.draw_params; }
  bool plan_step_adapters() {
    if (!step_.adapters) return true;
    return plan_adapters(*step_.adapters, nullptr, step_.num_tokens, space_.adapted_tokens, adapted_.tokens) &&
           plan_adapters(*step_.adapters, step_.logits_indices, step_.num_logits, space_.adapted_logits, adapted_.logits);
  }

  const Model& m_;
  const Pool& pool_;
  const Step& step_;
  Workspace& space_;
  AttentionPlan plans_[MAX_HEAD_KINDS];
  StepAdapted adapted_;
};

template <class E>
Status run_layers(const Model& model, const Pool& pool, const Step& step, Workspace& space, int threads) {
  StackJob<E> job(model, pool, step, space);
  if (const Status status = job.prepare(threads)) return status;
  space.workers.run(threads, [&](const Member& member) { job.work(member); });
  return job.end();
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
