// Products in the tiles of AMX: a tile is 16 rows of 64 bytes, and an instruction multiplies 16 rows of activations with 16 columns of
// weights, 16 words deep. A panel is made of such tiles as it is packed.
//
// A bfloat16 sum is taken over the 16 words of a tile, even and odd depths by themselves, then added to the sum of those before; what is
// subnormal is zero. A product of one or two rows, which memory bounds, does the same in vectors: it is faster, and a row's result does not
// depend on its neighbours. It is not that of other levels. Sums of int8 are exact, so few rows take Int8Dot.
#pragma once
#include "dot.h"
#include "panel_tiles.h"

#if defined(AENGINE_AMX_MODEL)  // the instructions on arrays, for tests
#include AENGINE_AMX_MODEL
#endif

namespace aengine {

// Rows of activations in the form that a Dot multiplies.
template <class Dot>
struct Prepared {
  const typename Dot::X* data;
  i64 stride;
  const float* scales;  // per row, of int8
};

#if defined(AENGINE_AMX_MODEL) || (defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define AENGINE_HAS_TILES 1

struct AmxBf16Dot {
  using X = Bf16;
  using Sum = VecF;
  static constexpr int X_PER_WORD = 2, PARTS = 1;
};

// Unsigned activations (q + 128), as Int8Dot has them with VNNI.
#if defined(__AVX512VNNI__)
struct AmxInt8Dot : Int8Dot {};
#else
struct AmxInt8Dot : UnsignedQuads {};
#endif

// The most rows of a group that are multiplied without tiles, where that is faster (measured on a Xeon of 2023).
template <class Dot>
constexpr i64 MOST_WITHOUT_TILES = std::is_same_v<Dot, AmxBf16Dot> ? 2 : std::is_base_of_v<Int8Dot, Dot> ? 4 : 0;

using LevelBf16Dot = AmxBf16Dot;
using LevelInt8Dot = AmxInt8Dot;
template <class Dot>
constexpr bool IN_AMX_TILES = std::is_same_v<Dot, AmxBf16Dot> || std::is_same_v<Dot, AmxInt8Dot>;

constexpr i64 AMX_ROWS = 16, AMX_WORDS = 16;   // of a tile
constexpr i64 AMX_BLOCK = 8 * AMX_WORDS;        // steps of a panel that stay in the L1 cache while all rows are multiplied with them
constexpr i64 AMX_AHEAD = 2 * AMX_WORDS * PANEL;  // words that are prefetched ahead, to the L1 cache: measured
constexpr i64 PANEL_BYTES = PANEL * sizeof(u32);  // of a step

// What `ldtilecfg` reads.
struct alignas(64) AmxConfig {
  u8 palette = 1, start_row = 0, reserved[14] = {};
  u16 row_bytes[16] = {};
  u8 rows[16] = {};
  // Tiles 0 to 3 are sums and 4 activations, of `count` rows; 5 to 7 are weights.
  explicit AmxConfig(i64 count) {
    for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = (u8)(i < 5 ? count : AMX_WORDS);
  }
};

// The compiler's instructions do not say what memory they read.
AE_INLINE void before_tiles_are_read() { asm volatile("" ::: "memory"); }

#define AE_MULTIPLY_PANEL(instruction, words)        \
  _tile_loadd(5, (words), PANEL_BYTES);              \
  _tile_loadd(6, (words) + 16, PANEL_BYTES);         \
  instruction(0, 4, 5);                              \
  _tile_loadd(7, (words) + 32, PANEL_BYTES);         \
  instruction(1, 4, 6);                              \
  _tile_loadd(5, (words) + 48, PANEL_BYTES);         \
  instruction(2, 4, 7);                              \
  instruction(3, 4, 5)

// The sums of a panel for ROWS rows, one or two.
template <int ROWS>
AE_NOINLINE void multiply_as_tiles(const Bf16* const* rows, const u32* panel, i64 steps, VecF (*sums)[PANEL / LANES]) {
  constexpr int VECTORS = PANEL / LANES;
  VecF totals[ROWS][VECTORS] = {};
  for (i64 first = 0; first < steps; first += AMX_WORDS) {
    VecF even[ROWS][VECTORS] = {}, odd[ROWS][VECTORS] = {};
    for (i64 step = first; step < smaller(steps, first + AMX_WORDS); step++) {
      const u32* words = panel + step * PANEL;
      for (int i = 0; i < PANEL; i += LINE_WORDS) __builtin_prefetch(words + WORDS_AHEAD + i, 0, 2);
      for (int j = 0; j < VECTORS; j++) {
        const VecU word = load_words(words + j * LANES);
        for (int i = 0; i < ROWS; i++) {
          even[i][j] = fma(splat(widen(rows[i][2 * step])), (VecF)(word << 16), even[i][j]);
          odd[i][j] = fma(splat(widen(rows[i][2 * step + 1])), (VecF)(word & 0xffff0000u), odd[i][j]);
        }
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < VECTORS; j++) totals[i][j] += even[i][j] + odd[i][j];
    }
  }
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < VECTORS; j++) sums[i][j] = totals[i][j];
  }
}

// The same, and with subnormal numbers as zero.
inline void multiply_without_tiles(const Bf16* const* rows, i64 count, const u32* panel, i64 steps, VecF (*sums)[PANEL / LANES]) {
#if defined(__x86_64__)
  constexpr unsigned SUBNORMALS_ARE_ZERO = 0x8040;  // in numbers that are read, and in results
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | SUBNORMALS_ARE_ZERO);
#endif
  (count == 1 ? multiply_as_tiles<1> : multiply_as_tiles<2>)(rows, panel, steps, sums);
#if defined(__x86_64__)
  _mm_setcsr(before);
#endif
}

// The sums of a panel for all rows of a task.
template <class Dot>
void multiply_in_amx_tiles(const Prepared<Dot>& x, const PanelTiles& tiles, i64 steps, typename Dot::Sum (*sums)[PANEL / LANES]) {
  using X = typename Dot::X;
  constexpr i64 TILE_DEPTH = AMX_WORDS * Dot::X_PER_WORD;
  const Group& group = tiles.group;
  // The last tile of the depth, with zeros where the panel ends.
  alignas(64) u32 last_words[AMX_WORDS][PANEL] = {};
  alignas(64) X activations[AMX_ROWS][TILE_DEPTH] = {};
  const i64 whole = steps / AMX_WORDS * AMX_WORDS;
  memcpy(last_words, tiles.words + whole * PANEL, (size_t)((steps - whole) * PANEL_BYTES));
  memset(sums, 0, (size_t)tiles.num_rows() * sizeof *sums);
  const i64 block = tiles.num_rows() > AMX_ROWS ? AMX_BLOCK : steps;
  for (i64 first = 0; first < steps; first += block) {
    const i64 end = smaller(steps, first + block);
    for (i64 row = 0; row < tiles.num_rows(); row += AMX_ROWS) {
      const i64 count = smaller(AMX_ROWS, tiles.num_rows() - row), from = tiles.first_row() + row;
      const AmxConfig config(count);
      float* const out = (float*)sums[row];
      before_tiles_are_read();
      _tile_loadconfig(&config);
      _tile_loadd(0, out, PANEL_BYTES);
      _tile_loadd(1, out + 16, PANEL_BYTES);
      _tile_loadd(2, out + 32, PANEL_BYTES);
      _tile_loadd(3, out + 48, PANEL_BYTES);
      for (i64 step = first; step < end; step += AMX_WORDS) {
        const u32* words = step < whole ? tiles.words + step * PANEL : last_words[0];
        if (row == 0) {
          for (i64 i = 0; i < AMX_WORDS * PANEL; i += LINE_WORDS) __builtin_prefetch(words + AMX_AHEAD + i, 0, 3);
        }
        const i64 column = group.column + step * Dot::X_PER_WORD;
        if (group.rows || step >= whole) {
          const i64 size = smaller(AMX_WORDS, steps - step) * 4;  // bytes
          if (step >= whole) memset(activations, 0, sizeof activations);
          for (i64 i = 0; i < count; i++) {
            memcpy(activations[i], x.data + tiles.source(from + i) * x.stride + column, (size_t)size);
          }
          before_tiles_are_read();
          _tile_loadd(4, activations, 64);
        } else {
          _tile_loadd(4, x.data + (group.first + from) * x.stride + column, x.stride * (i64)sizeof(X));
        }
        if constexpr (std::is_same_v<Dot, AmxBf16Dot>) {
          AE_MULTIPLY_PANEL(_tile_dpbf16ps, words);
        } else {
          AE_MULTIPLY_PANEL(_tile_dpbusd, words);
        }
      }
      _tile_stored(0, out, PANEL_BYTES);
      _tile_stored(1, out + 16, PANEL_BYTES);
      _tile_stored(2, out + 32, PANEL_BYTES);
      _tile_stored(3, out + 48, PANEL_BYTES);
    }
  }
  _tile_release();  // so that the kernel has less to save
}

#else

using LevelBf16Dot = Bf16Dot;
using LevelInt8Dot = Int8Dot;
template <class Dot>
constexpr bool IN_AMX_TILES = false;
template <class Dot>
constexpr i64 MOST_WITHOUT_TILES = 0;
template <class Dot>
void multiply_in_amx_tiles(const Prepared<Dot>&, const PanelTiles&, i64, typename Dot::Sum (*)[PANEL / LANES]);

#endif

}  // namespace aengine
