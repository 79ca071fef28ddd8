// Gated causal depthwise convolutions, whose latest inputs lie in pages where attention has keys and values: rows of a page's part one
// after the other, in the order of its tokens.
#pragma once
#include <algorithm>

#include "attention_plan.h"
#include "rows.h"

namespace aengine {

// As what is stored and loaded again.
AE_INLINE VecF rounded(VecF x, float) { return x; }
AE_INLINE VecF rounded(VecF x, Bf16) {
  Bf16 stored[LANES];
  store(stored, x);
  return load(stored);
}

// Where the input of one tap is: a row of the step, from whose b and x it is made, or stored; both null: there is none, which is zero.
template <class E>
struct ConvolutionInput {
  const E* row;
  const E* stored;
};

// out = c * conv(b * x) of one token in the columns of a part. The last of the `taps` inputs is the token's own, which goes to `stored`.
template <class E>
void convolve_token(const ConvolveOp& op, const ConvolvePart& part, const ConvolutionInput<E>* inputs, E* stored, E* out) {
  const E* own = inputs[op.taps - 1].row;
  for (i64 i = 0; i < part.width; i += LANES) {
    const i64 channel = part.first + i;
    VecF total = splat(0.f);
    for (i64 tap = 0; tap < op.taps; tap++) {
      VecF input;
      if (const E* row = inputs[tap].row) input = rounded(load(row + channel) * load(row + 2 * op.channels + channel), E{});
      else if (inputs[tap].stored) input = load(inputs[tap].stored + i);
      else continue;
      total = fma(input, load(op.weights + tap * op.channels + channel), total);
      if (stored && tap == op.taps - 1) store(stored + i, input);
    }
    if (op.bias) total = total + load(op.bias + channel);
    store(out + channel, load(own + op.channels + channel) * rounded(total, E{}));
  }
}

// A task is some tokens in the columns of one part. Inputs of the step itself are made from its rows and only earlier ones are read from
// pages, so tasks need not wait for each other.
template <class E>
void convolve(const Member& member, const ConvolveOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows) {
  const Rows<E>&in = rows[op.in], &out = rows[op.out];
  const i64 page_size = pool.page_size, run = larger(1, smaller(BLOCK, step.num_tokens * op.num_parts / (2 * member.size())));
  member.each(ceil_div(step.num_tokens, run) * op.num_parts, [&](i64 task) {
    const ConvolvePart& part = op.parts[task % op.num_parts];
    const i32* slots = step.group_slots(part.group);
    E* const pages = static_cast<E*>((part.of_values ? pool.values : pool.keys)[part.place]);
    const i64 stride = (part.of_values ? pool.value_page_bytes : pool.key_page_bytes) / page_size / (i64)sizeof(E), begin = task / op.num_parts * run;
    i64 row = std::upper_bound(step.qo_indptr, step.qo_indptr + step.num_rows + 1, (i32)begin) - step.qo_indptr - 1;
    for (i64 token = begin; token < smaller(step.num_tokens, begin + run); token++) {
      while (token >= step.qo_indptr[row + 1]) row++;
      const i64 ends = sequence_length(step, row, page_size) - step.qo_indptr[row + 1];  // a position less the number of its token
      const i32* list = step.group_pages(part.group) + step.kv_indptr[row];
      ConvolutionInput<E> inputs[MAX_TAPS];
      for (i64 back = op.taps - 1; back >= 0; back--) {
        const i64 earlier = ends + token - back;
        const bool in_step = token - back >= step.qo_indptr[row];
        const E* stored = in_step || earlier < 0 ? nullptr : pages + (list[earlier / page_size] * page_size + earlier % page_size) * stride;
        inputs[op.taps - 1 - back] = {in_step ? in.row(token - back) : nullptr, stored};
      }
      E* const stored = slots[token] < 0 ? nullptr : pages + slots[token] * stride;
      convolve_token(op, part, inputs, stored, out.row(token));
      if (part.first + part.width < op.channels) continue;
      memset(static_cast<void*>(out.row(token) + op.channels), 0, (size_t)(out.stride - op.channels) * sizeof(E));
    }
  });
}

}  // namespace aengine
