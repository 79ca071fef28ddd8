// Matrix products of few to many rows with one packed matrix or with a list of them, and the epilogues that take the results while they
// are in the caches.
#pragma once
#include "activations.h"
#include "rows.h"

namespace aengine {

// One product of a list: that of a matrix with `count` rows of x.
struct Group {
  const PackedLinear* w;
  const i32* rows;  // [count], which rows of x; null: first .. first + count - 1
  i64 count;
  i64 first;   // the output's row of the first result
  i64 column;  // where in a row of x the product begins
};

// Products with matrices of one shape and format.
struct Groups {
  const Group* list;
  i64 size;       // of the list; a group may have no rows
  i64 most_rows;  // that a group may have
};

// The epilogue of a product.
struct Output {
  // Takes PANEL values of `count` rows of a group from number `row` of it on, in packed order, from any thread.
  virtual void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const = 0;

 protected:
  ~Output() = default;
};

// An output that takes one row after another, by `Sink::put_row(row, panel, values)`.
template <class Sink>
struct RowOutput : Output {
  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    for (i64 i = 0; i < count; i++) static_cast<const Sink*>(this)->put_row(group.first + row + i, panel, values[i]);
  }
};

// y = W x + b for the rows of each group, to `output`; x is `rows` rows of `width` elements, `shape` any matrix of the list. A matrix is read
// once per 192 rows of its group. The list may be written by the operation before, but not `size` and `most_rows`, which a thread that is
// late must find as the others did. Needs `reserve_prepared`.
template <class E>
void multiply_groups(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                     const Output& output, const Buffers& space);

// y = W x + b for all rows, to `output`. Needs `reserve_prepared`.
template <class E>
void multiply(const Member& member, const E* x, i64 stride, i64 rows, const PackedLinear& w, const Output& output, const Buffers& space) {
  const Group all = {&w, nullptr, rows, 0, 0};
  multiply_groups(member, x, stride, rows, w.in_features, {&all, 1, rows}, w, output, space);
}

// The rows in float32 in which products are that will be summed over ranks.
inline Rows<float> partial_rows(const Buffers& space, i64 width) { return {space.rank_partials.as<float>(), round_up(width, PANEL)}; }

// Whether rows have the same sums in the tiles of AMX as without them, on this CPU; true where the level has none.
bool tiles_agree();

// Room for products of `rows` rows of `depth` elements at most.
inline bool reserve_prepared(Buffers& space, i64 rows, i64 depth) {
  return space.prepared.reserve<float>(rows * round_up(depth, 16)) && space.row_scales.reserve<float>(rows * (1 + 2 * ceil_div(depth, 16)));
}

// out[row] = values, or out[row] += multiplier * values.
template <class E, bool ACCUMULATE>
struct StoreRows final : RowOutput<StoreRows<E, ACCUMULATE>> {
  StoreRows(const Rows<E>& to, float by) : out(to), multiplier(by) {}
  void put_row(i64 row, i64 panel, const float* values) const {
    E* p = out.row(row) + panel * PANEL;
    for (int j = 0; j < PANEL; j += LANES) {
      VecF v = load(values + j);
      if constexpr (ACCUMULATE) v = fma(v, splat(multiplier), load(p + j));
      store(p + j, v);
    }
  }
  Rows<E> out;
  float multiplier;
};

// out[row] = activation(gate) * up, of an interleaved matrix.
template <class E, i32 KIND>
struct StoreGated final : RowOutput<StoreGated<E, KIND>> {
  explicit StoreGated(const Rows<E>& to) : out(to) {}
  void put_row(i64 row, i64 panel, const float* values) const {
    E* p = out.row(row) + panel * (PANEL / 2);
    for (int half = 0; half < 2; half++) {
      for (int j = 0; j < 16; j += LANES) {
        const float* gate = values + half * 32 + j;
        store(p + half * 16 + j, gated<KIND>(load(gate), load(gate + 16)));
      }
    }
  }
  Rows<E> out;
};

// out[row] = activation(values), or out[row] *= activation(values).
template <class E, i32 KIND>
struct StoreActivated final : RowOutput<StoreActivated<E, KIND>> {
  explicit StoreActivated(const Rows<E>& to, bool times = false) : out(to), multiplies(times) {}
  void put_row(i64 row, i64 panel, const float* values) const {
    E* p = out.row(row) + panel * PANEL;
    for (int j = 0; j < PANEL; j += LANES) {
      const VecF v = activate<KIND>(load(values + j));
      store(p + j, multiplies ? v * load(p + j) : v);
    }
  }
  Rows<E> out;
  bool multiplies;
};

// Calls `f` with the output that brings a product's values to `out` as the operation says.
template <class E, class F>
void with_output(const LinearOp& op, const Rows<E>& out, F&& f) {
  switch (static_cast<Epilogue>(op.epilogue)) {
    case STORE: return f(StoreRows<E, false>(out, 1.f));
    case ADD: return f(StoreRows<E, true>(out, op.multiplier));
    case ACTIVATE:
    case MULTIPLY: return with_activation(op.activation, [&](auto kind) { f(StoreActivated<E, kind>(out, op.epilogue == MULTIPLY)); });
    case GATED: return with_activation(op.activation, [&](auto kind) { f(StoreGated<E, kind>(out)); });
    case PARTIAL: return;  // not to rows of E
  }
}

// out[row] = values in float32, without the padding of the last panel.
struct StoreLogits final : RowOutput<StoreLogits> {
  StoreLogits(float* to, i64 of) : out(to), columns(of) {}
  void put_row(i64 row, i64 panel, const float* values) const {
    memcpy(out + row * columns + panel * PANEL, values, (size_t)smaller(PANEL, columns - panel * PANEL) * sizeof(float));
  }
  float* out;
  i64 columns;
};

// Another output's, of values that were capped: cap * tanh(value / cap).
struct CapLogits final : Output {
  CapLogits(float at, const Output& then) : cap(at), next(then) {}
  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    float capped[TILE_ROWS][PANEL];
    for (i64 i = 0; i < count; i++) {
      for (int j = 0; j < PANEL; j += LANES) store(capped[i] + j, tanh(load(values[i] + j) / cap) * cap);
    }
    next.put(group, row, count, panel, capped);
  }
  float cap;
  const Output& next;
};

// out[row] = the column of the largest value: the lowest of equal ones, and a NaN is larger than everything, as in torch.argmax.
struct StoreArgmax final : RowOutput<StoreArgmax> {
  StoreArgmax(std::atomic<i64>* keys, i64 of) : best(keys), columns(of) {}

  // Orders by value, then by lower column.
  static i64 key(float value, i64 column) {
    if (value != value) return ((i64)INT32_MAX << 32) | (0xffffffff - column);
    i32 bits;
    value += 0.f;  // -0 is 0
    memcpy(&bits, &value, sizeof bits);
    return (i64)((u64)(i64)(bits ^ ((bits >> 31) & 0x7fffffff)) << 32) | (0xffffffff - column);
  }
  static i64 column_of(i64 key) { return 0xffffffff - (key & 0xffffffff); }
  // The column, or its complement where no token can be chosen: the largest value is a NaN or minus infinity.
  static i64 token_of(i64 key) {
    constexpr i64 NONE = INT32_MIN + 0x7fffff;  // of minus infinity
    const i64 value = key >> 32, column = column_of(key);
    return value == INT32_MAX || value == NONE ? ~column : column;
  }

  // For `out`, which holds keys from `begin` on and tokens after `finish`.
  static StoreArgmax of(i64* out, const PackedLinear& w) {
    static_assert(sizeof(std::atomic<i64>) == sizeof(i64));
    return {reinterpret_cast<std::atomic<i64>*>(out), w.out_features};
  }
  static void begin(i64* out, i64 rows) { for (i64 row = 0; row < rows; row++) out[row] = INT64_MIN; }
  static void finish(i64* out, i64 rows) {
    for (i64 row = 0; row < rows; row++) out[row] = token_of(out[row]);
  }

  void put_row(i64 row, i64 panel, const float* values) const {
    const i64 count = smaller(PANEL, columns - panel * PANEL);
    i64 found = INT64_MIN;
    if (count == PANEL) {
      VecF maximum = load(values), not_a_number = maximum * 0.f;
      for (int j = LANES; j < PANEL; j += LANES) maximum = larger(maximum, load(values + j)), not_a_number += load(values + j) * 0.f;
      const float bound = largest(maximum);
      // Most panels have no larger value: one comparison instead of 64 keys. Infinities are compared one by one, like NaNs.
      if (sum(not_a_number) == 0.f && key(bound, panel * PANEL) < best[row].load(std::memory_order_relaxed)) return;
    }
    for (i64 j = 0; j < count; j++) found = larger(found, key(values[j], panel * PANEL + j));
    i64 seen = best[row].load(std::memory_order_relaxed);
    while (found > seen && !best[row].compare_exchange_weak(seen, found, std::memory_order_relaxed)) {
    }
  }

  std::atomic<i64>* best;  // per row, initially INT64_MIN; see `key`
  i64 columns;
};

}  // namespace aengine
