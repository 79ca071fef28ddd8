// How attention is computed: online softmax (Milakov and Gimelshein, 2018) over blocks of KV_RUN tokens, tile by tile as
// `attention_plan.h` cuts the work. Nothing beyond a row's length reaches a result, and no page that lies before a tile's window.
#include "attention.h"

#include "dot.h"
#include "rope.h"
#include "softmax.h"

namespace aengine {

namespace {

constexpr i64 RUN_BLOCKS = KV_RUN / BLOCK;
// What queries and softmax weights are rounded to integers up to, to be multiplied with int8 pages: sums of products stay below 2^31.
constexpr float QUERY_LIMIT = 16383, WEIGHT_LIMIT = 32767;
static_assert((i64)QUERY_LIMIT * 127 * MAX_KEY_DIM < ((i64)1 << 31) && (i64)WEIGHT_LIMIT * 127 * KV_RUN < ((i64)1 << 31));

AE_INLINE VecF as_floats(VecF x) { return x; }
AE_INLINE VecF as_floats(VecI x) { return __builtin_convertvector(x, VecF); }

// Up to KV_RUN consecutive tokens of one KV head, block by block.
struct KvRun {
  i64 first;                     // token, a multiple of 16
  i64 end;                       // token
  const u32* keys[RUN_BLOCKS];   // blocks beyond the last repeat it
  const u32* values[RUN_BLOCKS];
  const u32* ahead[RUN_BLOCKS];  // what is prefetched while keys are read; all null: nothing
  const u32* next[RUN_BLOCKS];   // and while values are; null: nothing
  int shift;                     // 1: these are blocks of halves
};

// scores[i][token - run.first] = query i . key, for all blocks of the run (undefined beyond). Of int8 pages without their scales.
template <class Dot, int ROWS>
AE_NOINLINE void score(const typename Dot::X* query, i64 dim, const KvRun& run, bool prefetch, float* scores) {
  constexpr int VECTORS = tile_vectors(ROWS);
  const i64 steps = dim / Dot::X_PER_WORD, width = run.end - run.first;
  for (i64 token = 0; token < width; token += VECTORS * LANES) {
    const u32 *keys[VECTORS], *ahead[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      const i64 at = token + j * LANES;  // below KV_RUN, which a tile's width divides
      keys[j] = run.keys[at / BLOCK] + at % BLOCK;
      ahead[j] = run.ahead[at / BLOCK];
    }
    typename Dot::Sum sums[ROWS][VECTORS] = {};
    for (i64 step = 0; step < steps; step++) {
      if (prefetch) {
        for (int j = 0; j < VECTORS; j += BLOCK / LANES) __builtin_prefetch(ahead[j] + (step * BLOCK >> run.shift), 0, 2);
      }
      for_each_part<Dot>([&](auto part) {
        decltype(Dot::template weights<part>(VecU{})) k[VECTORS];
        for (int j = 0; j < VECTORS; j++) k[j] = Dot::template weights<part>(load_words(keys[j] + step * BLOCK));
        for (int i = 0; i < ROWS; i++) {
          const auto q = Dot::template activations<part>(query + i * dim + step * Dot::X_PER_WORD);
          for (int j = 0; j < VECTORS; j++) sums[i][j] = Dot::multiply_add(sums[i][j], q, k[j]);
        }
      });
    }
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < VECTORS; j++) store(scores + i * KV_RUN + token + j * LANES, as_floats(sums[i][j]));
    }
  }
}

// weighted[i][d .. d + VECTORS * LANES] = itself * factors[i] + sum over tokens of weights[i][token] * value. Or, where these are integers,
// itself + sum * factors[i]. Only words that hold tokens before run.end are read. The upper half of a last odd pair is taken as zero, since
// it may be NaN; integers have weights of zero there.
template <class Dot, int ROWS, int VECTORS>
AE_INLINE void add_weighted_columns(const typename Dot::X* weights, i64 dim, i64 d, const KvRun& run, bool prefetch, const float* factors,
                                    float* weighted) {
  constexpr bool INTEGERS = std::is_same_v<typename Dot::Sum, VecI>;
  typename Dot::Sum sums[ROWS][VECTORS] = {};
  for (int i = 0; i < ROWS && !INTEGERS; i++) {
    for (int j = 0; j < VECTORS; j++) sums[i][j] = (typename Dot::Sum)(load(weighted + i * dim + d + j * LANES) * factors[i]);
  }
  const auto add = [&](i64 token, u32 mask) __attribute__((always_inline)) {
    const i64 offset = token % BLOCK / Dot::X_PER_WORD * dim + d;
    const u32* words = run.values[token / BLOCK] + offset;
    if (prefetch && run.next[token / BLOCK]) {
      for (int j = 0; j < VECTORS * LANES; j += BLOCK) __builtin_prefetch(run.next[token / BLOCK] + ((offset + j) >> run.shift), 0, 2);
    }
    for_each_part<Dot>([&](auto part) {
      decltype(Dot::template weights<part>(VecU{})) v[VECTORS];
      for (int j = 0; j < VECTORS; j++) v[j] = Dot::template weights<part>(load_words(words + j * LANES) & mask);
      for (int i = 0; i < ROWS; i++) {
        const auto p = Dot::template activations<part>(weights + i * KV_RUN + token);
        for (int j = 0; j < VECTORS; j++) sums[i][j] = Dot::multiply_add(sums[i][j], p, v[j]);
      }
    });
  };
  const i64 width = run.end - run.first, whole = width / Dot::X_PER_WORD * Dot::X_PER_WORD;
  for (i64 token = 0; token < whole; token += Dot::X_PER_WORD) add(token, 0xffffffffu);
  if (whole < width) add(whole, INTEGERS ? 0xffffffffu : 0x0000ffffu);
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < VECTORS; j++) {
      float* to = weighted + i * dim + d + j * LANES;
      if constexpr (INTEGERS) store(to, fma(as_floats(sums[i][j]), splat(factors[i]), load(to)));
      else store(to, sums[i][j]);
    }
  }
}

template <class Dot, int ROWS>
AE_NOINLINE void add_weighted(const typename Dot::X* weights, i64 dim, const KvRun& run, bool prefetch, const float* factors,
                              float* weighted) {
  constexpr int VECTORS = tile_vectors(ROWS);
  i64 d = 0;
  for (; d + VECTORS * LANES <= dim; d += VECTORS * LANES) {
    add_weighted_columns<Dot, ROWS, VECTORS>(weights, dim, d, run, prefetch, factors, weighted);
  }
  for (; d < dim; d += LANES) add_weighted_columns<Dot, ROWS, 1>(weights, dim, d, run, prefetch, factors, weighted);
}

// One tile of query rows over tokens begin .. end of its row, for one KV head.
template <class E, class P>
class TileAttention {
 public:
  static constexpr bool QUANTISED = LayerPages<P>::QUANTISED;
  using Dot = std::conditional_t<QUANTISED, Int16Dot, DotOf<E>>;
  using X = typename Dot::X;

  TileAttention(const AttentionOp& op, const LayerPages<P>& pages, const Step& step, const Tile& tile, P* gathered)
      : op_(op), pages_(pages), tile_(tile), group_(op.heads / op.kv_heads), gathered_(gathered) {
    page_ids_ = step.group_pages(op.group) + step.kv_indptr[tile.row];
    first_token_ = step.qo_indptr[tile.row];
    start_ = sequence_length(step, tile.row, pages.page_size) - (step.qo_indptr[tile.row + 1] - first_token_);
    seen_ = op.sees_images ? step.seen : nullptr;
    end_ = position(tile.count - 1) + 1;
    for (i64 r = 0; seen_ && r < tile.count; r++) end_ = larger(end_, seen(r));
    begin_ = lowest(0) / BLOCK * BLOCK;
  }

  // Whether the tile sees anything of a partition.
  bool sees(i64 partition) const { return partition * PARTITION < end_ && (partition + 1) * PARTITION > begin_; }

  void set_head(i64 head) { head_ = head; }

  // Where the first keys lie that `attend` will read.
  void first_keys(i64 partition, const u32** blocks) const {
    const i64 begin = larger(begin_, partition * PARTITION);
    for (i64 b = 0; b < RUN_BLOCKS; b++) blocks[b] = begin + b * BLOCK < end_ ? key_block(begin + b * BLOCK, head_) : nullptr;
  }

  // What to prefetch at the end of the last head.
  void set_upcoming(const u32* const* blocks) { upcoming_ = blocks; }

  void load_queries(const Rows<E>& rows) {
    for (i64 r = 0; r < tile_.count; r++) {
      const E* from = rows.row(token(r)) + query_head(r) * op_.key_dim;
      X* to = query_ + r * pages_.key_dim;
      if constexpr (QUANTISED) {
        alignas(64) float wide[MAX_KEY_DIM];
        load_padded(from, op_.key_dim, wide);
        query_scales_[r] = quantise_row<Dot>(wide, to, pages_.key_dim, QUERY_LIMIT);
      } else if constexpr (std::is_same_v<X, E>) {
        memcpy(static_cast<void*>(to), from, (size_t)op_.key_dim * sizeof(E));
        memset(static_cast<void*>(to + op_.key_dim), 0, (size_t)(pages_.key_dim - op_.key_dim) * sizeof(E));
      } else {
        load_padded(from, op_.key_dim, to);
      }
    }
  }

  // Softmax over what the tile sees of a partition; `next_head` is prefetched at the end of the tile's last run, -1: what is upcoming.
  void attend(i64 partition, i64 next_head, Softmax& softmax) {
    softmax.clear(tile_.count, pages_.value_dim);
    const i64 begin = larger(begin_, partition * PARTITION), end = smaller(end_, (partition + 1) * PARTITION);
    for (i64 first = begin; first < end;) {
      const i64 after = smaller(end, (first / KV_RUN + 1) * KV_RUN);
      attend_run(find_run(first, after, next_head), softmax);
      first = after;
    }
  }

  // Divides what was weighted by the total, to which the head's sink is added, and stores it.
  void put(const Rows<E>& rows, i64 r, const float* weighted, float maximum, float total) const {
    float factor = 1.f / total;
    if (op_.sinks) {
      const float sink = op_.sinks[query_head(r)], top = sink > maximum ? sink : maximum, mine = exp(maximum - top);
      factor = mine / fma(total, mine, exp(sink - top));
    }
    E* end = rows.row(token(r)) + (query_head(r) + 1) * op_.value_dim;
    store_scaled(weighted, factor, op_.value_dim, end - op_.value_dim);
    const i64 padding = round_up(op_.heads * op_.value_dim, 16) - op_.heads * op_.value_dim;
    if (query_head(r) + 1 == op_.heads) memset(static_cast<void*>(end), 0, (size_t)padding * sizeof(E));
  }

 private:
  i64 token(i64 r) const { return first_token_ + (tile_.first + r) / group_; }
  i64 query_head(i64 r) const { return head_ * group_ + (tile_.first + r) % group_; }
  i64 position(i64 r) const { return start_ + (tile_.first + r) / group_; }
  i64 seen(i64 r) const { return seen_ ? seen_[token(r)] : position(r) + 1; }
  i64 lowest(i64 r) const {
    if (!op_.window) return 0;
    return op_.chunked ? position(r) - position(r) % op_.window : larger(0, position(r) - op_.window + 1);
  }

  const u32* key_block(i64 token, i64 head) const {
    return pages_.key_block(page_ids_[token / pages_.page_size], head, token % pages_.page_size);
  }

  const u32* value_block(i64 token, i64 head) const {
    return pages_.value_block(page_ids_[token / pages_.page_size], head, token % pages_.page_size);
  }

  KvRun find_run(i64 first, i64 end, i64 next_head) const {
    KvRun run = {first, end, {}, {}, {}, {}, pages_.halves};
    const i64 blocks = ceil_div(end - first, BLOCK);
    if (!pages_.blocked()) {
      P *keys = gathered_, *values = gathered_ + KV_RUN * pages_.key_width();
      pages_.gather(page_ids_, head_, first, larger(first, lowest(0)), end, keys, values);
      for (i64 b = 0; b < RUN_BLOCKS; b++) {
        const i64 offset = smaller(b, blocks - 1) * BLOCK;
        run.keys[b] = reinterpret_cast<const u32*>(keys + offset * pages_.key_width());
        run.values[b] = reinterpret_cast<const u32*>(values + offset * pages_.value_dim);
      }
      if (!pages_.has_blocks()) return run;
    }
    const bool last = end == end_;
    const i64 next_first = last ? begin_ : end;
    const i64 next_blocks = last ? RUN_BLOCKS : ceil_div(smaller(end_ - end, KV_RUN), BLOCK);
    for (i64 b = 0; b < RUN_BLOCKS; b++) {
      const i64 at = first + smaller(b, blocks - 1) * BLOCK, next_at = next_first + b * BLOCK;
      const bool is_there = b < next_blocks && next_at < end_ && !(last && next_head < 0);
      const u32* next_keys = last && next_head < 0 ? upcoming_[b] : is_there ? key_block(next_at, last ? next_head : head_) : nullptr;
      if (pages_.halves) {  // what is multiplied is in the cache, as it was just gathered
        run.ahead[b] = next_keys ? next_keys : run.keys[b];
        run.next[b] = is_there ? value_block(next_at, last ? next_head : head_) : nullptr;
        continue;
      }
      run.keys[b] = key_block(at, head_);
      run.ahead[b] = run.values[b] = value_block(at, head_);
      run.next[b] = next_keys;
      if (QUANTISED && run.next[b]) {
        __builtin_prefetch(pages_.key_scales(run.next[b]), 0, 2);
        __builtin_prefetch(pages_.value_scales(run.next[b]), 0, 2);
      }
    }
    return run;
  }

  void attend_run(const KvRun& run, Softmax& softmax) {
    alignas(64) float scores[TILE_ROWS * KV_RUN];
    alignas(64) X weights[TILE_ROWS * KV_RUN];
    float factors[TILE_ROWS];
    const i64 key_dim = pages_.key_dim, value_dim = pages_.value_dim;
    const i64 parts = ceil_div(tile_.count, TILE_ROWS);
    for (i64 part = 0; part < parts; part++) {
      const i64 r0 = part * tile_.count / parts, rows = (part + 1) * tile_.count / parts - r0;
      with_rows(rows, [&](auto n) { score<Dot, n>(query_ + r0 * key_dim, key_dim, run, part == 0 && run.ahead[0], scores); });
      for (i64 i = 0; i < rows; i++) {
        const i64 r = r0 + i, high = smaller(seen(r), run.end);
        const float slope = op_.slopes ? op_.slopes[query_head(r)] : 0.f;
        const auto weigh = [&](auto&& scales, auto&& put) __attribute__((always_inline)) {
          return softmax_weights(scores + i * KV_RUN, scales, put, run.first, run.end, lowest(r), high, op_.soft_cap, slope, position(r),
                                 softmax.maximum[r], softmax.total[r]);
        };
        if constexpr (QUANTISED) {
          factors[i] = weigh_tokens(run, query_scales_[r] * op_.scale, weigh, scores + i * KV_RUN, weights + i * KV_RUN,
                                    softmax.weighted + r * value_dim);
        } else {
          factors[i] = weigh([&](i64) { return splat(op_.scale); }, [&](i64 t, VecF e) { store(weights + i * KV_RUN + t, e); });
        }
      }
      with_rows(rows, [&](auto n) {
        add_weighted<Dot, n>(weights, value_dim, run, part == 0, factors, softmax.weighted + r0 * value_dim);
      });
    }
  }

  // Over int8 pages: scores are multiplied by `scale` and the scales of the keys. Softmax weights times the scales of the values become
  // integers, whose scale is returned; those of masked keys, whose scales may be anything, are zero. Rescales what was `weighted` before.
  template <class Weigh>
  float weigh_tokens(const KvRun& run, float scale, const Weigh& weigh, float* scores, X* integers, float* weighted) const {
    VecF largest = {}, not_finite = {};
    const auto key_scales = [&](i64 t) { return load(pages_.key_scales(run.keys[t / BLOCK]) + t % BLOCK) * scale; };
    const float rescale = weigh(key_scales, [&](i64 t, VecF e) {
      const VecF weights = e == 0.f ? splat(0.f) : e * load(pages_.value_scales(run.keys[t / BLOCK]) + t % BLOCK);
      store(scores + t, weights);
      largest = larger(largest, weights);
      not_finite += weights * 0.f;
    });
    for (i64 d = 0; d < pages_.value_dim; d += LANES) store(weighted + d, load(weighted + d) * rescale);
    return round_row<Dot>(scores, integers, round_up(run.end - run.first, BLOCK), largest, not_finite, WEIGHT_LIMIT);
  }

  const AttentionOp& op_;
  const LayerPages<P>& pages_;
  const Tile& tile_;
  const i64 group_;   // query heads per KV head
  P* gathered_;       // blocks of keys, then of values, of this thread
  const u32* const* upcoming_ = nullptr;  // [RUN_BLOCKS]
  const i32* page_ids_;                   // of the row
  const i32* seen_;                       // as of Step; null: queries see what is up to themselves
  i64 first_token_, start_, begin_, end_, head_ = 0;
  float query_scales_[TILE_QUERIES];                 // of quantised queries
  alignas(64) X query_[TILE_QUERIES * MAX_KEY_DIM];  // [count][key_dim]
};

template <class E, class P>
void attend_pages(const Member& member, const AttentionOp& op, const LayerPages<P>& pages, const Step& step, const StepRows<E>& rows,
                  const AttentionPlan& plan, P* gathered) {
  const i64 dim = pages.value_dim, kv_heads = pages.kv_heads;
  const i64 head_runs = ceil_div(kv_heads, plan.heads_per_task);
  member.each_ahead(plan.num_tasks * head_runs, [&](i64 number, i64 next_number) {
    const AttentionTask& task = plan.tasks[number / head_runs];
    const Tile& tile = plan.tiles[task.tile];
    const i64 first_head = number % head_runs * plan.heads_per_task, end_head = smaller(kv_heads, first_head + plan.heads_per_task);
    TileAttention<E, P> attention(op, pages, step, tile, gathered);
    if (task.partition >= 0 && !attention.sees(task.partition)) return;
    const u32* upcoming[RUN_BLOCKS] = {};
    if (next_number >= 0 && pages.has_blocks()) {
      const AttentionTask& next_task = plan.tasks[next_number / head_runs];
      TileAttention<E, P> next(op, pages, step, plan.tiles[next_task.tile], gathered);
      next.set_head(next_number % head_runs * plan.heads_per_task);
      next.first_keys(larger(0, next_task.partition), upcoming);
    }
    attention.set_upcoming(upcoming);
    Softmax all, part;
    for (i64 head = first_head; head < end_head; head++) {
      attention.set_head(head);
      attention.load_queries(rows[op.query]);
      const i64 next_head = head + 1 < end_head ? head + 1 : -1;
      if (task.partition >= 0) {
        attention.attend(task.partition, -1, part);
        float* to = plan.partials + ((number / head_runs) * kv_heads + head) * plan.partial_stride;
        for (i64 r = 0; r < tile.count; r++, to += dim + 2) {
          to[0] = part.maximum[r], to[1] = part.total[r];
          memcpy(to + 2, part.weighted + r * dim, (size_t)dim * sizeof(float));
        }
        continue;
      }
      bool first = true;
      for (i64 partition = 0; partition < tile.partitions; partition++) {
        if (!attention.sees(partition)) continue;
        attention.attend(partition, next_head, first ? all : part);
        for (i64 r = 0; r < tile.count && !first; r++) {
          merge_row(all.maximum[r], all.total[r], all.weighted + r * dim, part.maximum[r], part.total[r], part.weighted + r * dim, dim);
        }
        first = false;
      }
      for (i64 r = 0; r < tile.count; r++) attention.put(rows[op.out], r, all.weighted + r * dim, all.maximum[r], all.total[r]);
    }
  });
  if (!plan.split) return;
  member.each(plan.num_tiles * kv_heads, [&](i64 number) {
    const Tile& tile = plan.tiles[number / kv_heads];
    const i64 head = number % kv_heads;
    TileAttention<E, P> attention(op, pages, step, tile, gathered);
    attention.set_head(head);
    for (i64 r = 0; r < tile.count; r++) {
      float* all = nullptr;
      for (i64 partition = 0; partition < tile.partitions; partition++) {
        if (!attention.sees(partition)) continue;
        float* part = plan.partials + ((tile.first_task + partition) * kv_heads + head) * plan.partial_stride + r * (dim + 2);
        if (all) merge_row(all[0], all[1], all + 2, part[0], part[1], part + 2, dim);
        else all = part;
      }
      attention.put(rows[op.out], r, all + 2, all[0], all[1]);
    }
  });
}

}  // namespace

template <class E>
void attend(const Member& member, const AttentionOp& op, const Pool& pool, const Step& step, const StepRows<E>& rows,
            const AttentionPlan& plan, const Buffers& space) {
  u8* gathered = space.gathered.as<u8>() + member.index() * gathered_bytes(pool, stored_dim(op.key_dim), stored_dim(op.value_dim));
  with_pages<E>(pool, op, [&](const auto& pages) {
    attend_pages(member, op, pages, step, rows, plan, reinterpret_cast<decltype(pages.keys)>(gathered));
  });
}

template void attend(const Member&, const AttentionOp&, const Pool&, const Step&, const StepRows<Bf16>&, const AttentionPlan&,
                     const Buffers&);
template void attend(const Member&, const AttentionOp&, const Pool&, const Step&, const StepRows<float>&, const AttentionPlan&,
                     const Buffers&);
template void rotate_and_write(const Member&, const AttentionOp&, const Pool&, const Step&, const StepRows<Bf16>&);
template void rotate_and_write(const Member&, const AttentionOp&, const Pool&, const Step&, const StepRows<float>&);

}  // namespace aengine
