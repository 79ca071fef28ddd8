// RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight; LayerNorm (Ba et al., 2016): the same of x - mean(x). Both with a
// bias or none, and all in float32.
#pragma once
#include "rows.h"
#include "team.h"

namespace aengine {

// A row of `size` elements normalised is (x - mean) * factor.
struct Moments {
  float mean, factor;
};

// Those of a row, which is read to the next multiple of 16 and zero there.
template <class E>
AE_INLINE Moments moments_of(const E* x, i64 size, float eps, i32 kind) {
  const i64 padded = round_up(size, 16);
  WideSum squares;
  if (kind == RMS_NORM) {
    squares.each(padded, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE {
      const VecF v = load(x + i);
      sum = fma(v, v, sum);
    });
    return {0.f, 1.f / std::sqrt(squares.total() / (float)size + eps)};
  }
  WideSum all;
  all.each(padded, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE { sum += load(x + i); });
  const float mean = all.total() / (float)size;
  squares.each(padded, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE {
    const VecI inside = lane_numbers() + (i32)i < (i32)size;
    const VecF v = inside ? load(x + i) - mean : splat(0.f);
    sum = fma(v, v, sum);
  });
  return {mean, 1.f / std::sqrt(squares.total() / (float)size + eps)};
}

// LANES elements from i on; zero beyond the row's end, where weight and bias are.
template <class E>
AE_INLINE VecF normed(const E* x, i64 i, const Norm& norm, const Moments& moments) {
  VecF v = load(x + i);
  if (norm.kind != RMS_NORM) v -= moments.mean;
  v = v * moments.factor;
  const VecF weight = load(norm.weight + i);
  return norm.bias ? fma(v, weight, load(norm.bias + i)) : v * weight;
}

template <class E>
void norm_row(const NormOp& op, const E* x, E* out) {
  const Norm& norm = op.norm;
  x += op.first, out += op.first;
  const Moments moments = moments_of(x, norm.size, norm.eps, norm.kind);
  for (i64 i = 0; i < round_up(norm.size, 16); i += LANES) {
    const VecF v = normed(x, i, norm, moments);
    store(out + i, op.adds ? fma(v, splat(op.multiplier), load(out + i)) * op.scale : v);
  }
}

// The operation and those that follow it, row by row.
template <class E>
void norm_rows(const Member& member, const NormOp& first, const StepRows<E>& buffers, i64 rows) {
  member.each_run(rows, 4, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) {
      for (const NormOp* op = &first; op; op = op->next) norm_row(*op, buffers[op->in].row(row), buffers[op->out].row(row));
    }
  });
}

}  // namespace aengine
