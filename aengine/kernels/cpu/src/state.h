// Recurrent layers: causal convolutions over the latest inputs, and the rules of `RecurOp`. They read a row's state of the tokens
// before the step from its pages, and write that of all tokens; `recurrence.py` says where what lies. Of the latest of these tokens a state
// may have the inputs alone: they are replayed before those of the step, which do the same if they are drafts.
//
// A head's matrix is computed in blocks of columns, one token after the other, so that the bits do not depend on how tokens are cut into
// steps, on rows or on threads.
#pragma once
#include "activations.h"
#include "attention_plan.h"
#include "norm.h"

namespace aengine {

constexpr i64 STATE_LINE = 64;  // bytes

// The lines of states in the pool's pages.
class StatePages {
 public:
  StatePages(const Pool& pool, const StateLayer& layer) : pool_(pool), layer_(layer) {}

  i64 lines_per_piece() const { return layer_.lines_per_piece; }

  // Line `line` behind the beginning of a piece of a state with these pages.
  u8* line(const i32* pages, i64 piece, i64 line) const {
    piece += line / layer_.lines_per_piece;
    const i64 number = piece % layer_.pieces_per_page, page = pages[piece / layer_.pieces_per_page];
    const bool of_keys = number < pool_.layers_per_page;
    void* base = of_keys ? pool_.keys[number] : pool_.values[number - pool_.layers_per_page];
    return static_cast<u8*>(base) + page * (of_keys ? pool_.key_page_bytes : pool_.value_page_bytes) + line % layer_.lines_per_piece * STATE_LINE;
  }

  // A line of the input of a token that is in the pages.
  u8* input(const i32* pages, i64 number, i64 input) const { return line(pages, layer_.tail, number * layer_.num_inputs + input); }

  bool whole_blocks() const { return layer_.blocks_per_piece > 0; }

  // A block, which is in one piece, or its first line.
  float* block(const i32* pages, i64 number) const {
    const i64 per_piece = layer_.blocks_per_piece;
    const i64 piece = layer_.first + (per_piece ? number / per_piece : number * layer_.pieces_per_block);
    return reinterpret_cast<float*>(line(pages, piece, per_piece ? number % per_piece * block_lines() : 0));
  }

  // Copies a block from or to pages, wherever its lines are.
  void load_block(const i32* pages, i64 number, float* to) const {
    each_run(pages, number, [&](u8* stored, i64 at, i64 bytes) { memcpy(reinterpret_cast<u8*>(to) + at, stored, (size_t)bytes); });
  }
  void store_block(const i32* pages, i64 number, const float* from) const {
    each_run(pages, number, [&](u8* stored, i64 at, i64 bytes) { memcpy(stored, reinterpret_cast<const u8*>(from) + at, (size_t)bytes); });
  }

 private:
  i64 block_lines() const { return layer_.key_dim * layer_.width * 4 / STATE_LINE; }

  template <class F>
  void each_run(const i32* pages, i64 number, F&& f) const {
    if (whole_blocks()) return f(reinterpret_cast<u8*>(block(pages, number)), 0, block_lines() * STATE_LINE);
    const i64 piece = layer_.first + number * layer_.pieces_per_block;
    for (i64 begin = 0; begin < block_lines(); begin += layer_.lines_per_piece) {
      const i64 count = smaller(layer_.lines_per_piece, block_lines() - begin);
      f(line(pages, piece, begin), begin * STATE_LINE, count * STATE_LINE);
    }
  }

  const Pool& pool_;
  const StateLayer& layer_;
};

// The tokens of a row of a step, and where its states are.
struct StateRow {
  StateRow(const Step& step, const Pool& pool, i64 row)
      : first(step.qo_indptr[row]), count(step.qo_indptr[row + 1] - first), begins(sequence_length(step, row, pool.page_size) == count),
        replays(step.state_replays[row]), drafts(step.state_drafts[row] != 0), reads(step.state_reads + row * step.state_pages),
        writes(step.state_writes + row * step.state_pages), step_(step) {
    const i32* rows = step.kept_state_rows;
    kept_ = std::lower_bound(rows, rows + step.num_kept_states, (i32)row) - rows;
    while (kept_ + num_kept_ < step.num_kept_states && rows[kept_ + num_kept_] == row) num_kept_++;
  }

  // How many tokens the matrices get, from the first replayed one on.
  i64 certain() const { return replays + (drafts ? 0 : count); }

  // Calls f(begin, end, pages) for the certain tokens up to each state that is kept, and its pages, and for the others, with null.
  template <class F>
  void each_part(F&& f) const {
    i64 begin = 0;
    for (i64 i = kept_; i < kept_ + num_kept_; i++) {
      const i64 end = step_.kept_state_lengths[i];
      f(begin, end, step_.kept_state_pages + i * step_.state_pages);
      begin = end;
    }
    f(begin, certain(), (const i32*)nullptr);
  }

  const i64 first, count;  // tokens of the step
  const bool begins;       // there are no tokens before
  const i64 replays;       // tokens before those of the step that the matrices do not have yet
  const bool drafts;
  const i32 *reads, *writes;

 private:
  const Step& step_;
  i64 kept_ = 0, num_kept_ = 0;
};

constexpr i64 CHANNEL_RUN = 256, MAX_PENDING = 17;

// Some channels of a token, from the inputs of all taps: those from `i` on of each, which have the weights from `channel` on.
template <class E>
AE_INLINE VecF convolved_channels(const RecurOp& op, const E* const* inputs, i64 i, i64 channel) {
  VecF total = load(inputs[0] + i) * load(op.conv + channel);
  for (i64 tap = 1; tap < op.state.taps; tap++) total = fma(load(inputs[tap] + i), load(op.conv + tap * op.conv_stride + channel), total);
  return silu(op.conv_bias ? total + load(op.conv_bias + channel) : total);
}

// Some elements of `count` inputs that the state before the step has, from the `first` on; zeros of a row without one.
template <class E>
void load_inputs(const StatePages& states, const StateRow& row, i64 first, i64 count, i64 element, i64 width, E (*to)[CHANNEL_RUN]) {
  constexpr i64 PER_LINE = STATE_LINE / (i64)sizeof(E);
  for (i64 i = 0; i < width; i += PER_LINE) {
    for (i64 j = 0; j < count; j++) {
      void* line = to[j] + i;
      row.begins ? memset(line, 0, STATE_LINE) : memcpy(line, states.input(row.reads, (element + i) / PER_LINE, first + j), STATE_LINE);
    }
  }
}

// A task is a row in some of the channels.
template <class E>
void convolve_states(const Member& member, const RecurOp& op, const Pool& pool, const Step& step, const StepRows<E>& buffers) {
  constexpr i64 PER_LINE = STATE_LINE / (i64)sizeof(E);
  const StateLayer& layer = op.state;
  const StatePages states(pool, layer);
  const Rows<E>&in = buffers[op.mixed], &out = buffers[op.convolved];
  const i64 padded = round_up(layer.channels, PER_LINE), runs = ceil_div(padded, CHANNEL_RUN), before = layer.taps - 1;
  member.each(step.num_rows * runs, [&](i64 task) {
    const StateRow row(step, pool, task / runs);
    const i64 channel = task % runs * CHANNEL_RUN, width = smaller(CHANNEL_RUN, padded - channel);
    alignas(64) E earlier[MAX_TAPS - 1][CHANNEL_RUN];
    load_inputs(states, row, row.replays, before, channel, width, earlier);
    for (i64 token = 0; token < row.count; token++) {
      const E* inputs[MAX_TAPS];
      for (i64 tap = 0; tap < layer.taps; tap++) {
        const i64 at = token - before + tap;
        inputs[tap] = at < 0 ? earlier[before + at] : in.row(row.first + at) + channel;
      }
      E* to = out.row(row.first + token) + channel;
      for (i64 i = 0; i < width; i += LANES) store(to + i, convolved_channels(op, inputs, i, channel + i));
    }
  });
}

// Some channels of `count` replayed tokens from the `first` on, to rows of `out`.
template <class E>
AE_NOINLINE void convolve_replayed(const RecurOp& op, const StatePages& states, const i32* pages, i64 first, i64 count, i64 channel, i64 width,
                                   E* out, i64 stride) {
  constexpr i64 PER_LINE = STATE_LINE / (i64)sizeof(E);
  const E* inputs[MAX_TAPS - 1 + MAX_PENDING];
  for (i64 i = 0; i < width;) {
    const i64 within = (channel + i) % PER_LINE, end = i + smaller(width - i, PER_LINE - within);
    for (i64 j = 0; j < op.state.taps - 1 + count; j++) {
      inputs[j] = reinterpret_cast<const E*>(states.input(pages, (channel + i) / PER_LINE, first + j)) + within;
    }
    for (i64 begin = i; i < end; i += LANES) {
      for (i64 t = 0; t < count; t++) store(out + t * stride + i, convolved_channels(op, inputs + t, i - begin, channel + i));
    }
  }
}

// Writes the inputs that states have, when nobody reads earlier ones any more. A task is a row in some elements of these.
template <class E>
void keep_inputs(const Member& member, const RecurOp& op, const Pool& pool, const Step& step, const StepRows<E>& buffers) {
  constexpr i64 PER_LINE = STATE_LINE / (i64)sizeof(E);
  const StateLayer& layer = op.state;
  const StatePages states(pool, layer);
  const Rows<E>&mixed = buffers[op.mixed], &gates = buffers[op.gates];
  const i64 padded = round_up(layer.channels + layer.gates, PER_LINE), runs = ceil_div(padded, CHANNEL_RUN), before = layer.taps - 1;
  member.each(step.num_rows * runs, [&](i64 task) {
    const StateRow row(step, pool, task / runs);
    const i64 first = task % runs * CHANNEL_RUN, width = smaller(CHANNEL_RUN, padded - first);
    const i64 of_mixed = smaller(width, larger((i64)0, layer.channels - first));
    alignas(64) E known[MAX_TAPS - 1 + MAX_PENDING][CHANNEL_RUN];
    load_inputs(states, row, 0, before + row.replays, first, width, known);
    // The inputs of `count` tokens from one on, which is counted from the first replayed one.
    const auto write = [&](const i32* pages, i64 token, i64 count) {
      for (i64 j = 0; j < count; j++) {
        alignas(64) E own[CHANNEL_RUN];
        const i64 at = token + j - row.replays;  // negative: before the step
        if (at >= 0) {
          memcpy(static_cast<void*>(own), mixed.row(row.first + at) + first, (size_t)of_mixed * sizeof(E));
          const E* behind = gates.row(row.first + at) + (first + of_mixed - layer.channels);
          if (of_mixed < width) memcpy(static_cast<void*>(own + of_mixed), behind, (size_t)(width - of_mixed) * sizeof(E));
        }
        const E* from = at < 0 ? known[before + token + j] : own;
        for (i64 i = 0; i < width; i += PER_LINE) memcpy(states.input(pages, (first + i) / PER_LINE, j), from + i, STATE_LINE);
      }
    };
    row.each_part([&](i64, i64 end, const i32* kept) {
      if (kept) write(kept, end - before, before);
    });
    write(row.writes, row.certain() - before, before + (row.drafts ? row.count : 0));
  });
}

constexpr i64 RECUR_RUN = 16, MAX_STATE_KEYS = 256, LEAST_MOVED = 4;

// What all blocks of a head need of some tokens: q and k; what the state is multiplied with; how much of v, or of what is missing of it, is
// added; the product of q and k; and what is added of v to the outputs.
struct RecurTokens {
  alignas(64) float q[MAX_PENDING][MAX_STATE_KEYS], k[MAX_PENDING][MAX_STATE_KEYS];
  // With a decay for each row: these, and what q and k are after their product with them.
  alignas(64) float decays[MAX_PENDING][MAX_STATE_KEYS], decayed_q[MAX_PENDING][MAX_STATE_KEYS], decayed_k[MAX_PENDING][MAX_STATE_KEYS];
  float decay[MAX_PENDING], rate[MAX_PENDING], qk[MAX_PENDING], skip;
};

// log(1 + exp(x)): the logarithm by the series of the inverse hyperbolic tangent.
AE_INLINE VecF softplus(VecF x) {
  const VecF magnitude = larger(x, -x), y = exp(-magnitude), z = y / (2.f + y), s = z * z;
  VecF series = splat(1.f / 13.f);
  for (const float coefficient : {1.f / 11.f, 1.f / 9.f, 1.f / 7.f, 1.f / 5.f, 1.f / 3.f, 1.f}) series = fma(series, s, splat(coefficient));
  return fma(2.f * z, series, larger(x, VecF{}));
}

// What a head reads of some tokens: q and k, and gates for its steps and, of the gated delta rule, one for the rate.
template <class E>
struct HeadInputs {
  const E *q, *k;
  i64 stride;
  const E *step, *rate;
  i64 gate_stride;
};

// Which of a token's gates a head reads.
struct HeadGates {
  HeadGates(const RecurOp& op, i64 head)
      : num_steps(!op.step_bias ? 0 : op.rule == Rule::KIMI_DELTA ? op.state.key_dim : op.rule == Rule::MAMBA1 ? op.state.value_dim : 1),
        step(op.state.gates - (op.state.heads - head) * num_steps), rate(head) {}
  const i64 num_steps, step, rate;
};

constexpr bool is_delta(Rule rule) { return rule == Rule::DELTA || rule == Rule::KIMI_DELTA; }

// The numbers of a head divided by their length, and multiplied.
template <class E>
AE_INLINE void to_unit(const E* x, i64 size, float factor, float* out) {
  WideSum squares;
  squares.each(size, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE {
    const VecF v = load(x + i);
    sum = fma(v, v, sum);
  });
  const float scale = factor / std::sqrt(squares.total() + 1e-6f);
  for (i64 i = 0; i < size; i += LANES) store(out + i, load(x + i) * scale);
}

template <class E>
AE_NOINLINE void prepare_tokens(const RecurOp& op, i64 head, const HeadInputs<E>& inputs, i64 count, RecurTokens& tokens) {
  const i64 dim = op.state.key_dim;
  const float rate = op.rates[head], scale = 1.f / std::sqrt((float)dim);
  tokens.skip = op.skip ? op.skip[head] : 0.f;
  for (i64 t = 0; t < count; t++) {
    const E *q = inputs.q + t * inputs.stride, *k = inputs.k + t * inputs.stride;
    if (is_delta(op.rule)) {
      to_unit(q, dim, scale, tokens.q[t]);
      to_unit(k, dim, 1.f, tokens.k[t]);
    } else {
      for (i64 i = 0; i < dim; i += LANES) store(tokens.q[t] + i, load(q + i)), store(tokens.k[t] + i, load(k + i));
    }
    if (op.rule == Rule::MAMBA1) continue;
    WideSum products;
    products.each(dim, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE { sum = fma(load(tokens.q[t] + i), load(tokens.k[t] + i), sum); });
    tokens.qk[t] = products.total();
    if (op.rule == Rule::KIMI_DELTA) {
      for (i64 i = 0; i < dim; i += LANES) {
        const VecF decay = exp(-rate * softplus(load(inputs.step + t * inputs.gate_stride + i) + load(op.step_bias + head * dim + i)));
        store(tokens.decays[t] + i, decay);
        store(tokens.decayed_q[t] + i, decay * load(tokens.q[t] + i));
        store(tokens.decayed_k[t] + i, decay * load(tokens.k[t] + i));
      }
      tokens.rate[t] = 1.f / (1.f + exp(-widen(inputs.rate[t * inputs.gate_stride])));
      continue;
    }
    float dt = 1.f;
    if (op.step_bias) {
      const float x = widen(inputs.step[t * inputs.gate_stride]) + op.step_bias[head];
      dt = x > 20.f ? x : softplus(splat(x))[0];
    }
    tokens.decay[t] = exp(-rate * dt);
    tokens.rate[t] = op.rule == Rule::MAMBA2 ? dt : 1.f / (1.f + exp(-widen(inputs.rate[t * inputs.gate_stride])));
  }
}

// Of replayed tokens, which are in pages.
template <class E>
struct ReplayedTokens {
  alignas(64) E q[MAX_PENDING][MAX_STATE_KEYS], k[MAX_PENDING][MAX_STATE_KEYS], v[MAX_PENDING][MAX_BLOCK_COLUMNS];
  alignas(64) E out[MAX_PENDING][MAX_BLOCK_COLUMNS];  // nobody reads it
  alignas(64) E step[MAX_PENDING][MAX_STATE_KEYS];
  E rate[MAX_PENDING][MAX_STATE_KEYS];  // the first of each

  HeadInputs<E> load(const RecurOp& op, const StatePages& states, const i32* pages, i64 head, i64 first, i64 count) {
    constexpr i64 PER_LINE = STATE_LINE / (i64)sizeof(E);
    const StateLayer& layer = op.state;
    const i64 key_head = head / (layer.heads / layer.key_heads), dim = layer.key_dim;
    const auto gate = [&](i64 token, i64 number) {
      const i64 at = layer.channels + number;
      return reinterpret_cast<const E*>(states.input(pages, at / PER_LINE, layer.taps - 1 + token))[at % PER_LINE];
    };
    const HeadGates gates(op, head);
    if (op.rule == Rule::MAMBA1) {
      for (i64 t = 0; t < count; t++) {
        for (i64 i = 0; i < dim; i++) q[t][i] = gate(first + t, key_head * dim + i), k[t][i] = gate(first + t, (layer.key_heads + key_head) * dim + i);
      }
    } else {
      convolve_replayed(op, states, pages, first, count, key_head * dim, dim, q[0], MAX_STATE_KEYS);
      convolve_replayed(op, states, pages, first, count, (layer.key_heads + key_head) * dim, dim, k[0], MAX_STATE_KEYS);
    }
    for (i64 t = 0; t < count; t++) {
      for (i64 i = 0; i < gates.num_steps; i++) step[t][i] = gate(first + t, gates.step + i);
      if (is_delta(op.rule)) rate[t][0] = gate(first + t, gates.rate);
    }
    return {q[0], k[0], MAX_STATE_KEYS, step[0], rate[0], MAX_STATE_KEYS};
  }
};

// The products of some columns of a block with k and q of the first token, by column. The block comes from memory: other columns of its rows
// do so at once, and later rows ahead of their turn.
template <Rule RULE, int VECTORS>
AE_INLINE void first_products(const RecurTokens& tokens, i64 dim, i64 width, const float* from, float* by_k, float* by_q) {
  constexpr i64 AHEAD = 16;
  VecF of_k[VECTORS] = {}, of_q[VECTORS] = {};
  constexpr bool BY_CHANNEL = RULE == Rule::KIMI_DELTA;
  const float *keys = BY_CHANNEL ? tokens.decayed_k[0] : tokens.k[0], *queries = BY_CHANNEL ? tokens.decayed_q[0] : tokens.q[0];
  for (i64 i = 0; i < dim; i++) {
    const VecF k = splat(keys[i]), q = splat(queries[i]);
    for (int j = 0; j < VECTORS; j++) {
      const float* at = from + i * width + j * LANES;
      if (j * LANES % 16 == 0) __builtin_prefetch(at + AHEAD * width);
      const VecF s = load(at);
      if constexpr (RULE != Rule::MAMBA2) of_k[j] = fma(s, k, of_k[j]);
      of_q[j] = fma(s, q, of_q[j]);
    }
  }
  for (int j = 0; j < VECTORS; j++) store(by_k + j * LANES, of_k[j]), store(by_q + j * LANES, of_q[j]);
}

// Some columns of a block over `count` tokens: from `from` to `to`, which may be the same. `v` are the tokens' values in these columns, and
// `out` their outputs. What a token adds to the state is added in the pass that multiplies the state with q and k of the next one; those
// of the first one are given. Of Mamba-2 all of v is added, not what is missing of it.
template <Rule RULE, int VECTORS, class E>
AE_INLINE void recur_columns(const RecurTokens& tokens, i64 count, i64 dim, i64 width, const float* from, float* to, const float* first_by_k,
                             const float* first_by_q, const E* v, i64 stride, E* out, i64 out_stride) {
  VecF by_k[VECTORS], by_q[VECTORS];
  for (int j = 0; j < VECTORS; j++) by_k[j] = load(first_by_k + j * LANES), by_q[j] = load(first_by_q + j * LANES);
  for (i64 t = 0; t < count; t++) {
    constexpr bool DELTA = RULE == Rule::DELTA, BY_CHANNEL = RULE == Rule::KIMI_DELTA;
    const VecF decay = splat(BY_CHANNEL ? 1.f : tokens.decay[t]);
    VecF added[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      const VecF value = load(v + t * stride + j * LANES);
      added[j] = splat(tokens.rate[t]) * (DELTA ? fma(-decay, by_k[j], value) : BY_CHANNEL ? value - by_k[j] : value);
      const VecF product = fma(splat(tokens.qk[t]), added[j], BY_CHANNEL ? by_q[j] : decay * by_q[j]);
      store(out + t * out_stride + j * LANES, DELTA || BY_CHANNEL ? product : splat(tokens.skip) * value + product);
      by_k[j] = by_q[j] = VecF{};
    }
    const i64 next = t + 1 < count ? t + 1 : t;
    const float* keys = tokens.k[t];
    const float *next_k = BY_CHANNEL ? tokens.decayed_k[next] : tokens.k[next], *next_q = BY_CHANNEL ? tokens.decayed_q[next] : tokens.q[next];
    for (i64 i = 0; i < dim; i++) {
      const VecF forgets = BY_CHANNEL ? splat(tokens.decays[t][i]) : decay;
      const VecF key = splat(keys[i]), k = splat(next_k[i]), q = splat(next_q[i]);
      for (int j = 0; j < VECTORS; j++) {
        const VecF s = fma(key, added[j], forgets * load(from + i * width + j * LANES));
        store(to + i * width + j * LANES, s);
        if constexpr (RULE != Rule::MAMBA2) by_k[j] = fma(s, k, by_k[j]);
        by_q[j] = fma(s, q, by_q[j]);
      }
    }
    from = to;
  }
}

template <Rule RULE, class E>
AE_NOINLINE void recur_block(const RecurTokens& tokens, i64 count, i64 dim, i64 width, i64 columns, const float* from, float* to, const E* v,
                             i64 stride, E* out, i64 out_stride) {
  alignas(64) float by_k[MAX_BLOCK_COLUMNS], by_q[MAX_BLOCK_COLUMNS];
  i64 column = 0;
  const auto multiply = [&](auto vectors) {
    constexpr int VECTORS = decltype(vectors)::value;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES) {
      first_products<RULE, VECTORS>(tokens, dim, width, from + column, by_k + column, by_q + column);
    }
  };
  multiply(std::integral_constant<int, 4>{});
  multiply(std::integral_constant<int, 1>{});
  column = 0;
  // The columns of several tokens are moved together: in their block they are so far apart that they fill few sets of the L1 cache.
  alignas(64) float together[MAX_STATE_KEYS * 4 * LANES];
  const auto run = [&](auto vectors) {
    constexpr int VECTORS = decltype(vectors)::value;
    constexpr i64 SIZE = VECTORS * LANES;
    const bool moves = count >= LEAST_MOVED && width > SIZE;
    for (; column + SIZE <= columns; column += SIZE) {
      const auto recur = [&](i64 stride_of_state, const float* before, float* after) {
        recur_columns<RULE, VECTORS>(tokens, count, dim, stride_of_state, before, after, by_k + column, by_q + column, v + column, stride,
                                     out + column, out_stride);
      };
      if (!moves) {
        recur(width, from + column, to + column);
        continue;
      }
      for (i64 i = 0; i < dim; i++) memcpy(together + i * SIZE, from + i * width + column, sizeof(float) * SIZE);
      recur(SIZE, together, together);
      for (i64 i = 0; i < dim; i++) memcpy(to + i * width + column, together + i * SIZE, sizeof(float) * SIZE);
    }
  };
  if constexpr (RULE == Rule::MAMBA2) run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

// Some columns of a block of MAMBA1 over `count` tokens, as `recur_block`. `column`: the first one among those of all heads.
template <class E>
AE_NOINLINE void recur_channels(const RecurOp& op, const RecurTokens& tokens, const E* steps, i64 step_stride, i64 count, i64 columns, i64 column,
                                const float* from, float* to, const E* v, i64 stride, E* out, i64 out_stride) {
  const i64 dim = op.state.key_dim, width = op.state.width, all = op.state.heads * op.state.value_dim;
  for (i64 at = 0; at < columns; at += LANES) {
    const VecF bias = load(op.step_bias + column + at), skip = load(op.skip + column + at);
    const float* before = from + at;
    for (i64 t = 0; t < count; t++) {
      const VecF value = load(v + t * stride + at), dt = softplus(load(steps + t * step_stride + at) + bias);
      const VecF added = dt * value;
      VecF sum = {};
      for (i64 i = 0; i < dim; i++) {
        const VecF decay = exp2(larger(load(op.rates + i * all + column + at) * dt, splat(-126.f)));
        const VecF s = fma(splat(tokens.k[t][i]), added, decay * load(before + i * width));
        store(to + i * width + at, s);
        sum = fma(s, splat(tokens.q[t][i]), sum);
      }
      store(out + t * out_stride + at, skip * value + sum);
      before = to + at;
    }
  }
}

// A task is a row in some blocks of a head.
template <class E>
void recur(const Member& member, const RecurOp& op, const Pool& pool, const Step& step, const StepRows<E>& buffers) {
  const StateLayer& layer = op.state;
  const StatePages states(pool, layer);
  const Rows<E>&convolved = buffers[op.convolved], &gates = buffers[op.gates], &out = buffers[op.out];
  const i64 blocks = ceil_div(layer.value_dim, layer.width), keys = layer.key_heads * layer.key_dim;
  const i64 values = op.rule == Rule::MAMBA1 ? 0 : 2 * keys;  // channel of the first one
  i64 split = 1;
  while (split < blocks && step.num_rows * layer.heads * split < 4 * member.size()) split *= 2;
  const i64 per_task = ceil_div(blocks, split);
  split = ceil_div(blocks, per_task);
  member.each(step.num_rows * layer.heads * split, [&](i64 task) {
    const StateRow row(step, pool, task / (layer.heads * split));
    const i64 head = task / split % layer.heads, begin_block = task % split * per_task, end_block = smaller(blocks, begin_block + per_task);
    const i64 key_head = head / (layer.heads / layer.key_heads);
    RecurTokens tokens;
    ReplayedTokens<E> replayed;
    alignas(64) float scratch[MAX_BLOCK_FLOATS];
    const i32* from_pages = row.reads;
    bool begins = row.begins;
    const auto own_inputs = [&](i64 at) -> HeadInputs<E> {
      const E *one = convolved.row(at), *gate = gates.row(at);
      const HeadGates of(op, head);
      const bool are_gates = op.rule == Rule::MAMBA1;
      const E *q = (are_gates ? gate : one) + key_head * layer.key_dim, *k = q + keys;
      return {q, k, are_gates ? gates.stride : convolved.stride, gate + of.step, gate + of.rate, gates.stride};
    };
    const auto run = [&](const HeadInputs<E>& inputs, i64 count, i64 column, const float* from, float* to, const E* v, i64 stride, E* to_out,
                         i64 out_stride) {
      const i64 columns = smaller(layer.width, layer.value_dim - column);
      const auto rule = [&](auto of) {
        recur_block<decltype(of)::value>(tokens, count, layer.key_dim, layer.width, columns, from, to, v, stride, to_out, out_stride);
      };
      switch (op.rule) {
        case Rule::DELTA: return rule(std::integral_constant<Rule, Rule::DELTA>{});
        case Rule::KIMI_DELTA: return rule(std::integral_constant<Rule, Rule::KIMI_DELTA>{});
        case Rule::MAMBA2: return rule(std::integral_constant<Rule, Rule::MAMBA2>{});
        case Rule::MAMBA1:
          recur_channels(op, tokens, inputs.step + column, inputs.gate_stride, count, columns, head * layer.value_dim + column, from, to, v, stride,
                         to_out, out_stride);
      }
    };
    // The block of the state before what is computed now, in pages or scratch; `to` is where zeros are written if there is none.
    const auto block_before = [&](i64 number, float* to) -> const float* {
      if (begins) return static_cast<const float*>(memset(to, 0, (size_t)(layer.key_dim * layer.width) * sizeof(float)));
      if (states.whole_blocks()) return states.block(from_pages, number);
      states.load_block(from_pages, number, scratch);
      return scratch;
    };
    row.each_part([&](i64 begin, i64 end, const i32* kept) {
      for (i64 token = begin, count; token < end; token += count) {
        const i64 own = token - row.replays;  // negative: replayed
        count = smaller(RECUR_RUN, (own < 0 ? smaller(end, row.replays) : end) - token);
        const auto inputs = own < 0 ? replayed.load(op, states, row.reads, head, token, count) : own_inputs(row.first + own);
        prepare_tokens(op, head, inputs, count, tokens);
        for (i64 block = begin_block; block < end_block; block++) {
          const i64 number = head * blocks + block, column = block * layer.width, channel = head * layer.value_dim + column;
          float* to = states.whole_blocks() ? states.block(row.writes, number) : scratch;
          const float* from = block_before(number, to);
          if (own < 0) {
            const i64 columns = smaller(layer.width, layer.value_dim - column);
            convolve_replayed(op, states, row.reads, token, count, values + channel, columns, replayed.v[0], MAX_BLOCK_COLUMNS);
            run(inputs, count, column, from, to, replayed.v[0], MAX_BLOCK_COLUMNS, replayed.out[0], MAX_BLOCK_COLUMNS);
          } else {
            const i64 at = row.first + own;
            run(inputs, count, column, from, to, convolved.row(at) + values + channel, convolved.stride, out.row(at) + channel, out.stride);
          }
          if (!states.whole_blocks()) states.store_block(row.writes, number, scratch);
        }
        from_pages = row.writes;
        begins = false;
      }
      for (i64 block = begin_block; kept && block < end_block; block++) {
        const i64 number = head * blocks + block;
        if (states.whole_blocks()) {
          states.store_block(kept, number, states.block(row.writes, number));
        } else {
          states.load_block(row.writes, number, scratch);
          states.store_block(kept, number, scratch);
        }
      }
    });
    if (!row.drafts) return;
    const auto inputs = own_inputs(row.first);
    prepare_tokens(op, head, inputs, row.count, tokens);
    for (i64 block = begin_block; block < end_block; block++) {
      const i64 number = head * blocks + block, column = block * layer.width, channel = head * layer.value_dim + column;
      const float* from = block_before(number, scratch);
      if (from_pages != row.writes || begins) states.store_block(row.writes, number, from);
      run(inputs, row.count, column, from, scratch, convolved.row(row.first) + values + channel, convolved.stride, out.row(row.first) + channel,
          out.stride);
    }
  });
}

// out = norm(out) * activation(gate), head by head.
template <class E>
void gate_rows(const Member& member, const GateOp& op, const StepRows<E>& buffers, i64 rows) {
  const Rows<E>&out = buffers[op.out], &gates = buffers[op.gate];
  member.each_run(rows, 2, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) {
      for (i64 head = 0; head < op.heads; head++) {
        E* x = out.row(row) + head * op.width;
        const E* gate = gates.row(row) + op.first + head * op.width;
        const Moments moments = op.norm.weight ? moments_of(x, op.width, op.norm.eps, op.norm.kind) : Moments{};
        for (i64 i = 0; i < op.width; i += LANES) {
          const VecF g = load(gate + i), factor = op.sigmoid ? 1.f / (1.f + exp(-g)) : silu(g);
          store(x + i, (op.norm.weight ? normed(x, i, op.norm, moments) : load(x + i)) * factor);
        }
      }
    }
  });
}

}  // namespace aengine
