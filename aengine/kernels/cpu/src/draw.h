// Draws from logits: what aengine/sampling/torch_draw.py draws, up to the rounding of sums, without sorting whole rows.
#pragma once
#include "buffers.h"
#include "team.h"

namespace aengine {

// Room for draws of `rows` rows. False when there is no memory.
bool reserve_draws(Buffers& space, i64 rows, i64 vocab, int threads);

// tokens[row] = what is drawn from row `row` of [rows, vocab] logits, by a team. Needs `reserve_draws`.
void draw_tokens(const Member& member, const float* logits, i64 rows, i64 vocab, const DrawParams* params, i64* tokens, const Buffers& space);

}  // namespace aengine
