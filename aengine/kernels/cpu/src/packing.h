// Checkpoint tensors -> packed panels: converted, quantised and interleaved on the way, one panel per task.
#pragma once
#include "int8.h"
#include "team.h"

namespace aengine {

// The elements of the row of a matrix that a packed column comes from; null for padding.
template <class S>
const S* source_row(const Part* parts, i64 num_parts, i64 row) {
  for (i64 i = 0; i < num_parts; row -= parts[i++].rows) {
    if (row < parts[i].rows) return static_cast<const S*>(parts[i].data) + row * parts[i].stride;
  }
  return nullptr;
}

// The row of W that is column `column` of the packed matrix, -1 for padding.
inline i64 row_of_column(const PackedLinear& w, i64 column) {
  if (!w.interleaved) return column < w.out_features ? column : -1;
  const i64 width = w.out_features / 2, at = column / 32 * 16 + column % 16;
  return at >= width ? -1 : column % 32 < 16 ? at : width + at;
}

AE_INLINE u32 bits_of(float x) {
  u32 bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

constexpr i64 PACKED_RUN = 16;  // words of a row that are read before the next row's: a cache line of a bf16 matrix

// Element k of a row in a format, in the low bits.
template <class S, i32 FORMAT>
AE_INLINE u32 packed_element(const S* row, i64 k, float factor) {
  if constexpr (FORMAT == F32_WORDS) return bits_of(widen(row[k]));
  if constexpr (FORMAT == BF16_PAIRS) return narrow<Bf16>(widen(row[k])).bits;
  return (u8)(i32)std::nearbyint(widen(row[k]) * factor);
}

// PACKED_RUN words of a row from word `first` on; zero beyond its end.
template <class S, i32 FORMAT>
AE_INLINE void read_words(const S* row, i64 depth, i64 first, float factor, u32* words) {
  constexpr i64 PER_WORD = FORMAT == F32_WORDS ? 1 : FORMAT == BF16_PAIRS ? 2 : 4;
  constexpr bool AS_IT_IS = FORMAT == (std::is_same_v<S, float> ? F32_WORDS : BF16_PAIRS);
  const i64 begin = first * PER_WORD, count = smaller(depth - begin, PACKED_RUN * PER_WORD);
  if (AS_IT_IS && count == PACKED_RUN * PER_WORD) {
    memcpy(words, row + begin, PACKED_RUN * sizeof(u32));
    return;
  }
  if (FORMAT == INT8_QUADS && count == PACKED_RUN * PER_WORD) {
    typedef signed char VecB __attribute__((vector_size(LANES)));
    for (i64 i = 0; i < count; i += LANES) {
      const VecB bytes = __builtin_convertvector(round_scaled(load(row + begin + i), factor), VecB);
      memcpy((char*)words + i, &bytes, sizeof bytes);
    }
    return;
  }
  memset(words, 0, PACKED_RUN * sizeof(u32));
  for (i64 i = 0; i < count; i++) {
    words[i / PER_WORD] |= packed_element<S, FORMAT>(row, begin + i, factor) << (32 / PER_WORD * (i % PER_WORD));
  }
}

// Four words of each of four rows -> four rows of a panel.
AE_INLINE void store_transposed(const u32 (*rows)[PACKED_RUN], i64 word, u32* panel) {
  const Quad a = load_as<Quad>(rows[0] + word), b = load_as<Quad>(rows[1] + word);
  const Quad c = load_as<Quad>(rows[2] + word), d = load_as<Quad>(rows[3] + word);
  const Quad ab_low = AE_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = AE_SHUFFLE(a, b, 2, 6, 3, 7);
  const Quad cd_low = AE_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = AE_SHUFFLE(c, d, 2, 6, 3, 7);
  store(panel, AE_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5));
  store(panel + PANEL, AE_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7));
  store(panel + 2 * PANEL, AE_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5));
  store(panel + 3 * PANEL, AE_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7));
}

// The largest magnitude in a row; a NaN is none.
template <class S>
float absmax_of(const S* row, i64 size) {
  VecF maximum = {};
  i64 i = 0;
  for (; i + LANES <= size; i += LANES) {
    const VecF v = load(row + i);
    maximum = larger(v, larger(-v, maximum));
  }
  float found = largest(maximum);
  for (; i < size; i++) {
    const float x = std::fabs(widen(row[i]));
    found = x > found ? x : found;
  }
  return found;
}

// All steps of a panel, which are a multiple of 4.
template <class S, i32 FORMAT>
void pack_steps(const S* const* rows, const float* factors, i64 depth, i64 steps, u32* panel) {
  for (i64 first = 0; first < steps; first += PACKED_RUN) {
    const i64 count = smaller(PACKED_RUN, steps - first);
    for (i64 column = 0; column < PANEL; column += 4) {
      u32 words[4][PACKED_RUN] = {};
      for (i64 i = column; i < column + 4; i++) {
        if (rows[i]) read_words<S, FORMAT>(rows[i], depth, first, factors[i], words[i - column]);
      }
      for (i64 word = 0; word < count; word += 4) store_transposed(words, word, panel + (first + word) * PANEL + column);
    }
  }
}

template <class S>
void pack_panel(const Part* parts, i64 num_parts, const PackedLinear& w, i64 panel) {
  const S* rows[PANEL];
  float factors[PANEL] = {};
  for (i64 c = 0; c < PANEL; c++) {
    const i64 row = row_of_column(w, panel * PANEL + c);
    rows[c] = row < 0 ? nullptr : source_row<S>(parts, num_parts, row);
    if (w.format != INT8_QUADS) continue;
    const float absmax = rows[c] ? absmax_of(rows[c], w.in_features) : 0;
    factors[c] = absmax > 0 ? INT8_MAX_VALUE / absmax : 0;
    w.scales[panel * PANEL + c] = absmax / INT8_MAX_VALUE;
  }
  const i64 steps = num_steps(w);
  u32* words = w.words + panel * steps * PANEL;
  if (w.format == BF16_PAIRS) return pack_steps<S, BF16_PAIRS>(rows, factors, w.in_features, steps, words);
  if (w.format == F32_WORDS) return pack_steps<S, F32_WORDS>(rows, factors, w.in_features, steps, words);
  pack_steps<S, INT8_QUADS>(rows, factors, w.in_features, steps, words);
  i32 totals[PANEL] = {};
  for (i64 step = 0; step < steps; step++) {
    for (i64 c = 0; c < PANEL; c++) {
      for (int i = 0; i < 4; i++) totals[c] += (signed char)(words[step * PANEL + c] >> (8 * i));
    }
  }
  for (i64 c = 0; c < PANEL; c++) w.offsets[panel * PANEL + c] = 128 * totals[c];
}

// Fills `w.words`, and for int8 `w.scales` and `w.offsets`, from the rows of the parts one after another.
template <class S>
void pack(const Part* parts, i64 num_parts, const PackedLinear& w, int threads) {
  run_team(threads, [&](const Member& member) {
    member.each(num_panels(w), [&](i64 panel) { pack_panel<S>(parts, num_parts, w, panel); });
  });
}

}  // namespace aengine
