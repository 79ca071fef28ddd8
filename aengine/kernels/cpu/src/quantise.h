// Matrices -> codes of 4 bits with a scale for each group of 32 columns, as `kernels/quantized.py` does it.
#pragma once
#include <cfloat>

#include "team.h"

namespace aengine {

constexpr i64 INT4_GROUP = 32;

// LANES groups, x [LANES][32] -> codes [LANES][32], which stand for (code - 8) * scale, and scales [LANES], which are bfloat16 numbers.
inline void quantise_groups(const float* x, u8* codes, float* scales) {
  VecF groups[INT4_GROUP], largest = {};  // element j of each group
  for (i64 j = 0; j < INT4_GROUP; j++) {
    for (i64 lane = 0; lane < LANES; lane++) groups[j][lane] = x[lane * INT4_GROUP + j];
    largest = larger(groups[j], -groups[j]) > larger(largest, -largest) ? groups[j] : largest;
  }
  const auto quantised = [&](i64 j, VecF factor) {
    const VecF scaled = smaller(larger(groups[j] * factor, splat(-8.f)), splat(7.f));
    return (scaled + 12582912.f) - 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer
  };
  VecF best_error = splat(FLT_MAX), best_scale = {}, best_factor = {};
  for (const float shrink : {1.f, 0.95f, 0.9f, 0.85f, 0.8f}) {
    const VecF step = largest * (shrink / -8.f), factor = step == 0.f ? VecF{} : 1.f / step;
    VecF products = {}, squares = {};
    for (i64 j = 0; j < INT4_GROUP; j++) {
      const VecF q = quantised(j, factor);
      products += q * groups[j];
      squares += q * q;
    }
    Bf16 rounded[LANES];
    store(rounded, squares == 0.f ? VecF{} : products / squares);  // the scale of least squared error
    const VecF scale = load(rounded), error = scale * (scale * squares - 2.f * products);  // less the squares of the elements
    const auto better = error < best_error;
    best_error = better ? error : best_error;
    best_scale = better ? scale : best_scale;
    best_factor = better ? factor : best_factor;
  }
  store(scales, best_scale);
  for (i64 j = 0; j < INT4_GROUP; j++) {
    const VecI q = __builtin_convertvector(quantised(j, best_factor) + 8.f, VecI);
    for (i64 lane = 0; lane < LANES; lane++) codes[lane * INT4_GROUP + j] = (u8)q[lane];
  }
}

// Rows [rows, columns] -> codes [rows, columns] and scales [rows, ceil(columns / 32)].
template <class S>
void quantise(const Part& part, i64 columns, u8* codes, float* scales, int threads) {
  constexpr i64 CHUNK = LANES * INT4_GROUP;
  run_team(threads, [&](const Member& member) {
    member.each_run(part.rows, 16, [&](i64 begin, i64 end) {
      for (i64 row = begin; row < end; row++) {
        const S* elements = static_cast<const S*>(part.data) + row * part.stride;
        for (i64 first = 0; first < columns; first += CHUNK) {
          const i64 size = smaller(columns - first, CHUNK);
          float x[CHUNK] = {}, found_scales[LANES];
          u8 found[CHUNK];
          load_padded(elements + first, size, x);
          quantise_groups(x, found, found_scales);
          memcpy(codes + row * columns + first, found, (size_t)size);
          memcpy(scales + row * ceil_div(columns, INT4_GROUP) + first / INT4_GROUP, found_scales,
                 (size_t)ceil_div(size, INT4_GROUP) * sizeof(float));
        }
      }
    });
  });
}

}  // namespace aengine
