// RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, all in float32.
#pragma once
#include "team.h"

namespace aengine {

// The factor that gives a row of `size` elements a mean square of 1; it is read to the next multiple of 16.
template <class E>
AE_INLINE float rms_factor(const E* x, i64 size, float eps) {
  VecF squares = {};
  for (i64 i = 0; i < round_up(size, 16); i += LANES) {
    const VecF v = load(x + i);
    squares += v * v;
  }
  return 1.f / std::sqrt(sum(squares) / (float)size + eps);
}

template <class E>
void norm_row(const E* x, const float* weight, E* out, i64 size, float eps) {
  const float factor = rms_factor(x, size, eps);
  for (i64 i = 0; i < round_up(size, 16); i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

template <class E>
void norm_rows(const Member& member, const E* x, i64 stride, const float* weight, E* out, i64 out_stride, i64 rows, i64 size, float eps) {
  member.each_run(rows, 4, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) norm_row(x + row * stride, weight, out + row * out_stride, size, eps);
  });
}

}  // namespace aengine
