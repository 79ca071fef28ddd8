// How tokens are sampled.
//
// A row is read in blocks of 64 ids. Tokens are ordered by logit, and equal logits by id. The sums that tokens are sampled by are in double
// and added up in the same order for every row, so that a token depends on its row alone.
#include "draw.h"

#include <algorithm>
#include <functional>

#include "gemm.h"
#include "noise.h"

namespace aengine {

namespace {

constexpr i64 DRAW_BLOCK = 64;    // ids
constexpr i64 DRAW_CHUNK = 64;    // blocks of a task
constexpr int MASS_BINS = 1024;   // of a nucleus
static_assert(DRAW_BLOCK % LANES == 0);

inline i64 key_of(float logit, i64 id) { return StoreArgmax::key(logit, id); }
inline i64 column_of(i64 key) { return StoreArgmax::column_of(key); }

// Samples one row: first its best logit is set, then for most parameters the masses of its blocks.
class RowDraw {
 public:
  RowDraw(const float* logits, i64 vocab, const DrawParams& params, const float* block_best, float* block_mass, i64* listed)
      : logits_(logits), vocab_(vocab), blocks_(ceil_div(vocab, DRAW_BLOCK)), params_(params), block_best_(block_best), block_mass_(block_mass),
        listed_(listed) {}

  // `key` is that of the likeliest token.
  void set_best(i64 key) {
    best_token_ = column_of(key);
    has_choice_ = StoreArgmax::token_of(key) >= 0;
    best_ = logits_[best_token_] / params_.temperature;
    lowest_ = params_.min_p > 0.f ? (float)natural_log((double)params_.min_p) : -INFINITY;
  }

  // False where the likeliest token is the result: for greedy rows, and where the logits are NaN or all minus infinity.
  bool is_random() const { return params_.temperature > 0.f && std::isfinite(best_); }
  bool needs_masses() const { return is_random() && !is_top_k(); }

  // exp(score - best) of the ids of a block, or 0 where min_p drops the token, added up.
  void sum_block(i64 block) {
    WideSum mass;
    for_block(block, [&](i64 id, VecF behind) { mass.parts[id / LANES % WideSum::PARTS] += masses(behind, lowest_); });
    block_mass_[block] = mass.total();
  }

  // The token, or its complement where none can be chosen.
  i64 sample() {
    if (!has_choice_) return ~best_token_;
    if (!is_random()) return best_token_;
    if (is_top_k()) return sample_top_k();
    return params_.top_p < 1.f ? sample_nucleus() : sample_all();
  }

 private:
  // The largest of score - log E so far (the Gumbel-max trick). Most candidates are below it for certain, which is seen without a
  // logarithm: since E = -log(1 - u) > u, a larger one has u < exp(score - value).
  struct GumbelMax {
    i64 token;
    float value = -INFINITY;

    void consider(i64 other, float score, float uniform) {
      const float theirs = score - log_exponential(uniform);
      if (theirs > value) token = other, value = theirs;
    }
  };

  bool is_top_k() const { return params_.top_k > 0 && params_.top_k < vocab_; }

  // f(first id, score - best) for each vector of a block; minus infinity beyond the vocabulary.
  template <class F>
  AE_INLINE void for_block(i64 block, F&& f) const {
    const i64 begin = block * DRAW_BLOCK, end = smaller(vocab_, begin + DRAW_BLOCK);
    for (i64 id = begin; id < end; id += LANES) {
      VecF x;
      if (id + LANES <= end) {
        x = load(logits_ + id);
      } else {
        for (int i = 0; i < LANES; i++) x[i] = id + i < end ? logits_[id + i] : -INFINITY;
      }
      f(id, x / params_.temperature - best_);
    }
  }

  // f(id, score - best, mass) for each token whose score - best is in [low, high], by ascending id.
  template <class F>
  AE_INLINE void for_each_within(float low, float high, F&& f) const {
    for (i64 block = 0; block < blocks_; block++) {
      if (block_best_[block] / params_.temperature - best_ < low) continue;
      for_block(block, [&](i64 id, VecF behind) {
        const VecI within = (behind >= low) & (behind <= high);
        if (!any(within)) return;
        const VecF mass = masses(behind, lowest_);
        for (int i = 0; i < LANES; i++) {
          if (within[i]) f(id + i, behind[i], mass[i]);
        }
      });
    }
  }

  static AE_INLINE VecF masses(VecF behind, float lowest) {
    const VecI dropped = (behind < lowest) | (behind < -87.f);  // where exp is subnormal
    return dropped ? splat(0.f) : exp(behind);
  }
  float mass(float behind) const { return masses(splat(behind), lowest_)[0]; }

  i64 sample_all() const {
    const NoiseKey block_key(params_.seed, params_.position, 1), key(params_.seed, params_.position, 0);
    GumbelMax block{0};
    float reach = INFINITY;  // exp(-value)
    for (i64 b = 0; b < blocks_; b++) {
      const float uniform = block_key.uniform((u32)b);
      if (!(uniform < block_mass_[b] * reach)) continue;
      block.consider(b, (float)natural_log((double)block_mass_[b]), uniform);
      reach = std::exp(-block.value) * MARGIN;
    }
    GumbelMax best{best_token_};
    for_block(block.token, [&](i64 id, VecF behind) {
      const VecF some = masses(behind, lowest_);
      for (int i = 0; i < LANES; i++) {
        if (some[i] > 0.f) best.consider(id + i, behind[i], key.uniform((u32)(id + i)));
      }
    });
    return best.token;
  }

  i64 sample_nucleus() const {
    double total = 0;
    for (i64 block = 0; block < blocks_; block++) total += block_mass_[block];
    const double needed = (double)params_.top_p * total;
    // Tokens so unlikely that all of them could be left out without touching top_p are not in the nucleus; a little further, for rounding.
    const float limit = larger_of(larger_of(lowest_, (float)natural_log((1. - (double)params_.top_p) * total / (double)vocab_) - 0.01f), -87.f);
    double bins[MASS_BINS] = {};
    const float per_nat = limit < 0.f ? MASS_BINS / -limit : 0.f;
    const auto bin_of = [&](float behind) { return (int)smaller((i64)(-behind * per_nat), MASS_BINS - 1); };
    for_each_within(limit, 0.f, [&](i64, float behind, float mass) { bins[bin_of(behind)] += (double)mass; });
    int last_bin = 0;
    double before = 0;
    while (last_bin + 1 < MASS_BINS && before + bins[last_bin] < needed) before += bins[last_bin++];
    // The last one of the nucleus is in this bin.
    i64 count = 0;
    const float bin_begin = limit * ((float)last_bin - 0.01f) / MASS_BINS, bin_end = limit * ((float)last_bin + 1.01f) / MASS_BINS;
    for_each_within(larger_of(limit, bin_end), bin_begin, [&](i64 id, float behind, float) {
      if (bin_of(behind) == last_bin) listed_[count++] = key_of(logits_[id], id);
    });
    std::sort(listed_, listed_ + count, std::greater<i64>());
    i64 last_key = key_of((best_ + limit) * params_.temperature, vocab_);  // where rounding leaves that bin empty: all within the limit
    for (i64 i = 0; i < count && (i == 0 || before < needed); i++) {
      last_key = listed_[i];
      before += mass(logits_[column_of(last_key)] / params_.temperature - best_);
    }
    return sample_up_to(last_key, (best_ + limit) * params_.temperature);
  }

  // Samples from the tokens up to the one with `last_key`.
  i64 sample_up_to(i64 last_key, float lowest_logit) const {
    const NoiseKey key(params_.seed, params_.position, 0);
    GumbelMax best{best_token_};
    best.consider(best_token_, 0.f, key.uniform((u32)best_token_));
    float reach = std::exp(-best.value) * MARGIN;
    for (i64 block = 0; block < blocks_; block++) {
      if (block_best_[block] < lowest_logit) continue;
      for_block(block, [&](i64 id, VecF behind) {
        const VecF uniform = key.uniform((VecU)lane_numbers() + (u32)id);
        const VecI may_be_best = uniform < masses(behind, -INFINITY) * reach;
        if (!any(may_be_best)) return;
        for (int i = 0; i < LANES; i++) {
          if (!may_be_best[i] || key_of(logits_[id + i], id + i) < last_key) continue;
          best.consider(id + i, behind[i], uniform[i]);
          reach = std::exp(-best.value) * MARGIN;
        }
      });
    }
    return best.token;
  }

  i64 sample_top_k() const {
    // The best k blocks hold the best k tokens.
    const i64 k = params_.top_k;
    float limit = -INFINITY;
    if (k < blocks_) {
      float* bests = block_mass_;
      std::copy(block_best_, block_best_ + blocks_, bests);
      std::nth_element(bests, bests + k - 1, bests + blocks_, std::greater<float>());
      limit = bests[k - 1];
    }
    i64 count = 0;
    for (i64 block = 0; block < blocks_; block++) {
      if (block_best_[block] < limit) continue;
      for (i64 id = block * DRAW_BLOCK; id < smaller(vocab_, (block + 1) * DRAW_BLOCK); id++) {
        if (logits_[id] >= limit) listed_[count++] = key_of(logits_[id], id);
      }
    }
    if (count > k) std::nth_element(listed_, listed_ + k - 1, listed_ + count, std::greater<i64>());
    count = smaller(count, k);
    std::sort(listed_, listed_ + count, std::greater<i64>());
    const auto behind_of = [&](i64 i) { return logits_[column_of(listed_[i])] / params_.temperature - best_; };
    double total = 0, before = 0;
    for (i64 i = 0; i < count; i++) total += mass(behind_of(i));
    const double needed = (double)params_.top_p * total;
    const NoiseKey key(params_.seed, params_.position, 0);
    GumbelMax best{best_token_};
    for (i64 i = 0; i < count && (i == 0 || before < needed); i++) {
      const float behind = behind_of(i);
      const i64 token = column_of(listed_[i]);
      best.consider(token, behind, key.uniform((u32)token));
      before += mass(behind);
    }
    return best.token;
  }

  static AE_INLINE bool any(VecI mask) {
    i32 found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
  }
  static float larger_of(float a, float b) { return a > b ? a : b; }

  static constexpr float MARGIN = 1.0001f;  // covers the rounding of what is only an estimate
  const float* logits_;
  i64 vocab_, blocks_;
  const DrawParams& params_;
  const float* block_best_;
  float* block_mass_;
  i64* listed_;  // [vocab], of this thread
  i64 best_token_ = 0;
  bool has_choice_ = true;
  float best_ = 0, lowest_ = 0;
};

// Samples the tokens of all rows, by a team.
class Drawing {
 public:
  Drawing(const float* logits, i64 rows, i64 vocab, const DrawParams* params, i64* tokens, const Buffers& space)
      : logits_(logits), rows_(rows), vocab_(vocab), blocks_(ceil_div(vocab, DRAW_BLOCK)), chunks_(ceil_div(blocks_, DRAW_CHUNK)),
        params_(params), tokens_(tokens), chunk_best_(space.chunk_best.as<i64>()), block_best_(space.block_best.as<float>()),
        block_mass_(space.block_mass.as<float>()), listed_(space.listed.as<i64>()) {}

  void run(const Member& member) const {
    member.each(rows_ * chunks_, [&](i64 task) {
      const float* logits = logits_ + task / chunks_ * vocab_;
      i64 best = INT64_MIN;
      for_chunk(task, [&](i64 block) {
        const i64 begin = block * DRAW_BLOCK, end = smaller(vocab_, begin + DRAW_BLOCK);
        float& found = block_best_[task / chunks_ * blocks_ + block];
        found = largest_of(logits + begin, end - begin);
        if (best != INT64_MIN && found <= logits[column_of(best)]) return;  // the lower column stays; false for NaN
        for (i64 id = begin; id < end; id++) best = larger(best, key_of(logits[id], id));
      });
      chunk_best_[task] = best;
    });
    member.each(rows_ * chunks_, [&](i64 task) {
      RowDraw draw = row_draw(member, task / chunks_);
      if (draw.needs_masses()) for_chunk(task, [&](i64 block) { draw.sum_block(block); });
    });
    member.each(rows_, [&](i64 row) { tokens_[row] = row_draw(member, row).sample(); });
  }

 private:
  // The largest of `count` logits; NaN where one of them is.
  static float largest_of(const float* logits, i64 count) {
    if (count < DRAW_BLOCK) {
      float maximum = logits[0];
      for (i64 i = 1; i < count; i++) maximum = logits[i] > maximum || logits[i] != logits[i] ? logits[i] : maximum;
      return maximum;
    }
    VecF maximum = load(logits);
    VecI not_a_number = maximum != maximum;
    for (i64 i = LANES; i < DRAW_BLOCK; i += LANES) {
      const VecF x = load(logits + i);
      not_a_number |= x != x, maximum = larger(maximum, x);
    }
    for (int i = 0; i < LANES; i++) {
      if (not_a_number[i]) return NAN;
    }
    return largest(maximum);
  }

  RowDraw row_draw(const Member& member, i64 row) const {
    const float* block_best = block_best_ + row * blocks_;
    RowDraw draw(logits_ + row * vocab_, vocab_, params_[row], block_best, block_mass_ + row * blocks_, listed_ + member.index() * vocab_);
    i64 best = INT64_MIN;
    for (i64 chunk = 0; chunk < chunks_; chunk++) best = larger(best, chunk_best_[row * chunks_ + chunk]);
    draw.set_best(best);
    return draw;
  }

  template <class F>
  void for_chunk(i64 task, F&& f) const {
    const i64 first = task % chunks_ * DRAW_CHUNK, end = smaller(blocks_, first + DRAW_CHUNK);
    for (i64 block = first; block < end; block++) f(block);
  }

  const float* logits_;
  i64 rows_, vocab_, blocks_, chunks_;
  const DrawParams* params_;
  i64* tokens_;
  i64* chunk_best_;    // [rows][chunks], keys
  float* block_best_;  // [rows][blocks], logits
  float* block_mass_;
  i64* listed_;
};

// What a task adds up of a row, behind the largest of its logits.
struct PartialSum {
  float best;
  double total;
  i64 greater;  // logits than one
};

// The ids of one task, in an order that depends on nothing but their number. What is so unlikely that exp is subnormal adds nothing.
PartialSum sum_behind_best(const float* logits, i64 count, float one) {
  VecF best = splat(-INFINITY);
  VecI not_a_number = {}, greater = {};
  const i64 whole = count / 16 * 16;
  float rest[16];
  for (i64 i = 0; i < 16; i++) rest[i] = whole + i < count ? logits[whole + i] : -INFINITY;
  const auto vector = [&](i64 i) { return load(i < whole ? logits + i : rest + (i - whole)); };
  for (i64 i = 0; i < count; i += LANES) {
    const VecF x = vector(i);
    not_a_number |= x != x, best = larger(best, x), greater -= x > one;
  }
  i64 num_greater = 0;
  bool is_number = true;
  for (int i = 0; i < LANES; i++) num_greater += greater[i], is_number &= !not_a_number[i];
  if (!is_number) return {NAN, 0, num_greater};
  const float top = largest(best);
  if (!std::isfinite(top)) return {top, 1, num_greater};
  WideSum total;
  total.each(round_up(count, 16), [&](VecF& added, i64 i) AE_ALWAYS_INLINE {
    const VecF behind = vector(i) - top;
    added += behind < -87.f ? splat(0.f) : exp(behind);
  });
  double sum = 0;
  for (const VecF& part : total.parts) {
    for (int i = 0; i < LANES; i++) sum += (double)part[i];
  }
  return {top, sum, num_greater};
}

}  // namespace

bool reserve_log_sums(Buffers& space, i64 rows, i64 vocab) {
  return space.block_mass.reserve<PartialSum>(rows * ceil_div(vocab, DRAW_BLOCK * DRAW_CHUNK));
}

void log_sums(const Member& member, const float* logits, i64 rows, i64 vocab, const float* own, float* out, i64* greater,
              const Buffers& space) {
  constexpr i64 WIDTH = DRAW_BLOCK * DRAW_CHUNK;
  const i64 chunks = ceil_div(vocab, WIDTH);
  PartialSum* parts = space.block_mass.as<PartialSum>();
  member.each(rows * chunks, [&](i64 task) {
    const i64 first = task % chunks * WIDTH;
    parts[task] = sum_behind_best(logits + task / chunks * vocab + first, smaller(WIDTH, vocab - first), own[task / chunks]);
  });
  member.each(rows, [&](i64 row) {
    const PartialSum* of_row = parts + row * chunks;
    float best = -INFINITY;
    for (i64 i = 0; i < chunks; i++) best = of_row[i].best > best || of_row[i].best != of_row[i].best ? of_row[i].best : best;
    double total = 0;
    for (i64 i = 0; i < chunks && std::isfinite(best); i++) {
      if (of_row[i].best > -INFINITY) total += of_row[i].total * natural_exp((double)of_row[i].best - (double)best);
    }
    greater[row] = 0;
    for (i64 i = 0; i < chunks; i++) greater[row] += of_row[i].greater;
    out[row] = std::isfinite(best) ? (float)((double)best + natural_log(total)) : best;
  });
}

bool reserve_draws(Buffers& space, i64 rows, i64 vocab, int threads) {
  const i64 blocks = ceil_div(vocab, DRAW_BLOCK);
  return space.chunk_best.reserve<i64>(rows * ceil_div(blocks, DRAW_CHUNK)) && space.block_best.reserve<float>(rows * blocks) &&
         space.block_mass.reserve<float>(rows * blocks) && space.listed.reserve<i64>(threads * vocab);
}

void draw_tokens(const Member& member, const float* logits, i64 rows, i64 vocab, const DrawParams* params, i64* tokens, const Buffers& space) {
  Drawing(logits, rows, vocab, params, tokens, space).run(member);
}

}  // namespace aengine
