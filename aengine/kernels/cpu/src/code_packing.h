// Rows of codes with scales per group of the depth -> packed panels, one panel per task.
#pragma once
#include "codes.h"
#include "packing.h"

namespace aengine {

struct CodesRow {
  const u8* codes;  // null: padding
  const u8 *scales, *offsets, *factors, *offset_factors;
};

inline CodesRow codes_row(const CodesPart* parts, i64 num_parts, const PackedLinear& w, i64 row) {
  const i64 groups = ceil_div(w.in_features, w.group_size), factors = w.groups_per_factor ? ceil_div(groups, w.groups_per_factor) : 0;
  const auto at = [](const void* rows, i64 bytes) { return rows ? static_cast<const u8*>(rows) + bytes : nullptr; };
  for (i64 i = 0; i < num_parts; row -= parts[i++].rows) {
    const CodesPart& part = parts[i];
    if (row >= part.rows) continue;
    const i64 of_groups = row * groups * scale_bytes(w), of_factors = row * factors * number_bytes(w);
    return {at(part.codes, row * part.stride), at(part.scales, of_groups), at(part.offsets, of_groups), at(part.factors, of_factors),
            at(part.offset_factors, of_factors)};
  }
  return {};
}

// Four codes of a row from `first` on, of which `left` are the row's; those beyond them are 0. `flip` is applied to each byte.
inline u32 quad_of(const u8* codes, i64 left, u32 flip) {
  u32 bytes = 0;
  if (left >= 4) {
    memcpy(&bytes, codes, 4);
    return bytes ^ flip;
  }
  for (i64 i = 0; i < left; i++) bytes |= (u32)(codes[i] ^ (u8)flip) << (8 * i);
  return bytes;
}

// The codes from `codes` on, of which `left` are the row's, to the words of a unit, PANEL apart (`CodeUnit`).
template <int BITS>
AE_INLINE void put_unit(const u8* codes, i64 left, u32 flip, u32* out) {
  for (int n = 0; n < CodeUnit<BITS>::QUADS; n++) {
    const u32 quad = quad_of(codes + 4 * n, left - 4 * n, flip);
    if constexpr (BITS == 6) {
      out[n / 2 * PANEL] |= (quad & 0x0f0f0f0fu) << (n % 2 * 4);
      out[2 * PANEL] |= ((quad >> 4) & 0x03030303u) << (2 * n);
    } else {
      constexpr u32 MASK = 0x01010101u * ((1u << BITS) - 1);
      *out |= (quad & MASK) << (BITS * n);
    }
  }
}

// `size` bytes of each column's numbers, from byte `at` of its row on; returns what follows them.
inline u32* put_numbers(const CodesRow* rows, const u8* CodesRow::* numbers, i64 at, i64 size, u32* out) {
  for (i64 c = 0; c < PANEL; c++) {
    if (rows[c].codes) memcpy(reinterpret_cast<u8*>(out) + c * size, rows[c].*numbers + at, (size_t)size);
  }
  return out + PANEL * size / 4;
}

template <int BITS>
void pack_codes_panel(const CodesPart* parts, i64 num_parts, u32 flip, const PackedLinear& w, i64 panel) {
  CodesRow rows[PANEL] = {};
  for (i64 c = 0; c < PANEL; c++) {
    const i64 row = row_of_column(w, panel * PANEL + c);
    if (row >= 0) rows[c] = codes_row(parts, num_parts, w, row);
  }
  using Unit = CodeUnit<BITS>;
  u32* out = w.words + panel * panel_words(w);
  for (i64 begin = 0, group = 0; begin < w.in_features; begin += w.group_size, group++) {
    if (w.groups_per_factor && group % w.groups_per_factor == 0) {
      const i64 size = number_bytes(w), at = group / w.groups_per_factor * size;
      out = put_numbers(rows, &CodesRow::factors, at, size, out);
      if (w.with_offsets) out = put_numbers(rows, &CodesRow::offset_factors, at, size, out);
    }
    const i64 size = scale_bytes(w);
    out = put_numbers(rows, &CodesRow::scales, group * size, size, out);
    if (w.with_offsets) out = put_numbers(rows, &CodesRow::offsets, group * size, size, out);
    for (i64 first = begin; first < begin + w.group_size; first += 4 * Unit::QUADS, out += Unit::WORDS * PANEL) {
      for (i64 c = 0; c < PANEL && first < w.in_features; c++) {
        if (rows[c].codes) put_unit<BITS>(rows[c].codes + first, w.in_features - first, flip, out + c);
      }
    }
  }
}

// Fills `w.words`, which are zeros, from the rows of the parts one after another.
inline void pack_codes(const CodesPart* parts, i64 num_parts, i32 flip, const PackedLinear& w, int threads) {
  const u32 flips = 0x01010101u * (u32)flip;
  run_team(threads, [&](const Member& member) {
    member.each(num_panels(w), [&](i64 panel) {
      switch (bits_of(w.format)) {
        case 2: return pack_codes_panel<2>(parts, num_parts, flips, w, panel);
        case 4: return pack_codes_panel<4>(parts, num_parts, flips, w, panel);
        case 6: return pack_codes_panel<6>(parts, num_parts, flips, w, panel);
        default: return pack_codes_panel<8>(parts, num_parts, flips, w, panel);
      }
    });
  });
}

}  // namespace aengine
