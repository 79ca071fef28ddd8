// How matrix products are computed.
//
// Where a panel is read more than once, the next one is prefetched meanwhile, so that memory is never idle. Sums are never split over the
// depth, so a row's result does not depend on its neighbours.
#include "gemm.h"

#include "amx.h"
#include "codes.h"
#include "dot.h"
#include "panel_tiles.h"

namespace aengine {

namespace {

// What a pass over a panel prefetches meanwhile: `lines` cache lines per step, from `words` on. A panel has PANEL_LINES per step.
struct Prefetch {
  const u32* words;
  int lines;
};
constexpr int PANEL_LINES = PANEL / LINE_WORDS;

// The part of the panel at `next` that pass number `pass` of `passes` prefetches. A single pass prefetches what is WORDS_AHEAD instead.
inline Prefetch prefetch_part(const u32* next, i64 steps, i64 pass, i64 passes) {
  const int lines = passes < PANEL_LINES ? PANEL_LINES / 2 : 1;
  const i64 parts = PANEL_LINES / lines;
  return next && passes > 1 && pass < parts ? Prefetch{next + pass * steps * lines * LINE_WORDS, lines} : Prefetch{nullptr, 0};
}

// The sums of one panel for ROWS rows; prefetches meanwhile what `prefetch` says, at most LINES per step.
template <class Dot, int ROWS, int LINES>
AE_NOINLINE void multiply_panel(const typename Dot::X* const* rows, const u32* panel, i64 steps, const Prefetch& prefetch,
                                typename Dot::Sum (*out)[PANEL / LANES]) {
  const typename Dot::X* x[ROWS];
  for (int i = 0; i < ROWS; i++) x[i] = rows[i];
  constexpr int VECTORS = tile_vectors(ROWS);
  const u32* ahead = prefetch.words;
  const i64 jump = (LINES == PANEL_LINES ? LINES : prefetch.lines) * LINE_WORDS, second = smaller(jump - LINE_WORDS, LINE_WORDS);
  for (int column = 0; column < PANEL; column += VECTORS * LANES) {
    typename Dot::Sum sums[ROWS][VECTORS] = {};
    for (i64 step = 0; step < steps; step++) {
      const u32* words = panel + step * PANEL;
      if (LINES && column == 0) {
        for (int line = 0; line < LINES; line++) __builtin_prefetch(ahead + line * second, 0, 2);
        ahead += jump;
      }
      for_each_part<Dot>([&](auto part) {
        decltype(Dot::template weights<part>(VecU{})) w[VECTORS];
        for (int j = 0; j < VECTORS; j++) w[j] = Dot::template weights<part>(load_words(words + column + j * LANES));
        for (int i = 0; i < ROWS; i++) {
          const auto a = Dot::template activations<part>(x[i] + step * Dot::X_PER_WORD);
          for (int j = 0; j < VECTORS; j++) sums[i][j] = Dot::multiply_add(sums[i][j], a, w[j]);
        }
      });
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < VECTORS; j++) out[i][column / LANES + j] = sums[i][j];
    }
  }
}

// A sum as a number: as it is, or scaled back from int8.
template <class Dot>
AE_INLINE VecF value_of(VecF sum, const PackedLinear&, i64, float) { return sum; }
template <class Dot>
AE_INLINE VecF value_of(VecI sum, const PackedLinear& w, i64 column, float row_scale) {
  if (Dot::OFFSET) sum -= load_as<VecI>(w.offsets + column);
  return __builtin_convertvector(sum, VecF) * (load(w.scales + column) * row_scale);
}

// Products of MANY_ROWS or more unpack words for more rows than those of a tile. With AVX-512 tiles are twice as high and half as wide.
// Otherwise a panel is unpacked once for all rows, BLOCK_DEPTHS of it at a time, which stay in the L1 cache until every row was multiplied
// with them; with fewer rows it takes longer to write unpacked weights than to unpack them for each tile (measured).
constexpr bool HIGH_TILES = LANES == 16;
constexpr i64 MANY_ROWS = HIGH_TILES ? 2 * (TILE_ROWS + 1) : 2 * TILE_ROWS, BLOCK_DEPTHS = 96;
template <class Dot>
constexpr bool UNPACKS = std::is_same_v<typename Dot::X, float> && Dot::PARTS > 1;

// Adds to the sums of ROWS rows their products with float32 weights of `depth` depths; prefetches a cache line of `ahead` per depth.
template <int ROWS, bool PREFETCH>
AE_NOINLINE void multiply_block(const float* const* rows, const float (*weights)[PANEL], i64 depth, const u32* ahead,
                               VecF (*sums)[PANEL / LANES]) {
  const float* x[ROWS];
  for (int i = 0; i < ROWS; i++) x[i] = rows[i];
  constexpr int VECTORS = tile_vectors(ROWS);
  for (int column = 0; column < PANEL; column += VECTORS * LANES) {
    VecF tile[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < VECTORS; j++) tile[i][j] = sums[i][column / LANES + j];
    }
    for (i64 k = 0; k < depth; k++) {
      if (PREFETCH && column == 0) __builtin_prefetch(ahead + k * LINE_WORDS, 0, 2);
      VecF w[VECTORS];
      for (int j = 0; j < VECTORS; j++) w[j] = load(weights[k] + column + j * LANES);
      for (int i = 0; i < ROWS; i++) {
        const VecF a = splat(x[i][k]);
        for (int j = 0; j < VECTORS; j++) tile[i][j] = F32Dot::multiply_add(tile[i][j], a, w[j]);
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < VECTORS; j++) sums[i][column / LANES + j] = tile[i][j];
    }
  }
}

// The sums of a panel for all rows of a task, equal to those of `multiply_panel`.
template <class Dot>
void multiply_unpacked(const Prepared<Dot>& x, const PanelTiles& tiles, i64 steps, VecF (*sums)[PANEL / LANES]) {
  constexpr i64 BLOCK_STEPS = BLOCK_DEPTHS / Dot::PARTS;
  alignas(64) float weights[BLOCK_DEPTHS][PANEL];
  memset(sums, 0, (size_t)tiles.num_rows() * sizeof *sums);
  for (i64 first = 0; first < steps; first += BLOCK_STEPS) {
    const i64 count = smaller(BLOCK_STEPS, steps - first), depth = count * Dot::PARTS;
    const u32* words = tiles.words + first * PANEL;
    for (i64 step = 0; step < count; step++) {
      for (int j = 0; j < PANEL; j += LANES) {
        for_each_part<Dot>([&](auto part) {
          store(weights[step * Dot::PARTS + part] + j, Dot::template weights<part>(load_words(words + step * PANEL + j)));
        });
      }
    }
    // The words that come next are prefetched in as many passes as their lines take.
    const u32* next = first + count < steps ? words + count * PANEL : tiles.next;
    tiles.each([&](const PanelTile& tile) {
      const float* rows[TILE_ROWS];
      for (i64 i = 0; i < tile.count; i++) rows[i] = x.data + tile.source(i) * x.stride + tile.group.column + first * Dot::PARTS;
      with_rows(tile.count, [&](auto n) {
        const auto multiply = next && tile.pass < PANEL_LINES / Dot::PARTS ? multiply_block<n, true> : multiply_block<n, false>;
        multiply(rows, weights, depth, next + tile.pass * depth * LINE_WORDS, sums + tile.row - tiles.first_row());
      });
    });
  }
}

// The sums of a panel for all rows of a task, in tiles of 7 to 12.
template <class Dot>
void multiply_high_tiles(const Prepared<Dot>& x, const PanelTiles& tiles, i64 steps, VecF (*sums)[PANEL / LANES]) {
  const i64 num_rows = tiles.num_rows(), passes = ceil_div(num_rows, 2 * TILE_ROWS);
  for (i64 pass = 0; pass < passes; pass++) {
    const i64 first = pass * num_rows / passes, count = (pass + 1) * num_rows / passes - first;
    const typename Dot::X* rows[2 * TILE_ROWS];
    for (i64 i = 0; i < count; i++) rows[i] = x.data + tiles.source(tiles.first_row() + first + i) * x.stride + tiles.group.column;
    const Prefetch prefetch = prefetch_part(tiles.next, steps, pass, passes);
    with_rows(count - TILE_ROWS, [&](auto n) {
      const auto multiply = prefetch.lines ? multiply_panel<Dot, TILE_ROWS + n, 2> : multiply_panel<Dot, TILE_ROWS + n, 0>;
      multiply(rows, tiles.words, steps, prefetch, sums + first);
    });
  }
}

// The sums of a panel for the rows of one tile.
template <class Dot>
void multiply_tile(const Prepared<Dot>& x, const PanelTile& tile, i64 steps, typename Dot::Sum (*sums)[PANEL / LANES]) {
  const typename Dot::X* rows[TILE_ROWS];
  for (i64 i = 0; i < tile.count; i++) rows[i] = x.data + tile.source(i) * x.stride + tile.group.column;
  if constexpr (IN_AMX_TILES<Dot> && std::is_same_v<typename Dot::Sum, VecF>) {
    multiply_without_tiles(rows, tile.count, tile.words, steps, sums);
  } else {
    const Prefetch prefetch =
        tile.passes == 1 ? Prefetch{tile.words + WORDS_AHEAD, PANEL_LINES} : prefetch_part(tile.next, steps, tile.pass, tile.passes);
    with_rows(tile.count, [&](auto n) {
      constexpr int OF_NEXT = n > 2 ? 2 : PANEL_LINES;  // tiles that share a panel have three rows at least
      constexpr int NOTHING = n > 2 ? 0 : PANEL_LINES;
      const auto ahead = multiply_panel<Dot, n, PANEL_LINES>, of_next = multiply_panel<Dot, n, OF_NEXT>;
      const auto multiply = tile.passes == 1 ? ahead : prefetch.lines ? of_next : multiply_panel<Dot, n, NOTHING>;
      multiply(rows, tile.words, steps, prefetch, sums);
    });
  }
}

template <class Dot>
void gemm(const Member& member, const Prepared<Dot>& x, const Groups& groups, const PackedLinear& shape, const Output& output) {
  using Sums = typename Dot::Sum (*)[PANEL / LANES];
  const i64 steps = num_steps(shape);
  // Sums become float values in place: scaled if they are int8, and with the bias.
  const auto put = [&](const PanelTile& tile, Sums sums) {
    const PackedLinear& w = *tile.group.w;
    const auto values = reinterpret_cast<float (*)[PANEL]>(sums);
    for (i64 i = 0; i < tile.count && (w.bias || x.scales); i++) {
      const float row_scale = x.scales ? x.scales[tile.source(i)] : 1.f;
      for (int j = 0; j < PANEL / LANES; j++) {
        const i64 column = tile.panel * PANEL + j * LANES;
        VecF value = value_of<Dot>(sums[i][j], w, column, row_scale);
        if (w.bias) value += load(w.bias + column);
        store(values[i] + j * LANES, value);
      }
    }
    output.put(tile.group, tile.row, tile.count, tile.panel, values);
  };
  each_panel(member, groups, shape, steps * PANEL, [&](const PanelTiles& tiles) {
    if constexpr (IN_AMX_TILES<Dot> || UNPACKS<Dot>) {
      if (tiles.num_rows() > (IN_AMX_TILES<Dot> ? MOST_WITHOUT_TILES<Dot> : MANY_ROWS - 1)) {
        typename Dot::Sum sums[SPAN_ROWS][PANEL / LANES];
        if constexpr (IN_AMX_TILES<Dot>) multiply_in_amx_tiles(x, tiles, steps, sums);
        else if constexpr (HIGH_TILES) multiply_high_tiles(x, tiles, steps, sums);
        else multiply_unpacked(x, tiles, steps, sums);
        return tiles.each([&](const PanelTile& tile) { put(tile, sums + tile.row - tiles.first_row()); });
      }
    }
    if constexpr (!IN_AMX_TILES<Dot> || MOST_WITHOUT_TILES<Dot> > 0) {
      tiles.each([&](const PanelTile& tile) {
        typename Dot::Sum sums[TILE_ROWS][PANEL / LANES];
        multiply_tile(x, tile, steps, sums);
        put(tile, sums);
      });
    }
  });
}

// Activations as a Dot reads them: in place, or converted into the workspace by all threads.
template <class Dot, class E>
Prepared<Dot> prepare(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Buffers& space) {
  using X = typename Dot::X;
  constexpr bool IS_INT8 = std::is_same_v<typename Dot::Sum, VecI>;
  if constexpr (std::is_same_v<X, E>) {
    return {x, stride, nullptr};
  } else {
    const i64 padded = round_up(width, 16);
    X* out = space.prepared.as<X>();
    float* scales = space.row_scales.as<float>();
    member.each_run(rows, 8, [&](i64 begin, i64 end) {
      for (i64 row = begin; row < end; row++) {
        if constexpr (IS_INT8) {
          scales[row] = quantise_row<Dot>(x + row * stride, out + row * padded, padded);
        } else {
          for (i64 i = 0; i < padded; i += LANES) store(out + row * padded + i, load(x + row * stride + i));
        }
      }
    });
    return {out, padded, IS_INT8 ? scales : nullptr};
  }
}

}  // namespace

// The product in whichever format the matrices are packed.
template <class E>
void multiply_groups(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                     const Output& output, const Buffers& space) {
  const auto multiply_as = [&](auto dot) {
    gemm(member, prepare<decltype(dot)>(member, x, stride, rows, width, space), groups, shape, output);
  };
  if (shape.format >= INT4_CODES) {
    multiply_codes(member, x, stride, rows, width, groups, shape, output, space);
  } else if (shape.format == INT8_QUADS) {
    multiply_as(LevelInt8Dot{});
  } else if (shape.format == F32_WORDS) {
    multiply_as(F32Dot{});
  } else if constexpr (std::is_same_v<E, Bf16>) {
    multiply_as(LevelBf16Dot{});
  }
}

bool tiles_agree() {
  constexpr i64 ROWS = 17, STEPS = 40;
  alignas(64) u32 words[STEPS][PANEL], x[ROWS][STEPS];
  u32 state = 1;
  const auto fill = [&](u32* to, i64 count, u32 bits) {
    for (i64 i = 0; i < count; i++) state = state * 1664525u + 1013904223u, to[i] = (state ^ (state >> 15)) & bits;
  };
  const auto agree = [&](auto dot, u32 bits) {
    using Dot = decltype(dot);
    using X = typename Dot::X;
    if constexpr (MOST_WITHOUT_TILES<Dot> > 0) {
      fill(words[0], STEPS * PANEL, bits), fill(x[0], ROWS * STEPS, bits);
      const Prepared<Dot> rows = {reinterpret_cast<const X*>(x[0]), STEPS * Dot::X_PER_WORD, nullptr};
      const Group group = {nullptr, nullptr, ROWS, 0, 0};
      typename Dot::Sum together[ROWS][PANEL / LANES], alone[TILE_ROWS][PANEL / LANES];
      multiply_in_amx_tiles(rows, {group, 0, 0, ceil_div(ROWS, TILE_ROWS), words[0], nullptr}, STEPS, together);
      for (i64 row = 0; row < ROWS; row++) {
        multiply_tile(rows, {group, 0, row, 1, 0, 1, words[0], nullptr}, STEPS, alone);
        if (memcmp(together[row], alone[0], sizeof alone[0])) return false;
      }
    }
    return true;
  };
  // Of bfloat16 no infinities: their exponents are even.
  return agree(LevelBf16Dot{}, 0xff7fff7f) && agree(LevelInt8Dot{}, 0xffffffff);
}

template void multiply_groups(const Member&, const Bf16*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);
template void multiply_groups(const Member&, const float*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);

}  // namespace aengine
