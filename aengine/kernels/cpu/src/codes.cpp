// Products with matrices of codes. The sum of each group of activations is taken by itself, in int32 or float32, and added to the row's with
// the scales in the order of the depth, so a row's result does not depend on its neighbours.
#include "codes.h"

#include "panel_tiles.h"

namespace aengine {

namespace {

// Rows of activations as a Dot of codes multiplies them: their elements, and for each group its scale and its total.
template <class Dot>
struct CodeRows {
  typename Dot::X* data;
  float* scales;
  typename Dot::Total* totals;
  i64 stride, groups;  // of a row
};

// Calls f(0), f(1), ... with compile-time constants.
template <class F, int... I>
AE_INLINE void for_each_constant(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

// The products of one panel with ROWS rows; prefetches what comes `ahead` words later.
template <class Dot, int ROWS>
AE_NOINLINE void multiply_code_panel(const CodeRows<Dot>* rows, const PackedLinear& w, const u32* panel, i64 ahead, float (*out)[PANEL]) {
  const Dot dot(w);
  constexpr int VECTORS = tile_vectors(ROWS);
  const i64 depth = round_up(w.in_features, 16), extras = scale_words(w) * (w.with_offsets ? 2 : 1);
  for (int i = 0; i < ROWS; i++) memset(out[i], 0, sizeof out[i]);
  i64 number = 0;  // of a group of activations
  for (i64 begin = 0; begin < depth; begin += w.group_size) {
    const u32* scales = panel;
    panel += extras;
    for (i64 i = 0; i < extras; i += LINE_WORDS) __builtin_prefetch(scales + ahead + i, 0, 2);
    const i64 end = smaller(depth, begin + w.group_size);
    for (i64 first = begin; first < end; first += w.activation_group, number++) {
      const i64 steps = smaller(w.activation_group, end - first) / Dot::X_PER_WORD;
      for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        typename Dot::Sum sums[ROWS][VECTORS];
        for (int i = 0; i < ROWS; i++) {
          for (int j = 0; j < VECTORS; j++) sums[i][j] = dot.first_sum(rows[i].totals[number]);
        }
        for (i64 step = 0; step < steps; step++) {
          const u32* words = panel + step * PANEL + column;
          for (int i = 0; i < VECTORS * LANES; i += LINE_WORDS) __builtin_prefetch(words + ahead + i, 0, 2);
          VecU packed[VECTORS];
          for (int j = 0; j < VECTORS; j++) packed[j] = load_words(words + j * LANES);
          for_each_constant([&](auto part) {
            decltype(dot.template weights<part>(VecU{})) weights[VECTORS];
            for (int j = 0; j < VECTORS; j++) weights[j] = dot.template weights<part>(packed[j]);
            for (int i = 0; i < ROWS; i++) {
              const auto x = Dot::template activations<part>(rows[i].data + first + step * Dot::X_PER_WORD);
              for (int j = 0; j < VECTORS; j++) sums[i][j] = Dot::multiply_add(sums[i][j], x, weights[j]);
            }
          }, std::make_integer_sequence<int, Dot::PARTS>{});
        }
        for (int j = 0; j < VECTORS; j++) {
          const i64 at = column + j * LANES;
          const VecF scale = load_scales(scales, at, w.scale_kind);
          for (int i = 0; i < ROWS; i++) {
            const VecF product = __builtin_convertvector(sums[i][j], VecF) * scale;
            store(out[i] + at, load(out[i] + at) + product * rows[i].scales[number]);
          }
          if (!w.with_offsets) continue;
          const VecF offset = load_scales(scales + scale_words(w), at, w.scale_kind);
          for (int i = 0; i < ROWS; i++) {
            store(out[i] + at, load(out[i] + at) + offset * ((float)rows[i].totals[number] * rows[i].scales[number]));
          }
        }
      }
      panel += steps * PANEL;
    }
  }
}

template <class Dot, class E>
void gemm_codes(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                const Output& output, const Buffers& space) {
  const i64 padded = round_up(width, 16), size = shape.activation_group, num_groups = ceil_div(padded, size);
  float* scales = space.row_scales.as<float>();
  const CodeRows<Dot> all = {space.prepared.as<typename Dot::X>(), scales, (typename Dot::Total*)(scales + rows * num_groups), padded, num_groups};
  const auto of_row = [&](i64 row, i64 first) {
    const i64 group = row * num_groups + first / size;
    return CodeRows<Dot>{all.data + row * padded + first, all.scales + group, all.totals + group, padded, num_groups};
  };
  member.each_run(rows, 8, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) {
      for (i64 first = 0; first < padded; first += size) {
        alignas(64) float values[MAX_ACTIVATION_GROUP] = {};
        const i64 count = smaller(size, padded - first);
        if (shape.order) {
          for (i64 i = 0; i < smaller(count, width - first); i++) values[i] = widen(x[row * stride + shape.order[first + i]]);
        } else {
          for (i64 i = 0; i < count; i += LANES) store(values + i, load(x + row * stride + first + i));
        }
        const CodeRows<Dot> to = of_row(row, first);
        *to.scales = Dot::put_group(values, count, to.data, *to.totals);
      }
    }
  });
  each_tile(member, groups, shape, panel_words(shape), [&](const PanelTile& tile) {
    const PackedLinear& w = *tile.group.w;
    CodeRows<Dot> x_rows[TILE_ROWS];
    for (i64 i = 0; i < tile.count; i++) x_rows[i] = of_row(tile.source(i), tile.group.column);
    alignas(64) float values[TILE_ROWS][PANEL];
    with_rows(tile.count, [&](auto n) {
      // Later passes find the panel in the L2 cache, and fetch the next lines of it.
      multiply_code_panel<Dot, n>(x_rows, w, tile.words, tile.pass ? PANEL : WORDS_AHEAD, values);
    });
    for (i64 i = 0; i < tile.count && w.bias; i++) {
      for (int j = 0; j < PANEL; j += LANES) store(values[i] + j, load(values[i] + j) + load(w.bias + tile.panel * PANEL + j));
    }
    output.put(tile.group, tile.row, tile.count, tile.panel, values);
  });
}

}  // namespace

template <class E>
void multiply_codes(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                    const Output& output, const Buffers& space) {
  const auto multiply_as = [&](auto* dot) {
    gemm_codes<std::remove_pointer_t<decltype(dot)>>(member, x, stride, rows, width, groups, shape, output, space);
  };
  if (shape.format == FLOAT8_CODES) return multiply_as((Float8Dot*)nullptr);
  if (shape.format == INT8_CODES) return shape.float_activations ? multiply_as((WideByteDot*)nullptr) : multiply_as((ByteDot*)nullptr);
  return shape.float_activations ? multiply_as((WideInt4Dot*)nullptr) : multiply_as((Int4Dot*)nullptr);
}

template void multiply_codes(const Member&, const Bf16*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);
template void multiply_codes(const Member&, const float*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);

}  // namespace aengine
