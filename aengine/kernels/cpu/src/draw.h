// Draws from logits: what aengine/sampling/draw.py draws, up to the rounding of sums, without sorting whole rows.
#pragma once
#include "buffers.h"
#include "team.h"

namespace aengine {

// Room for draws of `rows` rows. False when there is no memory.
bool reserve_draws(Buffers& space, i64 rows, i64 vocab, int threads);

// tokens[row] = what is drawn from row `row` of [rows, vocab] logits, by a team; its complement where no token can be chosen. Needs
// `reserve_draws`.
void draw_tokens(const Member& member, const float* logits, i64 rows, i64 vocab, const DrawParams* params, i64* tokens, const Buffers& space);

// Room for `log_sums` of `rows` rows. False when there is no memory.
bool reserve_log_sums(Buffers& space, i64 rows, i64 vocab);

// out[row] = log of the sum of exp over row `row` of [rows, vocab] logits, and greater[row] = how many of them are greater than own[row], by
// a team. Needs `reserve_log_sums`. Sums are added up in one order.
void log_sums(const Member& member, const float* logits, i64 rows, i64 vocab, const float* own, float* out, i64* greater, const Buffers& space);

}  // namespace aengine
