// How the products with low-rank matrices are computed.
#include "adapters.h"

#include "dot.h"

namespace aengine {

namespace {

constexpr i64 SPAN = 48;                                // rows of a task
constexpr i64 A_TASK = 8;                               // rows of A of a task
constexpr int A_ROWS = 4;                               // rows of A that are multiplied together
constexpr int X_ROWS = ACCUMULATORS / A_ROWS;           // with so many of x
static_assert(X_ROWS <= TILE_ROWS);

// How rows of A and x are multiplied, STEP elements at a time.
template <class E>
struct Along {
  using V = VecF;
  static constexpr i64 STEP = LANES;
  static AE_INLINE V read(const E* p) { return load(p); }
  static AE_INLINE VecF multiply_add(VecF sum, V x, V a) { return sum + x * a; }
};
#if defined(__AVX512BF16__)
template <>
struct Along<Bf16> {
  using V = VecU;
  static constexpr i64 STEP = 2 * LANES;
  static AE_INLINE V read(const Bf16* p) { return load_as<V>(p); }
  static AE_INLINE VecF multiply_add(VecF sum, V x, V a) { return Bf16Dot::multiply_add(sum, x, a); }
};
#endif

// u[i][j] = row j of A times row i of x, for ROWS and A_ROWS of them; prefetches as many rows from `ahead` on meanwhile.
template <class E, int ROWS>
AE_NOINLINE void project_tile(const E* a, const E* const* rows, i64 width, const E* ahead, float* const* u) {
  using Dot = Along<E>;
  constexpr i64 LINE = 64 / sizeof(E);
  VecF sums[ROWS][A_ROWS] = {};
  const auto add = [&](i64 k, auto read) AE_ALWAYS_INLINE {
    typename Dot::V w[A_ROWS];
    for (int j = 0; j < A_ROWS; j++) w[j] = read(a + j * width + k);
    for (int i = 0; i < ROWS; i++) {
      const typename Dot::V x = read(rows[i] + k);
      for (int j = 0; j < A_ROWS; j++) sums[i][j] = Dot::multiply_add(sums[i][j], x, w[j]);
    }
  };
  i64 k = 0;
  for (; k + Dot::STEP <= width; k += Dot::STEP) {
    if (ahead && k % LINE == 0) {
      for (int j = 0; j < A_ROWS; j++) __builtin_prefetch(ahead + j * width + k, 0, 2);
    }
    add(k, [](const E* p) AE_ALWAYS_INLINE { return Dot::read(p); });
  }
  if (k < width) {  // half a step
    add(k, [](const E* p) AE_ALWAYS_INLINE {
      typename Dot::V half = {};
      memcpy(&half, p, 16 * sizeof(E));
      return half;
    });
  }
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < A_ROWS; j++) u[i][j] = sum(sums[i][j]);
  }
}

// u = A x for all rows.
template <class E>
void project(const Member& member, const E* x, i64 stride, i64 width, i32 matrix, i64 most, const AdaptedRows& adapted, const Rows<float>& u) {
  const i64 pieces = ceil_div(most, A_TASK);
  const auto a_of = [&](i64 task) -> const E* {
    const LowRank& low = adapted.of(adapted.spans[task / pieces].adapter, matrix);
    const i64 first = task % pieces * A_TASK;
    return first < low.size ? static_cast<const E*>(low.a) + first * width : nullptr;
  };
  member.each_ahead(adapted.num_spans * pieces, [&](i64 task, i64 next_task) {
    const AdapterSpan& span = adapted.spans[task / pieces];
    const i64 first = task % pieces * A_TASK, end = smaller(adapted.of(span.adapter, matrix).size, first + A_TASK);
    const E* a = a_of(task);
    for (i64 j = first; j < end; j += A_ROWS, a += A_ROWS * width) {
      const E* ahead = j + A_ROWS < end ? a + A_ROWS * width : next_task < 0 ? nullptr : a_of(next_task);
      for (i64 i = 0; i < span.count; i += X_ROWS, ahead = nullptr) {
        const i64 count = smaller(X_ROWS, span.count - i);
        const E* rows[TILE_ROWS];
        float* to[TILE_ROWS];
        for (i64 n = 0; n < count; n++) {
          const i32 row = adapted.order[span.first + i + n];
          rows[n] = x + row * stride, to[n] = u.row(row) + j;
        }
        with_rows(count, [&](auto n) {
          if constexpr (n <= X_ROWS) project_tile<E, n>(a, rows, width, ahead, to);
        });
      }
    }
  });
}

// out = values and what a panel of B makes of u, for ROWS rows.
template <class E, int ROWS>
AE_NOINLINE void add_panel(const LowRank& low, i64 panel, const float* const* u, const float (*values)[PANEL], float (*out)[PANEL]) {
  for (int column = 0; column < PANEL; column += 16) {
    const LowRankBlock& block = low.blocks[panel * (PANEL / 16) + column / 16];
    const E* b = static_cast<const E*>(low.b) + (i64)block.row * 16;
    VecF sums[ROWS][16 / LANES];
    const float* of[ROWS];
    for (int i = 0; i < ROWS; i++) {
      of[i] = u[i] + block.first;
      for (int l = 0; l < 16 / LANES; l++) sums[i][l] = load(values[i] + column + l * LANES);
    }
    for (i64 k = 0; k < block.count; k++, b += 16) {
      VecF w[16 / LANES];
      for (int l = 0; l < 16 / LANES; l++) w[l] = load(b + l * LANES);
      for (int i = 0; i < ROWS; i++) {
        const VecF a = splat(of[i][k]);
        for (int l = 0; l < 16 / LANES; l++) sums[i][l] = sums[i][l] + a * w[l];
      }
    }
    for (int i = 0; i < ROWS; i++) {
      for (int l = 0; l < 16 / LANES; l++) store(out[i] + column + l * LANES, sums[i][l]);
    }
  }
}

// Another output's, of values with what the adapters of the rows add.
template <class E>
struct AddLowRank final : Output {
  AddLowRank(const AdaptedRows& rows, i32 of, i64 count, const Rows<float>& projected, const Output& then)
      : adapted(rows), matrix(of), panels(count), u(projected), next(then) {}

  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    for (i64 i = 0, end; i < count; i = end) {
      const i32 adapter = adapted.of_rows[row + i];
      for (end = i + 1; end < count && adapted.of_rows[row + end] == adapter;) end++;
      if (adapter < 0 || !adapted.of(adapter, matrix).size) {
        next.put(group, row + i, end - i, panel, values + i);
        continue;
      }
      const LowRank& low = adapted.of(adapter, matrix);
      prefetch(low, panel + 1);
      float more[TILE_ROWS][PANEL];
      const float* of[TILE_ROWS];
      for (i64 n = i; n < end; n++) of[n - i] = u.row(row + n);
      with_rows(end - i, [&](auto n) { add_panel<E, n>(low, panel, of, values + i, more); });
      next.put(group, row + i, end - i, panel, more);
    }
  }

 private:
  // The panel that this thread most likely takes next.
  void prefetch(const LowRank& low, i64 panel) const {
    if (panel == panels) return;
    const LowRankBlock *first = low.blocks + panel * (PANEL / 16), *last = first + PANEL / 16 - 1;
    const E* b = static_cast<const E*>(low.b);
    const E *begin = b + (i64)first->row * 16, *end = b + ((i64)last->row + last->count) * 16;
    for (; begin < end; begin += 64 / sizeof(E)) __builtin_prefetch(begin, 0, 2);
  }

  const AdaptedRows& adapted;
  i32 matrix;
  i64 panels;
  Rows<float> u;
  const Output& next;
};

}  // namespace

bool plan_adapters(const StepAdapters& given, const i32* indices, i64 rows, Buffer& memory, AdaptedRows& out) {
  const i64 num_adapters = given.num_adapters, most_spans = num_adapters + rows / SPAN;
  if (!memory.reserve<i32>(2 * rows + num_adapters + 1 + 3 * most_spans)) return false;
  i32 *of_rows = memory.as<i32>(), *order = of_rows + rows, *ends = order + rows;
  AdapterSpan* spans = reinterpret_cast<AdapterSpan*>(ends + num_adapters + 1);
  memset(ends, 0, (size_t)(num_adapters + 1) * sizeof(i32));
  for (i64 i = 0; i < rows; i++) {
    of_rows[i] = given.of_tokens[indices ? indices[i] : i];
    if (of_rows[i] >= 0) ends[of_rows[i] + 1]++;
  }
  for (i64 i = 0; i < num_adapters; i++) ends[i + 1] += ends[i];
  for (i64 i = 0; i < rows; i++) {
    if (of_rows[i] >= 0) order[ends[of_rows[i]]++] = (i32)i;  // the begins of adapters become their ends
  }
  out = {given.adapters, of_rows, order, spans, 0};
  for (i64 i = 0, begin = 0; i < num_adapters; begin = ends[i++]) {
    for (i64 first = begin; first < ends[i]; first += SPAN) {
      spans[out.num_spans++] = {(i32)i, (i32)first, (i32)smaller(SPAN, ends[i] - first)};
    }
  }
  return true;
}

template <class E>
void multiply_adapted(const Member& member, const E* x, i64 stride, i64 rows, const PackedLinear& w, i32 matrix, const AdaptedRows& adapted,
                      const Output& output, const Buffers& space) {
  const i64 most = adapted.most(matrix);
  if (!most) return multiply(member, x, stride, rows, w, output, space);
  const Rows<float> u = {space.low_rank.as<float>(), most};
  project(member, x, stride, round_up(w.in_features, 16), matrix, most, adapted, u);
  multiply(member, x, stride, rows, w, AddLowRank<E>(adapted, matrix, num_panels(w), u, output), space);
}

template <class E>
void add_low_rank(const LowRank& matrix, i64 panel, const float* u, float* more) {
  const auto values = reinterpret_cast<float (*)[PANEL]>(more);
  add_panel<E, 1>(matrix, panel, &u, values, values);
}

template void multiply_adapted(const Member&, const Bf16*, i64, i64, const PackedLinear&, i32, const AdaptedRows&, const Output&, const Buffers&);
template void multiply_adapted(const Member&, const float*, i64, i64, const PackedLinear&, i32, const AdaptedRows&, const Output&, const Buffers&);
template void add_low_rank<Bf16>(const LowRank&, i64, const float*, float*);
template void add_low_rank<float>(const LowRank&, i64, const float*, float*);

}  // namespace aengine
