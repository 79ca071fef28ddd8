// The running softmax of attention (Milakov and Gimelshein, 2018).
#pragma once
#include "attention.h"

namespace aengine {

constexpr float MASKED = -1e30f;  // the score of a masked key

// The running softmax of a tile's query rows: out = weighted / total once all is seen.
struct Softmax {
  alignas(64) float weighted[TILE_QUERIES * MAX_VALUE_DIM];  // [count][value_dim]
  float maximum[TILE_QUERIES], total[TILE_QUERIES];

  void clear(i64 count, i64 value_dim) {
    memset(weighted, 0, (size_t)(count * value_dim) * sizeof(float));
    for (i64 i = 0; i < count; i++) maximum[i] = MASKED, total[i] = 0;
  }
};

// Merges a query row's softmax over a later partition into that over the partitions before.
inline AE_NOINLINE void merge_row(float& maximum, float& total, float* weighted, float other_maximum, float other_total, const float* other,
                                  i64 dim) {
  const float top = other_maximum > maximum ? other_maximum : maximum;
  const float mine = exp(maximum - top), theirs = exp(other_maximum - top);
  total = fma(total, mine, other_total * theirs);
  for (i64 i = 0; i < dim; i += LANES) store(weighted + i, fma(load(weighted + i), splat(mine), load(other + i) * theirs));
  maximum = top;
}

// Scores of one query row, times `scales(t)` for LANES tokens from first + t on -> weights e^(score - maximum) of its tokens low .. high, zero
// for all others up to the end of the last block: put(t, weights). Scores lose `slope` for each token before `position`. Returns the factor
// for what was weighted before.
template <class Scales, class Put>
AE_INLINE float softmax_weights(float* scores, const Scales& scales, const Put& put, i64 first, i64 end, i64 low, i64 high, float soft_cap,
                                float slope, i64 position, float& maximum, float& total) {
  const i64 width = round_up(end - first, BLOCK);
  const bool partly = low > first || high < first + width;
  VecF top = splat(maximum);
  for (i64 t = 0; t < width; t += LANES) {
    VecF s = load(scores + t) * scales(t);
    if (soft_cap > 0) s = tanh(s / soft_cap) * soft_cap;
    if (slope != 0) s = fma(__builtin_convertvector(lane_numbers() + (i32)(first + t - position), VecF), splat(slope), s);
    if (partly) {
      const VecI token = lane_numbers() + (i32)(first + t);
      s = token >= (i32)low ? s : splat(MASKED);
      s = token < (i32)high ? s : splat(MASKED);
    }
    store(scores + t, s);
    top = larger(s, top);
  }
  const float new_maximum = largest(top);
  WideSum added;
  added.each(width, [&](VecF& sum, i64 t) AE_ALWAYS_INLINE {
    const VecF s = load(scores + t);
    const VecF e = s == MASKED ? splat(0.f) : exp(s - new_maximum);
    sum += e;
    put(t, e);
  });
  const float rescale = exp(maximum - new_maximum);
  total = fma(total, rescale, added.total());
  maximum = new_maximum;
  return rescale;
}

}  // namespace aengine
