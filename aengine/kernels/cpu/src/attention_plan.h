// How a step's attention is cut into tasks. Planned once per step and head kind, used by every layer of the kind.
//
// Per KV head the queries of a row are (tokens x group) query rows: number r is token r / group of the row. A tile is up to 32 of
// them. A tile's KV is cut at multiples of PARTITION tokens; partitions are merged in order with the same arithmetic whether one
// task computes all of them or each is a task of its own, so results depend neither on the batch nor on the number of threads.
#pragma once
#include <algorithm>

#include "buffers.h"
#include "kv.h"

namespace aengine {

constexpr i64 TILE_QUERIES = 32;
constexpr i64 PARTITION = 256;  // tokens

struct Tile {
  i32 row;
  i32 first;       // query row
  i32 count;       // query rows
  i32 partitions;  // up to the last token that the tile sees
  i64 first_task;
};

struct AttentionTask {
  i32 tile;
  i32 partition;  // -1: all of the tile's
};

struct AttentionPlan {
  const Tile* tiles;
  const AttentionTask* tasks;
  i64 num_tiles, num_tasks;
  bool split;               // one task per partition
  i64 heads_per_task;       // KV heads
  float* partials;          // of split tasks: [task][kv head][count of TILE_QUERIES][value_dim + 2]
  i64 partial_stride;       // of one task and head
};

inline i64 sequence_length(const Step& step, i64 row, i64 page_size) {
  const i64 pages = step.kv_indptr[row + 1] - step.kv_indptr[row];
  return (pages - 1) * page_size + step.last_page_len[row];
}

// Fails only for lack of memory.
inline bool plan_attention(const Step& step, const HeadKind& kind, i64 page_size, int threads, PlanBuffers& space, AttentionPlan& plan) {
  const i64 kv_heads = kind.kv_heads, group = kind.heads / kv_heads;
  i64 num_tiles = 0;
  for (i64 row = 0; row < step.num_rows; row++) {
    num_tiles += ceil_div((step.qo_indptr[row + 1] - step.qo_indptr[row]) * group, TILE_QUERIES);
  }
  if (!space.tiles.reserve<Tile>(num_tiles)) return false;
  Tile* tiles = space.tiles.as<Tile>();
  i64 index = 0, partitions = 0, most_queries = 1;
  for (i64 row = 0; row < step.num_rows; row++) {
    const i64 length = step.qo_indptr[row + 1] - step.qo_indptr[row], queries = length * group;
    const i64 start = sequence_length(step, row, page_size) - length;
    for (i64 first = 0; first < queries; first += TILE_QUERIES) {
      const i64 count = smaller(TILE_QUERIES, queries - first);
      i64 limit = start + (first + count - 1) / group + 1;
      for (i64 query = first; step.seen && query < first + count; query++) {
        limit = larger(limit, step.seen[step.qo_indptr[row] + query / group]);
      }
      tiles[index++] = {(i32)row, (i32)first, (i32)count, (i32)ceil_div(limit, PARTITION), 0};
      partitions += ceil_div(limit, PARTITION);
      most_queries = larger(most_queries, count);
    }
  }
  // The most work first, so that no thread starts a long task when the others are done.
  std::sort(tiles, tiles + num_tiles, [](const Tile& a, const Tile& b) {
    const i64 work_a = (i64)a.count * a.partitions, work_b = (i64)b.count * b.partitions;
    return work_a != work_b ? work_a > work_b : a.row != b.row ? a.row < b.row : a.first < b.first;
  });
  const bool split = num_tiles * kv_heads < 2 * threads && partitions > num_tiles;
  const i64 num_tasks = split ? partitions : num_tiles;
  if (!space.tasks.reserve<AttentionTask>(num_tasks)) return false;
  AttentionTask* tasks = space.tasks.as<AttentionTask>();
  i64 next = 0;
  for (i64 tile = 0; tile < num_tiles; tile++) {
    tiles[tile].first_task = next;
    if (!split) tasks[next++] = {(i32)tile, -1};
    else for (i32 partition = 0; partition < tiles[tile].partitions; partition++) tasks[next++] = {(i32)tile, partition};
  }
  const i64 partial_stride = most_queries * (kind.value_dim + 2);
  if (split && !space.partials.reserve<float>(num_tasks * kv_heads * partial_stride)) return false;
  i64 heads_per_task = kv_heads;
  while (heads_per_task % 2 == 0 && num_tasks * (kv_heads / heads_per_task) < 4 * threads) heads_per_task /= 2;
  if (num_tasks * (kv_heads / heads_per_task) < 4 * threads) heads_per_task = 1;
  plan = {tiles, tasks, num_tiles, num_tasks, split, heads_per_task, space.partials.as<float>(), partial_stride};
  return true;
}

}  // namespace aengine
