// The tasks of a product: a task is a run of panels for a span of rows of one group; there is no barrier between groups. It reads each
// panel once per TILE_ROWS rows.
#pragma once
#include "gemm.h"

namespace aengine {

constexpr int LINE_WORDS = 16;
constexpr i64 WORDS_AHEAD = 16 * PANEL;  // prefetch distance for few rows, which are bound by memory bandwidth: 4 KB, measured
constexpr i64 SPAN_ROWS = 192;           // rows of a task, so that their activations stay in the L2 cache
constexpr i64 MAX_RUN = 8;               // panels of a task
constexpr i64 TASKS_PER_THREAD = 4;      // at least, where there are enough panels: a thread that is preempted delays the others less

// Up to TILE_ROWS rows of a group and one panel of its matrix.
struct PanelTile {
  const Group& group;
  i64 panel, row, count;
  i64 pass, passes;   // over the panel in this task
  const u32* words;   // of the panel
  const u32* next;    // of the panel that this thread reads after it; null: not known

  // The row of x that is number `i` of the tile.
  i64 source(i64 i) const { return group.rows ? group.rows[row + i] : group.first + row + i; }
};

// All tiles of a task with one panel.
struct PanelTiles {
  const Group& group;
  i64 panel, first_tile, end_tile;
  const u32 *words, *next;  // as in PanelTile

  i64 size() const { return end_tile - first_tile; }
  i64 first_row() const { return row_of(first_tile); }
  i64 num_rows() const { return row_of(end_tile) - first_row(); }  // at most SPAN_ROWS
  i64 source(i64 row) const { return group.rows ? group.rows[row] : group.first + row; }  // the row of x that is row `row` of the group

  // Calls f(tile) for each.
  template <class F>
  void each(F&& f) const {
    for (i64 tile = first_tile; tile < end_tile; tile++) {
      f(PanelTile{group, panel, row_of(tile), row_of(tile + 1) - row_of(tile), tile - first_tile, size(), words, next});
    }
  }

 private:
  i64 row_of(i64 tile) const { return tile * group.count / ceil_div(group.count, TILE_ROWS); }
};

// Calls f(tiles) for the tiles of all panels of a product, which have `panel_words` words.
template <class F>
void each_panel(const Member& member, const Groups& groups, const PackedLinear& shape, i64 panel_words, F&& f) {
  const i64 panels = num_panels(shape), most_spans = ceil_div(groups.most_rows, SPAN_ROWS);
  const i64 run = larger(1, smaller(MAX_RUN, groups.size * panels / (TASKS_PER_THREAD * member.size())));
  const i64 runs = ceil_div(panels, run), tasks_per_group = runs * most_spans;
  member.each_ahead(groups.size * tasks_per_group, [&](i64 task, i64 next_task) {
    const Group& group = groups.list[task / tasks_per_group];
    const i64 span = task % tasks_per_group / runs;
    if (span * SPAN_ROWS >= group.count) return;
    const i64 tiles = ceil_div(group.count, TILE_ROWS), tiles_per_span = ceil_div(tiles, ceil_div(group.count, SPAN_ROWS));
    const i64 first_tile = span * tiles_per_span, end_tile = smaller(tiles, first_tile + tiles_per_span);
    const i64 first_panel = task % runs * run, end_panel = smaller(panels, first_panel + run);
    const auto words_of = [&](const Group& of, i64 panel) { return of.count ? of.w->words + panel * panel_words : nullptr; };
    const u32* const next_words = next_task < 0 ? nullptr : words_of(groups.list[next_task / tasks_per_group], next_task % runs * run);
    for (i64 panel = first_panel; panel < end_panel; panel++) {
      const u32* words = words_of(group, panel);
      const u32* next = panel + 1 < end_panel ? words_of(group, panel + 1) : next_words;
      f(PanelTiles{group, panel, first_tile, end_tile, words, next});
    }
  });
}

// Calls f(tile) for all tiles of a product.
template <class F>
void each_tile(const Member& member, const Groups& groups, const PackedLinear& shape, i64 panel_words, F&& f) {
  each_panel(member, groups, shape, panel_words, [&](const PanelTiles& tiles) { tiles.each(f); });
}

}  // namespace aengine
