// How the experts of a step are computed. The router's choices are sorted by expert, so that an expert's matrices are read once however
// many tokens chose it; the grouped product shares all experts' panels among the threads. Each choice has a row of its own in the
// outputs; at the end a token adds up those of its choices, in their order.
#include "experts.h"

#include <algorithm>

namespace aengine {

// How many inner activations the first product of an MLP makes, which has a gate for each or none.
static i64 inner_features(const PackedLinear& first) { return first.out_features / (first.interleaved ? 2 : 1); }

// How large the buffers of a layer of experts are, in elements.
struct ExpertSizes {
  i64 rows, choices, num_groups;  // at most
  i64 logits_stride, gated_stride, shared_stride, own_gated_stride, own_shared_stride, out_stride;
  ExpertSizes(const ExpertsOp& e, i64 tokens)
      : rows(tokens),
        choices(tokens * e.top_k),
        num_groups(smaller(e.num_experts, tokens * e.top_k)),
        logits_stride(round_up(e.router->out_features, PANEL)),
        gated_stride(round_up(e.down->in_features, PANEL)),
        shared_stride(e.shared_down ? round_up(e.shared_down->in_features, PANEL) : 0),
        own_gated_stride(e.gated_firsts ? round_up(inner_features(*e.gate_up), PANEL) : gated_stride),
        own_shared_stride(e.shared_firsts ? round_up(inner_features(*e.shared_gate_up), PANEL) : shared_stride),
        out_stride(round_up(e.down->out_features, PANEL)) {}
};

// Whether the first product reads a row of each choice, not of each token.
static bool has_own_rows(const ExpertsOp& e) { return e.gate_up_orders || e.scaled_inputs; }

// A choice is a token and one of its top_k. Sorted by expert, each has a place.
template <class E>
struct ExpertBuffers : ExpertSizes {
  float* logits;   // [rows, logits_stride]
  float* weights;  // [rows, top_k + 1], the last of the shared expert
  i32* chosen;     // [rows, top_k], experts
  i32* places;     // [rows, top_k]
  i32* tokens;     // [choices], of each place
  Group* groups;   // [2][num_groups], for gate_up and for down
  Rows<E> gated;   // [choices], of each place
  Rows<E> shared;  // [rows], of the shared MLP
  Rows<E> own_gated, own_shared;  // this rank's columns of both
  Rows<float> outputs;  // [choices + rows], of each place, then of the shared MLP

  ExpertBuffers(const Buffers& space, const ExpertsOp& e, i64 num_tokens) : ExpertSizes(e, num_tokens) {
    logits = space.routing.as<float>(), weights = logits + rows * logits_stride;
    chosen = space.choices.as<i32>(), places = chosen + choices, tokens = places + choices;
    groups = space.groups.as<Group>();
    gated = {space.expert_gated.as<E>(), gated_stride};
    shared = {gated.row(choices), shared_stride};
    own_gated = e.gated_firsts ? Rows<E>{space.expert_own_gated.as<E>(), own_gated_stride} : gated;
    own_shared = e.shared_firsts ? Rows<E>{own_gated.row(choices), own_shared_stride} : shared;
    outputs = {space.expert_outputs.as<float>(), out_stride};
  }
};

namespace {

// The index of the largest value that is not taken, the lowest of equal ones; a NaN only if there is nothing else.
i64 find_largest(const float* values, const bool* taken, i64 count) {
  i64 best = -1;
  for (i64 i = 0; i < count; i++) {
    if (!taken[i] && (best < 0 || values[i] > values[best] || (values[best] != values[best] && values[i] == values[i]))) best = i;
  }
  return best;
}

// Logits, with room to a multiple of PANEL -> scores: their softmax or sigmoids.
void score_experts(const ExpertsOp& e, float* logits) {
  for (i64 i = e.num_experts; i < round_up(e.num_experts, LANES); i++) logits[i] = 0.f;
  if (e.scoring == SIGMOID) {
    for (i64 i = 0; i < e.num_experts; i += LANES) store(logits + i, 1.f / (1.f + exp(-load(logits + i))));
    return;
  }
  float top = logits[0], total = 0;
  for (i64 i = 1; i < e.num_experts; i++) top = logits[i] > top ? logits[i] : top;
  for (i64 i = 0; i < e.num_experts; i += LANES) store(logits + i, exp(load(logits + i) - top));
  for (i64 i = 0; i < e.num_experts; i++) total += logits[i];
  for (i64 i = 0; i < e.num_experts; i++) logits[i] /= total;
}

// Marks all experts as taken whose group is not one of the `top_groups` best, by the sum of the `group_top` largest values of each.
void exclude_groups(const ExpertsOp& e, const float* values, bool* taken) {
  const i64 size = e.num_experts / e.num_groups;
  float ranks[MAX_EXPERTS] = {};
  bool allowed[MAX_EXPERTS] = {};
  for (i64 group = 0; group < e.num_groups; group++) {
    bool seen[MAX_EXPERTS] = {};
    for (i64 i = 0; i < smaller(e.group_top, size); i++) {
      const i64 best = find_largest(values + group * size, seen, size);
      ranks[group] += values[group * size + best];
      seen[best] = true;
    }
  }
  for (i64 i = 0; i < e.top_groups; i++) allowed[find_largest(ranks, allowed, e.num_groups)] = true;
  for (i64 i = 0; i < e.num_experts; i++) taken[i] = !allowed[i / size];
}

// The experts of one token, the best first, and their weights; then the weight of the shared expert. Overwrites the logits.
void choose_experts(const ExpertsOp& e, float* logits, i32* chosen, float* weights) {
  const float gate = e.shared_gate ? 1.f / (1.f + exp(-logits[e.num_experts])) : 1.f;
  score_experts(e, logits);
  float values[MAX_EXPERTS], total = 1e-20f;  // as DeepSeek's routers have it
  bool taken[MAX_EXPERTS] = {};
  for (i64 i = 0; i < e.num_experts; i++) values[i] = e.correction ? logits[i] + e.correction[i] : logits[i];
  if (e.num_groups > 1) exclude_groups(e, values, taken);
  for (i64 k = 0; k < e.top_k; k++) {
    const i64 best = find_largest(values, taken, e.num_experts);
    taken[best] = true;
    chosen[k] = (i32)best;
    total += logits[best];
  }
  const float factor = e.normalize ? e.scaling / total : e.scaling;
  for (i64 k = 0; k < e.top_k; k++) weights[k] = logits[chosen[k]] * factor * (e.expert_scale ? e.expert_scale[chosen[k]] : 1.f);
  weights[e.top_k] = gate;
}

// Sorts the choices of all tokens by expert, and makes the groups of both products.
template <class E>
void group_choices(const ExpertsOp& e, const ExpertBuffers<E>& b) {
  i64 ends[MAX_EXPERTS] = {};
  for (i64 i = 0; i < b.choices; i++) ends[b.chosen[i]]++;
  Group *gate_up = b.groups, *down = b.groups + b.num_groups;
  i64 place = 0;
  for (i64 expert = 0; expert < e.num_experts; expert++) {
    const i64 count = ends[expert];
    if (count) {
      *gate_up++ = {e.gate_up + expert, has_own_rows(e) ? nullptr : b.tokens + place, count, place, 0};
      *down++ = {e.down + expert, nullptr, count, place, 0};
    }
    ends[expert] = place;
    place += count;
  }
  std::fill(gate_up, b.groups + b.num_groups, Group{});
  std::fill(down, b.groups + 2 * b.num_groups, Group{});
  for (i64 i = 0; i < b.choices; i++) {
    b.places[i] = (i32)ends[b.chosen[i]]++;
    b.tokens[b.places[i]] = (i32)(i / e.top_k);
  }
}

// The rows of `in` with the columns in the order of the expert that reads them, one for each choice's place. `tokens`: the row of each
// place; null: the same.
template <class E>
Rows<E> order_columns(const Member& member, const Groups& groups, const PackedLinear* experts, const i32* orders, const Rows<E>& in,
                      const i32* tokens, const Buffers& space) {
  const i64 width = experts->in_features;
  const Rows<E> out = {space.expert_ordered.as<E>(), round_up(width, PANEL)};
  member.each(groups.size, [&](i64 index) {
    const Group& group = groups.list[index];
    const i32* order = orders + (group.count ? group.w - experts : 0) * width;
    for (i64 place = group.first; place < group.first + group.count; place++) {
      const E* from = in.row(tokens ? tokens[place] : place);
      for (i64 i = 0; i < width; i++) out.row(place)[i] = from[order[i]];
      std::fill(out.row(place) + width, out.row(place) + out.stride, E{});
    }
  });
  return out;
}

// For each choice its row of `in`, times its weight, at its place. `ordered`: `in` has the rows of places already.
template <class E>
Rows<E> scale_inputs(const Member& member, const ExpertsOp& e, const ExpertBuffers<E>& b, const Rows<E>& in, bool ordered,
                     const Buffers& space) {
  const i64 width = e.gate_up->in_features;
  const Rows<E> out = {space.expert_ordered.as<E>(), round_up(width, PANEL)};
  member.each(b.choices, [&](i64 choice) {
    const i64 token = choice / e.top_k, place = b.places[choice];
    const E* from = in.row(ordered ? place : token);
    const float weight = b.weights[token * (e.top_k + 1) + choice % e.top_k];
    E* to = out.row(place);
    for (i64 i = 0; i < width; i += LANES) store(to + i, load(from + i) * weight);
    std::fill(to + width, to + out.stride, E{});
  });
  return out;
}

// The sum of a token's choices from column `begin` on, to `out`.
template <class E, class Out>
AE_NOINLINE void add_choices(const ExpertBuffers<E>& b, const ExpertsOp& e, i64 token, i64 begin, i64 end, Out* out) {
  const float* weights = b.weights + token * (e.top_k + 1);
  const i64 count = e.top_k + (e.shared_down ? 1 : 0);
  for (i64 column = begin; column < end; column += LANES) {
    VecF total = {};
    for (i64 k = 0; k < count; k++) {
      const i64 row = k < e.top_k ? b.places[token * e.top_k + k] : b.choices + token;
      total = fma(load(b.outputs.row(row) + column), splat(k < e.top_k && e.scaled_inputs ? 1.f : weights[k]), total);
    }
    store(out + column, e.epilogue == ADD ? fma(total, splat(e.multiplier), load(out + column)) : total);
  }
}

}  // namespace

template <class E>
bool reserve_experts(Buffers& space, const ExpertsOp& e, i64 rows) {
  const ExpertSizes n(e, rows);
  return space.routing.reserve<float>(rows * (n.logits_stride + e.top_k + 1)) && space.choices.reserve<i32>(3 * n.choices) &&
         space.groups.reserve<Group>(2 * n.num_groups) && reserve_prepared(space, rows, larger(e.gate_up->in_features, n.shared_stride)) &&
         reserve_prepared(space, n.choices, n.gated_stride) && (!has_own_rows(e) || reserve_prepared(space, n.choices, e.gate_up->in_features)) &&
         space.expert_ordered.reserve<E>(n.choices * larger(has_own_rows(e) ? round_up(e.gate_up->in_features, PANEL) : 0,
                                                            e.down_orders ? n.gated_stride : 0)) &&
         space.expert_own_gated.reserve<E>((e.gated_firsts ? n.choices * n.own_gated_stride : 0) + (e.shared_firsts ? rows * n.own_shared_stride : 0)) &&
         space.expert_gated.reserve<E>(n.choices * n.gated_stride + rows * n.shared_stride) &&
         space.expert_outputs.reserve<float>((n.choices + rows) * n.out_stride);
}

template <class E>
void run_experts(const Member& member, const ExpertsOp& e, const StepRows<E>& buffers, i64 rows, const AdaptedRows& adapted,
                 const Workspace& space) {
  const Rows<E>&in = buffers[e.in], &out = buffers[e.out], &router_in = buffers[e.router_in];
  const ExpertBuffers<E> b(space, e, rows);
  const Groups gate_up = {b.groups, b.num_groups, rows}, down = {b.groups + b.num_groups, b.num_groups, rows};
  const Rows<float> shared_outputs = {b.outputs.row(b.choices), b.out_stride};
  multiply(member, router_in.data, router_in.stride, rows, *e.router, StoreRows<float, false>({b.logits, b.logits_stride}, 1.f), space);
  member.each_run(rows, 8, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) {
      i32* const chosen = b.chosen + row * e.top_k;
      choose_experts(e, b.logits + row * b.logits_stride, chosen, b.weights + row * (e.top_k + 1));
      for (i64 k = 0; e.chosen >= 0 && k < e.top_k; k++) memcpy(static_cast<void*>(buffers[e.chosen].row(row) + e.chosen_first + k), chosen + k, sizeof(E));
    }
  });
  member.each(1, [&](i64) { group_choices(e, b); });
  const i32* orders = e.gate_up_orders;
  Rows<E> x = orders ? order_columns(member, gate_up, e.gate_up, orders, in, b.tokens, space) : in;
  if (e.scaled_inputs) x = scale_inputs(member, e, b, x, orders != nullptr, space);
  const auto multiply_first = [&](const auto& to, const auto& to_shared) {
    multiply_groups(member, x.data, x.stride, has_own_rows(e) ? b.choices : rows, e.gate_up->in_features, gate_up, *e.gate_up, to, space);
    if (!e.shared_down) return;
    multiply_adapted(member, in.data, in.stride, rows, *e.shared_gate_up, e.shared_gate_up_matrix, adapted, to_shared, space);
  };
  with_activation(e.activation, [&](auto kind) {
    if (e.gate_up->interleaved) {
      multiply_first(StoreGated<E, kind>(b.own_gated), StoreGated<E, kind>(b.own_shared));
    } else {
      multiply_first(StoreActivated<E, kind>(b.own_gated), StoreActivated<E, kind>(b.own_shared));
    }
  });
  const auto gather = [&](const i64* firsts, const Rows<E>& own, i64 count, const Rows<E>& all) {
    if (firsts) gather_ranks(member, *space.exchange, own.data, own.stride, count, firsts, all.data, all.stride, all.stride);
  };
  gather(e.gated_firsts, b.own_gated, b.choices, b.gated);
  gather(e.shared_firsts, b.own_shared, rows, b.shared);
  const Rows<E> gated = e.down_orders ? order_columns(member, down, e.down, e.down_orders, b.gated, nullptr, space) : b.gated;
  multiply_groups(member, gated.data, gated.stride, b.choices, e.down->in_features, down, *e.down,
                  StoreRows<float, false>(b.outputs, 1.f), space);
  if (e.shared_down) {
    const StoreRows<float, false> to(shared_outputs, 1.f);
    multiply_adapted(member, b.shared.data, b.shared_stride, rows, *e.shared_down, e.shared_down_matrix, adapted, to, space);
  }
  constexpr i64 COLUMNS = 8 * PANEL;  // of a task
  const i64 parts = ceil_div(b.out_stride, COLUMNS);
  member.each(rows * parts, [&](i64 task) {
    const i64 row = task / parts, begin = task % parts * COLUMNS;
    const i64 end = smaller(b.out_stride, begin + COLUMNS);
    if (e.epilogue == PARTIAL) add_choices(b, e, row, begin, end, partial_rows(space, e.down->out_features).row(row));
    else add_choices(b, e, row, begin, end, out.row(row));
  });
}

template bool reserve_experts<Bf16>(Buffers&, const ExpertsOp&, i64);
template bool reserve_experts<float>(Buffers&, const ExpertsOp&, i64);
template void run_experts(const Member&, const ExpertsOp&, const StepRows<Bf16>&, i64, const AdaptedRows&, const Workspace&);
template void run_experts(const Member&, const ExpertsOp&, const StepRows<float>&, i64, const AdaptedRows&, const Workspace&);

}  // namespace aengine
