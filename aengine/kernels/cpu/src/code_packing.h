// Rows of codes with scales per group of the depth -> packed panels, one panel per task.
#pragma once
#include "codes.h"
#include "packing.h"

namespace aengine {

struct CodesRow {
  const u8* codes;  // null: padding
  const u8 *scales, *offsets;
};

inline CodesRow codes_row(const CodesPart* parts, i64 num_parts, const PackedLinear& w, i64 row) {
  const i64 bytes = ceil_div(w.in_features, w.group_size) * (w.scale_kind == F32_SCALES ? 4 : 2);
  for (i64 i = 0; i < num_parts; row -= parts[i++].rows) {
    if (row >= parts[i].rows) continue;
    const u8 *scales = static_cast<const u8*>(parts[i].scales), *offsets = static_cast<const u8*>(parts[i].offsets);
    return {static_cast<const u8*>(parts[i].codes) + row * parts[i].stride, scales + row * bytes, offsets ? offsets + row * bytes : nullptr};
  }
  return {};
}

// The word of the codes from `first` on, of which `left` are the row's; codes beyond them are 0. `flip` is applied to each byte.
template <bool FOUR_BITS>
AE_INLINE u32 code_word(const u8* codes, i64 left, u64 flip) {
  u64 bytes = 0;
  if (left >= 8) {
    memcpy(&bytes, codes, 8);
  } else {
    memcpy(&bytes, codes, (size_t)left);
    flip &= (1ull << (8 * left)) - 1;
  }
  bytes ^= flip;
  if (!FOUR_BITS) return (u32)bytes;
  bytes &= 0x0f0f0f0f0f0f0f0full;
  return (u32)bytes | (u32)(bytes >> 32) << 4;
}

template <bool FOUR_BITS>
void pack_codes_panel(const CodesPart* parts, i64 num_parts, u64 flip, const PackedLinear& w, i64 panel) {
  CodesRow rows[PANEL] = {};
  for (i64 c = 0; c < PANEL; c++) {
    const i64 row = row_of_column(w, panel * PANEL + c);
    if (row >= 0) rows[c] = codes_row(parts, num_parts, w, row);
  }
  constexpr i64 PER_WORD = FOUR_BITS ? 8 : 4;
  const i64 size = w.scale_kind == F32_SCALES ? 4 : 2;
  u32* out = w.words + panel * panel_words(w);
  for (i64 begin = 0, group = 0; begin < w.in_features; begin += w.group_size, group++) {
    for (const auto numbers : {&CodesRow::scales, &CodesRow::offsets}) {
      if (numbers == &CodesRow::offsets && !w.with_offsets) continue;
      for (i64 c = 0; c < PANEL; c++) {
        if (rows[c].codes) memcpy(reinterpret_cast<u8*>(out) + c * size, rows[c].*numbers + group * size, (size_t)size);
      }
      out += scale_words(w);
    }
    for (i64 first = begin; first < begin + w.group_size; first += PER_WORD, out += PANEL) {
      for (i64 c = 0; c < PANEL && first < w.in_features; c++) {
        if (rows[c].codes) out[c] = code_word<FOUR_BITS>(rows[c].codes + first, w.in_features - first, flip);
      }
    }
  }
}

// Fills `w.words`, which are zeros, from the rows of the parts one after another. Scales and offsets are stored as `w.scale_kind` says.
inline void pack_codes(const CodesPart* parts, i64 num_parts, i32 flip, const PackedLinear& w, int threads) {
  const u64 flips = 0x0101010101010101ull * (u64)flip;
  run_team(threads, [&](const Member& member) {
    member.each(num_panels(w), [&](i64 panel) {
      if (w.format == INT4_CODES) return pack_codes_panel<true>(parts, num_parts, flips, w, panel);
      pack_codes_panel<false>(parts, num_parts, flips, w, panel);
    });
  });
}

}  // namespace aengine
