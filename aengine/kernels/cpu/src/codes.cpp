// Products with matrices of codes. The sum of each group of activations is taken by itself, in int32 or float32, and added to the row's
// with the scales in the order of the depth, so a row's result does not depend on its neighbours.
//
// Few rows, which are bound by memory bandwidth, unpack words in registers. For more of them a block of a panel is unpacked once, and stays
// in the L1 cache while all rows of the task are multiplied with it, in the tiles of AMX where there are some and bytes are multiplied: sums
// of integers are exact, so they are the same.
#include "codes.h"

#include "amx.h"
#include "panel_tiles.h"

namespace aengine {

namespace {

constexpr i64 PANEL_VECTORS = PANEL / LANES;
// Of unpacked weights: at most, and unless a group takes more.
constexpr i64 MAX_BLOCK_BYTES = MAX_ACTIVATION_GROUP * PANEL * (i64)sizeof(float), BLOCK_BYTES = MAX_BLOCK_BYTES / 2;
constexpr i64 MAX_BLOCK_GROUPS = BLOCK_BYTES / (16 * PANEL);

// Fewer tiles than these unpack in registers. With vectors of 64 bytes that costs bytes and nibbles little.
template <class Step>
constexpr i64 MANY_TILES = LANES == 16 && std::is_same_v<typename Step::Sum, VecI> ? 3 : 2;

// A row of activations as a Step multiplies it: elements, and for each group its scale and its total.
template <class Step>
struct CodeRow {
  typename Step::X* data;
  float* scales;
  typename Step::Total* totals;
};

// The groups of activations of a matrix, and where a panel has their words. All but the last one have the same size.
struct CodeGroups {
  const PackedLinear& w;
  const i64 depth = round_up(w.in_features, 16), size = w.activation_group, count = ceil_div(depth, size);
  const i64 per_block = ceil_div(w.group_size, size), block = block_words(w);  // a block is a group of weights
  const i64 scales = scale_words(w) * (w.with_offsets ? 2 : 1);       // words of them before the codes
  const i64 factors = factor_words(w), per_factor = w.groups_per_factor;  // words of them before the groups that have them
  const i64 words = aengine::words_of(w.format, size), last_size = depth - (count - 1) * size;

  i64 num_elements(i64 group) const { return group + 1 < count ? size : last_size; }  // in the depth
  const u32* scales_of(const u32* panel, i64 group) const {
    const i64 number = group / per_block;
    return panel + number * block + (per_factor ? (number / per_factor + 1) * factors : 0);
  }
  const u32* factors_of(const u32* panel, i64 group) const {
    return per_factor ? panel + group / per_block / per_factor * (per_factor * block + factors) : nullptr;
  }
  const u32* words_of(const u32* panel, i64 group) const { return scales_of(panel, group) + scales + group % per_block * words * PANEL; }
  void load_scales(const u32* panel, i64 group, float (*out)[PANEL]) const {
    load_group_scales(w, scales_of(panel, group), factors_of(panel, group), out);
  }
};

#define AE_UNROLL _Pragma("GCC unroll 16")

// Calls f(0), f(1), ... with compile-time constants.
template <class F, int... I>
AE_INLINE void repeat(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
AE_INLINE void repeat(F&& f) {
  repeat(f, std::make_integer_sequence<int, N>{});
}

// Words of a group that are unpacked as they are read, a unit at a time; prefetches what comes `ahead` words later.
template <class Dot>
struct PackedWords {
  const Dot& dot;
  const u32* words;
  i64 ahead;
  template <int VECTORS>
  AE_INLINE void prefetch(i64 unit, i64 column) const {
    for (int word = 0; word < Dot::WORDS; word++) {
      const u32* const from = words + (unit * Dot::WORDS + word) * PANEL + column + ahead;
      for (int i = 0; i < VECTORS * LANES; i += LINE_WORDS) __builtin_prefetch(from + i, 0, 2);
    }
  }
  template <int STEP>
  AE_INLINE typename Dot::W weights(i64 unit, i64 column) const {
    return dot.template weights<STEP>(words + unit * Dot::WORDS * PANEL + column);
  }
};

// Weights of a group that are unpacked.
template <class Step>
struct UnpackedWords {
  const typename Step::W* weights_of_steps;
  template <int VECTORS>
  AE_INLINE void prefetch(i64, i64) const {}
  template <int>
  AE_INLINE typename Step::W weights(i64 step, i64 column) const { return weights_of_steps[step * PANEL_VECTORS + column / LANES]; }
};

// The sums of one group for ROWS rows and the columns of VECTORS vectors, in registers: every loop over them is unrolled. A unit has STEPS
// steps; the group begins with element `first`.
template <int STEPS, int ROWS, int VECTORS, class Step, class Words>
AE_INLINE void sum_group(const Step& step, const CodeRow<Step>* rows, i64 group, i64 first, i64 num_units, const Words& words, int column,
                         typename Step::Sum (*sums)[VECTORS]) {
  const typename Step::X* x[ROWS];
  for (int i = 0; i < ROWS; i++) x[i] = rows[i].data + first;
  AE_UNROLL for (int i = 0; i < ROWS; i++) {
    const auto begin = step.first_sum(rows[i].totals[group]);
    AE_UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = begin;
  }
  for (i64 unit = 0; unit < num_units; unit++) {
    words.template prefetch<VECTORS>(unit, column);
    repeat<STEPS>([&](auto n) AE_ALWAYS_INLINE {
      typename Step::W w[VECTORS];
      AE_UNROLL for (int j = 0; j < VECTORS; j++) w[j] = words.template weights<n>(unit, column + j * LANES);
      AE_UNROLL for (int i = 0; i < ROWS; i++) {
        const auto a = Step::activations(x[i] + (unit * STEPS + n) * Step::X_PER_STEP);
        AE_UNROLL for (int j = 0; j < VECTORS; j++) sums[i][j] = Step::multiply_add(sums[i][j], a, w[j]);
      }
    });
  }
}

// Adds the sums of a group with their scales, and what offsets make of them, to the totals; `offsets` null: none.
template <int ROWS, int VECTORS, class Step, class Sum>
AE_INLINE void add_group(const CodeRow<Step>* rows, i64 group, const float* scales, const float* offsets, int column,
                         const Sum (*sums)[VECTORS], VecF (*totals)[VECTORS]) {
  AE_UNROLL for (int j = 0; j < VECTORS; j++) {
    const VecF scale = load(scales + column + j * LANES);
    AE_UNROLL for (int i = 0; i < ROWS; i++) {
      totals[i][j] = fma(__builtin_convertvector(sums[i][j], VecF) * scale, splat(rows[i].scales[group]), totals[i][j]);
    }
  }
  if (!offsets) return;
  AE_UNROLL for (int i = 0; i < ROWS; i++) {
    const float total = (float)rows[i].totals[group] * rows[i].scales[group];
    AE_UNROLL for (int j = 0; j < VECTORS; j++) totals[i][j] = fma(load(offsets + column + j * LANES), splat(total), totals[i][j]);
  }
}

// Calls f(totals) with those of ROWS rows in registers, where they are no longer than that.
template <int ROWS, int VECTORS, class F>
AE_INLINE void with_totals(float (*values)[PANEL], int column, F&& f) {
  asm volatile("" ::: "memory");
  VecF totals[ROWS][VECTORS];
  AE_UNROLL for (int i = 0; i < ROWS; i++) {
    AE_UNROLL for (int j = 0; j < VECTORS; j++) totals[i][j] = load(values[i] + column + j * LANES);
  }
  f(totals);
  AE_UNROLL for (int i = 0; i < ROWS; i++) {
    AE_UNROLL for (int j = 0; j < VECTORS; j++) store(values[i] + column + j * LANES, totals[i][j]);
  }
  asm volatile("" ::: "memory");
}

// The products of one panel with ROWS rows.
template <class Dot, int ROWS>
AE_NOINLINE void multiply_packed(const CodeRow<typename Dot::Step>* rows, const PackedLinear& w, const u32* panel, i64 ahead,
                                 float (*out)[PANEL]) {
  const Dot dot(w);
  const CodeGroups groups{w};
  alignas(64) float scales[2][PANEL];
  for (int i = 0; i < ROWS; i++) memset(out[i], 0, sizeof out[i]);
  for (i64 group = 0; group < groups.count; group++) {
    if (group % groups.per_block == 0) {
      const u32* const from = groups.scales_of(panel, group);
      for (i64 i = 0; i < groups.scales; i += LINE_WORDS) __builtin_prefetch(from + ahead + i, 0, 2);
      groups.load_scales(panel, group, scales);
    }
    const PackedWords<Dot> words{dot, groups.words_of(panel, group), ahead};
    const i64 num_units = groups.num_elements(group) / (Dot::STEPS * Dot::X_PER_STEP);
    constexpr int VECTORS = tile_vectors(LANES == 16 && ROWS < TILE_ROWS ? ROWS : 2 * ROWS);  // as measured
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
      typename Dot::Sum sums[ROWS][VECTORS];
      sum_group<Dot::STEPS, ROWS, VECTORS, typename Dot::Step>(dot, rows, group, group * groups.size, num_units, words, column, sums);
      with_totals<ROWS, VECTORS>(out, column, [&](auto* totals) AE_ALWAYS_INLINE {
        add_group<ROWS, VECTORS, typename Dot::Step>(rows, group, scales[0], w.with_offsets ? scales[1] : nullptr, column, sums, totals);
      });
    }
  }
}

// Some groups of a panel, unpacked.
template <class Step>
struct Block {
  i64 first, end;  // groups
  alignas(64) float scales[MAX_BLOCK_GROUPS][2][PANEL];
  alignas(64) typename Step::W weights[MAX_BLOCK_BYTES / sizeof(typename Step::W)];
};

template <class Dot>
AE_NOINLINE void unpack(const CodeGroups& groups, const u32* panel, Block<typename Dot::Step>& block) {
  const Dot dot(groups.w);
  typename Dot::W* out = block.weights;
  for (i64 group = block.first; group < block.end; group++) {
    groups.load_scales(panel, group, block.scales[group - block.first]);
    const u32* words = groups.words_of(panel, group);
    for (i64 left = groups.num_elements(group); left > 0; left -= Dot::STEPS * Dot::X_PER_STEP, words += Dot::WORDS * PANEL) {
      repeat<Dot::STEPS>([&](auto n) AE_ALWAYS_INLINE {
        for (int column = 0; column < PANEL; column += LANES) {
          *out++ = dot.template weights<n>(words + column);
        }
      });
    }
  }
}

// Adds the products of a block with ROWS rows.
template <class Step, int ROWS>
AE_NOINLINE void multiply_block(const CodeRow<Step>* rows, const CodeGroups& groups, const Block<Step>& block, float (*out)[PANEL]) {
  const Step step(groups.w);
  const bool with_offsets = groups.w.with_offsets;
  const i64 last = block.end;
  // Sums and totals are both in registers, unless these are few, and a step loads more activations than it multiplies.
  constexpr bool IN_REGISTERS = LANES == 16 || !std::is_same_v<Step, ByteStep>;
  constexpr int VECTORS = tile_vectors(IN_REGISTERS ? 2 * ROWS : ROWS);
  for (int column = 0; column < PANEL; column += VECTORS * LANES) {
    // Calls add(f) for each group, where f(totals) adds its sums to them.
    const auto each_group = [&](auto&& add) AE_ALWAYS_INLINE {
      UnpackedWords<Step> words{block.weights};
      for (i64 group = block.first; group < last; group++) {
        const i64 steps = groups.num_elements(group) / Step::X_PER_STEP;
        const float(*scales)[PANEL] = block.scales[group - block.first];
        typename Step::Sum sums[ROWS][VECTORS];
        sum_group<1, ROWS, VECTORS, Step>(step, rows, group, group * groups.size, steps, words, column, sums);
        add([&](auto* totals) AE_ALWAYS_INLINE {
          add_group<ROWS, VECTORS, Step>(rows, group, scales[0], with_offsets ? scales[1] : nullptr, column, sums, totals);
        });
        words.weights_of_steps += steps * PANEL_VECTORS;
      }
    };
    if constexpr (IN_REGISTERS) {
      with_totals<ROWS, VECTORS>(out, column, [&](auto* totals) AE_ALWAYS_INLINE {
        each_group([&](auto&& add_sums) AE_ALWAYS_INLINE { add_sums(totals); });
      });
    } else {
      each_group([&](auto&& add_sums) AE_ALWAYS_INLINE { with_totals<ROWS, VECTORS>(out, column, add_sums); });
    }
  }
}

#if defined(AENGINE_HAS_TILES)
template <class Step>
constexpr bool IN_TILES = std::is_same_v<Step, QuadStep>;
constexpr i64 TILE_DEPTH = AMX_WORDS * QuadStep::X_PER_STEP;

// Whether tiles are faster: groups whose depth fills them, and rows (measured on a Xeon of 2023, where groups of 32 gain nothing).
inline bool suit_tiles(const CodeGroups& groups, i64 num_rows) {
  return num_rows >= 2 * AMX_ROWS && groups.size % TILE_DEPTH == 0 && groups.last_size == groups.size;
}

// A row is a line longer than a panel: places that are 4 KB apart would wait for each other.
typedef i32 TileSums[AMX_ROWS][PANEL + LINE_WORDS];

// Adds the sums of COUNT groups from `first` on to those of `rows` rows, one group after another.
template <int COUNT, bool WITH_OFFSETS>
AE_INLINE void add_tile_sums(const CodeRow<QuadStep>* rows, i64 num_rows, i32 zero, i64 first, const float (*scales)[2][PANEL],
                             const TileSums* sums, float (*out)[PANEL]) {
  VecF scale[COUNT][PANEL_VECTORS], offset[COUNT][PANEL_VECTORS];
  AE_UNROLL for (int n = 0; n < COUNT; n++) {
    AE_UNROLL for (int j = 0; j < PANEL_VECTORS; j++) {
      scale[n][j] = load(scales[n][0] + j * LANES);
      if (WITH_OFFSETS) offset[n][j] = load(scales[n][1] + j * LANES);
    }
  }
  for (i64 i = 0; i < num_rows; i++) {
    VecF total[PANEL_VECTORS];
    AE_UNROLL for (int j = 0; j < PANEL_VECTORS; j++) total[j] = load(out[i] + j * LANES);
    AE_UNROLL for (int n = 0; n < COUNT; n++) {
      const i32 of_row = rows[i].totals[first + n];
      const float row_scale = rows[i].scales[first + n];
      AE_UNROLL for (int j = 0; j < PANEL_VECTORS; j++) {
        const VecI sum = load_as<VecI>(sums[n][i] + j * LANES) - zero * of_row;
        total[j] = fma(__builtin_convertvector(sum, VecF) * scale[n][j], splat(row_scale), total[j]);
        if (WITH_OFFSETS) total[j] = fma(offset[n][j], splat((float)of_row * row_scale), total[j]);
      }
    }
    AE_UNROLL for (int j = 0; j < PANEL_VECTORS; j++) store(out[i] + j * LANES, total[j]);
  }
}

// Adds the products of a block with up to AMX_ROWS rows. While tiles multiply two groups, vectors add the sums of the two before.
AE_NOINLINE void multiply_tile_rows(const CodeRow<QuadStep>* rows, i64 count, const CodeGroups& groups, const Block<QuadStep>& block,
                                    float (*out)[PANEL]) {
  const i64 stride = count > 1 ? rows[1].data - rows[0].data : 0;
  bool in_order = true;  // rows lie one after another
  for (i64 i = 1; i < count; i++) in_order &= rows[i].data - rows[i - 1].data == stride;
  alignas(64) TileSums sums[2][2];
  alignas(64) QuadStep::X activations[AMX_ROWS][TILE_DEPTH];
  const u32* words = reinterpret_cast<const u32*>(block.weights);
  const auto multiply = [&](i64 group, i32* to) AE_ALWAYS_INLINE {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 column = group * groups.size; column < (group + 1) * groups.size; column += TILE_DEPTH, words += AMX_WORDS * PANEL) {
      if (in_order) {
        _tile_loadd(4, rows[0].data + column, stride);
      } else {
        for (i64 i = 0; i < count; i++) memcpy(activations[i], rows[i].data + column, TILE_DEPTH);
        before_tiles_are_read();
        _tile_loadd(4, activations, sizeof activations[0]);
      }
      AE_MULTIPLY_PANEL(_tile_dpbsud, words);
    }
    _tile_stored(0, to, sizeof(TileSums) / AMX_ROWS);
    _tile_stored(1, to + 16, sizeof(TileSums) / AMX_ROWS);
    _tile_stored(2, to + 32, sizeof(TileSums) / AMX_ROWS);
    _tile_stored(3, to + 48, sizeof(TileSums) / AMX_ROWS);
    before_tiles_are_read();
  };
  const auto add = [&](i64 first, i64 end, const TileSums* from) AE_ALWAYS_INLINE {
    const auto add_groups = [&](auto with_offsets) AE_ALWAYS_INLINE {
      const auto* scales = block.scales + (first - block.first);
      if (end - first == 2) {
        add_tile_sums<2, with_offsets>(rows, count, groups.w.zero, first, scales, from, out);
      } else {
        add_tile_sums<1, with_offsets>(rows, count, groups.w.zero, first, scales, from, out);
      }
    };
    groups.w.with_offsets ? add_groups(std::true_type{}) : add_groups(std::false_type{});
  };
  const AmxConfig config(count);
  before_tiles_are_read();
  _tile_loadconfig(&config);
  i64 before = block.first;
  int half = 0;
  for (i64 group = block.first; group < block.end; half ^= 1) {
    const i64 end = smaller(block.end, group + 2);
    for (i64 n = group; n < end; n++) multiply(n, sums[half][n - group][0]);
    if (before < group) add(before, group, sums[half ^ 1]);
    before = group;
    group = end;
  }
  if (before < block.end) add(before, block.end, sums[half ^ 1]);
}

// Adds the products of a block with all rows.
inline void multiply_block_in_tiles(const CodeRow<QuadStep>* rows, i64 num_rows, const CodeGroups& groups, const Block<QuadStep>& block,
                                    float (*out)[PANEL]) {
  for (i64 row = 0; row < num_rows; row += AMX_ROWS) {
    multiply_tile_rows(rows + row, smaller(AMX_ROWS, num_rows - row), groups, block, out + row);
  }
  _tile_release();  // so that the kernel has less to save
}
#else
template <class Step>
constexpr bool IN_TILES = false;
inline bool suit_tiles(const CodeGroups&, i64) { return false; }
template <class Step>
void multiply_block_in_tiles(const CodeRow<Step>*, i64, const CodeGroups&, const Block<Step>&, float (*)[PANEL]);
#endif

// Brings `count` lines from `words` on to the L2 cache.
inline void prefetch_lines(const u32* words, i64 count) {
  for (i64 i = 0; i < count; i++) __builtin_prefetch(words + i * LINE_WORDS, 0, 2);
}

// The products of a panel with all rows of a task; `row_of(i)` is that of number i of the group, `done(tile, values)` takes the products of
// a tile. Meanwhile it prefetches the words of the next block, so that memory is never idle.
template <class Dot, class RowOf, class Done>
void multiply_unpacked(const PanelTiles& tiles, RowOf&& row_of, Done&& done) {
  using Step = typename Dot::Step;
  const CodeGroups groups{*tiles.group.w};
  const i64 step_bytes = PANEL_VECTORS * (i64)sizeof(typename Step::W) / Step::X_PER_STEP;  // of an element of the depth
  const i64 block_groups = larger(1, BLOCK_BYTES / (groups.size * step_bytes));
  alignas(64) float values[SPAN_ROWS][PANEL];
  CodeRow<Step> rows[SPAN_ROWS];
  Block<Step> block;
  const i64 first_row = tiles.first_row(), num_rows = tiles.num_rows();
  const bool in_tiles = IN_TILES<Step> && suit_tiles(groups, num_rows);
  for (i64 i = 0; i < num_rows; i++) rows[i] = row_of(first_row + i);
  memset(values, 0, (size_t)num_rows * sizeof values[0]);
  for (block.first = 0; block.first < groups.count; block.first = block.end) {
    block.end = smaller(groups.count, block.first + block_groups);
    unpack<Dot>(groups, tiles.words, block);
    const bool last = block.end == groups.count;
    const u32* const next = last ? tiles.next : groups.scales_of(tiles.words, block.end);
    const i64 lines = block_groups * groups.words * PANEL / LINE_WORDS, share = ceil_div(lines, tiles.size());
    if constexpr (IN_TILES<Step>) {
      if (in_tiles) multiply_block_in_tiles(rows, num_rows, groups, block, values);
    }
    tiles.each([&](const PanelTile& tile) {
      const i64 begin = tile.row - first_row;
      if (next) prefetch_lines(next + tile.pass * share * LINE_WORDS, smaller(share, lines - tile.pass * share));
      if (!in_tiles) with_rows(tile.count, [&](auto n) {  // tiles that share a panel have three rows at least
        if constexpr (n > 2) multiply_block<Step, n>(rows + begin, groups, block, values + begin);
      });
      if (last) done(tile, values + begin);
    });
  }
}

// The activations of all rows of a product, as a Step multiplies them.
template <class Step>
struct CodeRows {
  CodeRow<Step> first;
  i64 padded, num_groups, size;  // elements of a row, groups of a row, elements of a group

  CodeRows(i64 rows, i64 width, const PackedLinear& shape, const Buffers& space)
      : padded(round_up(width, 16)), num_groups(ceil_div(padded, shape.activation_group)), size(shape.activation_group) {
    float* scales = space.row_scales.as<float>();
    first = {space.prepared.as<typename Step::X>(), scales, (typename Step::Total*)(scales + rows * num_groups)};
  }
  CodeRow<Step> at(i64 row, i64 column) const {
    const i64 group = row * num_groups + column / size;
    return {first.data + row * padded + column, first.scales + group, first.totals + group};
  }
};

template <class Step, class E>
void put_rows(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const PackedLinear& shape, const CodeRows<Step>& out) {
  const i64 size = out.size;
  member.each_run(rows, 8, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; row++) {
      for (i64 first = 0; first < out.padded; first += size) {
        const i64 count = smaller(size, out.padded - first);
        const CodeRow<Step> to = out.at(row, first);
        if (shape.order) {
          alignas(64) float values[MAX_ACTIVATION_GROUP] = {};
          for (i64 i = 0; i < smaller(count, width - first); i++) values[i] = widen(x[row * stride + shape.order[first + i]]);
          *to.scales = Step::put_group(values, count, to.data, *to.totals);
        } else {
          *to.scales = Step::put_group(x + row * stride + first, count, to.data, *to.totals);
        }
      }
    }
  });
}

template <class Dot>
void multiply_rows(const Member& member, const CodeRows<typename Dot::Step>& x, const Groups& groups, const PackedLinear& shape,
                   const Output& output) {
  using Step = typename Dot::Step;
  const auto put = [&](const PanelTile& tile, float (*values)[PANEL]) {
    const float* const bias = tile.group.w->bias;
    for (i64 i = 0; i < tile.count && bias; i++) {
      for (int j = 0; j < PANEL; j += LANES) store(values[i] + j, load(values[i] + j) + load(bias + tile.panel * PANEL + j));
    }
    output.put(tile.group, tile.row, tile.count, tile.panel, values);
  };
  each_panel(member, groups, shape, panel_words(shape), [&](const PanelTiles& tiles) {
    const auto row_of = [&](i64 i) { return x.at(tiles.source(i), tiles.group.column); };
    if (tiles.size() >= MANY_TILES<Step>) return multiply_unpacked<Dot>(tiles, row_of, put);
    tiles.each([&](const PanelTile& tile) {
      CodeRow<Step> x_rows[TILE_ROWS];
      for (i64 i = 0; i < tile.count; i++) x_rows[i] = row_of(tile.row + i);
      alignas(64) float values[TILE_ROWS][PANEL];
      // The second pass finds the panel in the caches, and fetches the next one.
      const i64 ahead = tile.pass == 0 ? WORDS_AHEAD : tile.next ? tile.next - tile.words : PANEL;
      with_rows(tile.count, [&](auto n) { multiply_packed<Dot, n>(x_rows, *tile.group.w, tile.words, ahead, values); });
      put(tile, values);
    });
  });
}

}  // namespace

template <class E>
void multiply_codes(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                    const Output& output, const Buffers& space) {
  const auto multiply_as = [&](auto* dot) {
    using Dot = std::remove_pointer_t<decltype(dot)>;
    const CodeRows<typename Dot::Step> prepared(rows, width, shape, space);
    put_rows(member, x, stride, rows, width, shape, prepared);
    multiply_rows<Dot>(member, prepared, groups, shape, output);
  };
  if (shape.format == FLOAT8_CODES) return multiply_as((Float8Dot*)nullptr);
  if (shape.format == INT8_CODES) return shape.float_activations ? multiply_as((WideByteDot*)nullptr) : multiply_as((ByteDot*)nullptr);
  if (shape.float_activations) return multiply_as((WideInt4Dot*)nullptr);  // 2 and 6 bits are kept as 4 and 8 with these
  if (shape.format == INT2_CODES) return multiply_as((FewBitsDot<2>*)nullptr);
  if (shape.format == INT6_CODES) return multiply_as((FewBitsDot<6>*)nullptr);
  return shape.table ? multiply_as((TableInt4Dot*)nullptr) : multiply_as((FewBitsDot<4>*)nullptr);
}

template void multiply_codes(const Member&, const Bf16*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);
template void multiply_codes(const Member&, const float*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);

}  // namespace aengine
