// How the products with low-rank matrices are computed.
#include "adapters.h"

#include "dot.h"

namespace aengine {

namespace {

constexpr i64 SPAN = 48;                       // rows of x of a task
constexpr i64 A_TASK = 8;                      // rows of A of a task
constexpr int A_ROWS = LANES < 8 ? 1 : LANES / 4; // rows of A that are multiplied together
constexpr int X_ROWS = ACCUMULATORS / (A_ROWS * WideSum::PARTS);  // with so many of x
constexpr i64 B_TASKS = 4;                     // of a thread, at least
constexpr i64 B_AHEAD = 2;                     // panels that are prefetched ahead
static_assert(X_ROWS <= TILE_ROWS);

// How rows of A and x are multiplied, STEP elements at a time.
template <class E>
struct Along {
  using V = VecF;
  static constexpr i64 STEP = 16;
  static AE_INLINE V read(const E* p, int part) { return load(p + part * LANES); }
  static AE_INLINE VecF multiply_add(VecF sum, V x, V a) { return fma(x, a, sum); }
};
#if defined(AE_BF16_PAIRS)
template <>
struct Along<Bf16> {
  using V = VecU;
  static constexpr i64 STEP = 2 * LANES;
  static AE_INLINE V read(const Bf16* p, int) { return load_as<V>(p); }
  static AE_INLINE VecF multiply_add(VecF sum, V x, V a) { return Bf16Dot::multiply_add(sum, x, a); }
};
#endif

// u[i][j] = row j of A times row i of x, for ROWS and A_ROWS of them; prefetches as many rows from `ahead` on meanwhile.
template <class E, int ROWS>
AE_NOINLINE void project_tile(const E* a, const E* const* rows, i64 width, const E* ahead, float* const* u) {
  using Dot = Along<E>;
  constexpr i64 LINE = 64 / sizeof(E);
  WideSum sums[ROWS][A_ROWS];
  const auto add = [&](i64 k, auto read) AE_ALWAYS_INLINE {
    for (int part = 0; part < WideSum::PARTS; part++) {
      typename Dot::V w[A_ROWS];
      for (int j = 0; j < A_ROWS; j++) w[j] = read(a + j * width + k, part);
      for (int i = 0; i < ROWS; i++) {
        const typename Dot::V x = read(rows[i] + k, part);
        for (int j = 0; j < A_ROWS; j++) sums[i][j].parts[part] = Dot::multiply_add(sums[i][j].parts[part], x, w[j]);
      }
    }
  };
  i64 k = 0;
  for (; k + Dot::STEP <= width; k += Dot::STEP) {
    if (ahead && k % LINE == 0) {
      for (int j = 0; j < A_ROWS; j++) __builtin_prefetch(ahead + j * width + k, 0, 2);
    }
    add(k, [](const E* p, int part) AE_ALWAYS_INLINE { return Dot::read(p, part); });
  }
  if constexpr (Dot::STEP > 16) {
    if (k < width) {  // half a step
      add(k, [](const E* p, int) AE_ALWAYS_INLINE {
        typename Dot::V half = {};
        memcpy(&half, p, 16 * sizeof(E));
        return half;
      });
    }
  }
  for (int i = 0; i < ROWS; i++) {
    for (int j = 0; j < A_ROWS; j++) u[i][j] = sums[i][j].total();
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

// The rows of B of a panel.
template <class E>
const E* b_of(const LowRank& low, i64 panel) {
  return static_cast<const E*>(low.b) + (i64)low.blocks[panel * (PANEL / 16)].row * 16;
}

// What COUNT blocks of B, which are `apart` from each other and take the same elements of u, make of these for ROWS rows; prefetches as much
// from `ahead` on meanwhile.
template <class E, int ROWS, int COUNT>
AE_INLINE void multiply_blocks(const LowRank& low, const LowRankBlock* block, int apart, const float* const* u, const E* ahead, i64 column,
                               float* const* out) {
  constexpr int VECTORS = 16 / LANES;
  const E* b[COUNT];
  for (int n = 0; n < COUNT; n++) b[n] = static_cast<const E*>(low.b) + (i64)block[n * apart].row * 16;
  VecF sums[ROWS][COUNT * VECTORS] = {};
  for (i64 k = 0; k < block->count; k++) {
    VecF w[COUNT * VECTORS];
    for (int n = 0; n < COUNT; n++) {
      __builtin_prefetch(ahead + (k * COUNT + n) * 16, 0, 2);
      for (int l = 0; l < VECTORS; l++) w[n * VECTORS + l] = load(b[n] + k * 16 + l * LANES);
    }
    for (int i = 0; i < ROWS; i++) {
      const VecF a = splat(u[i][block->first + k]);
      for (int l = 0; l < COUNT * VECTORS; l++) sums[i][l] = fma(a, w[l], sums[i][l]);
    }
  }
  for (int i = 0; i < ROWS; i++) {
    for (int l = 0; l < COUNT * VECTORS; l++) store(out[i] + column + l / VECTORS * apart * 16 + l % VECTORS * LANES, sums[i][l]);
  }
}

// What a panel of B makes of u, for ROWS rows; prefetches as much from `ahead` on meanwhile.
template <class E, int ROWS>
AE_NOINLINE void multiply_b(const LowRank& low, i64 panel, const float* const* u, const E* ahead, float* const* out) {
  const LowRankBlock* blocks = low.blocks + panel * (PANEL / 16);
  const auto alike = [&](int i, int j) { return blocks[i].first == blocks[j].first && blocks[i].count == blocks[j].count; };
  // Two blocks at once where vectors are wide: neighbours, or both of a gate and both of an up projection.
  const int apart = alike(0, 1) && alike(2, 3) ? 1 : alike(0, 2) && alike(1, 3) ? 2 : 0;
  if (LANES == 16 && apart) {
    for (int pair = 0; pair < 2; pair++) {
      const int first = pair * (3 - apart);
      multiply_blocks<E, ROWS, 2>(low, blocks + first, apart, u, ahead, first * 16, out);
      ahead += 2 * 16 * blocks[first].count;
    }
    return;
  }
  for (int i = 0; i < PANEL / 16; i++) {
    multiply_blocks<E, ROWS, 1>(low, blocks + i, 1, u, ahead, i * 16, out);
    ahead += 16 * blocks[i].count;
  }
}

// deltas = B u for all rows.
template <class E>
void multiply_all(const Member& member, i64 panels, i32 matrix, const AdaptedRows& adapted, const Rows<float>& u, const Rows<float>& deltas) {
  const i64 run = larger(1, smaller(panels, adapted.num_spans * panels / (B_TASKS * member.size()))), runs = ceil_div(panels, run);
  const auto low_of = [&](i64 task) -> const LowRank& { return adapted.of(adapted.spans[task / runs].adapter, matrix); };
  member.each_ahead(adapted.num_spans * runs, [&](i64 task, i64 next_task) {
    const AdapterSpan& span = adapted.spans[task / runs];
    const LowRank& low = low_of(task);
    const i64 end = smaller(panels, (task % runs + 1) * run);
    for (i64 panel = task % runs * run; low.size && panel < end; panel++) {
      const E* ahead = b_of<E>(low, smaller(panel + B_AHEAD, end - 1));
      if (panel + B_AHEAD >= end && next_task >= 0 && low_of(next_task).size) {
        ahead = b_of<E>(low_of(next_task), smaller(next_task % runs * run + panel + B_AHEAD - end, panels - 1));
      }
      for (i64 i = 0; i < span.count; i += TILE_ROWS) {
        const i64 count = smaller(TILE_ROWS, span.count - i);
        const float* of[TILE_ROWS];
        float* to[TILE_ROWS];
        for (i64 n = 0; n < count; n++) {
          const i32 row = adapted.order[span.first + i + n];
          of[n] = u.row(row), to[n] = deltas.row(row) + panel * PANEL;
        }
        with_rows(count, [&](auto n) { multiply_b<E, n>(low, panel, of, ahead, to); });
      }
    }
  });
}

// Another output's, of values with what the adapters of the rows add.
template <class E>
struct AddLowRank final : Output {
  AddLowRank(const AdaptedRows& rows, i32 of, i64 count, const Rows<float>& projected, const Rows<float>& ready, const Output& then)
      : adapted(rows), matrix(of), panels(count), u(projected), deltas(ready), next(then) {}

  void put(const Group& group, i64 row, i64 count, i64 panel, const float (*values)[PANEL]) const override {
    float sums[TILE_ROWS][PANEL];
    for (i64 i = 0, end; i < count; i = end) {
      const i32 adapter = adapted.of_rows[row + i];
      for (end = i + 1; end < count && adapted.of_rows[row + end] == adapter;) end++;
      if (adapter < 0 || !adapted.of(adapter, matrix).size) {
        memcpy(sums + i, values + i, (size_t)(end - i) * sizeof *sums);
        continue;
      }
      float more[TILE_ROWS][PANEL];
      float* to[TILE_ROWS];
      const float* of[TILE_ROWS];
      for (i64 n = 0; n < end - i; n++) {
        to[n] = deltas.data ? deltas.row(row + i + n) + panel * PANEL : more[n];
        of[n] = u.row(row + i + n);
      }
      if (!deltas.data) {
        const LowRank& low = adapted.of(adapter, matrix);
        const E* ahead = b_of<E>(low, smaller(panel + 1, panels - 1));
        with_rows(end - i, [&](auto n) { multiply_b<E, n>(low, panel, of, ahead, to); });
      }
      for (i64 n = 0; n < end - i; n++) {
        for (int j = 0; j < PANEL; j += LANES) {
          if (deltas.data) __builtin_prefetch(to[n] + PANEL + j, 0, 2);
          store(sums[i + n] + j, load(values[i + n] + j) + load(to[n] + j));
        }
      }
    }
    next.put(group, row, count, panel, sums);
  }

 private:
  const AdaptedRows& adapted;
  i32 matrix;
  i64 panels;
  Rows<float> u, deltas;  // deltas without data: computed here
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
  // Few rows are bound by memory, which is faster when B is read in one piece than between the panels of W.
  const i64 panels = num_panels(w);
  const Rows<float> deltas = {rows * panels * PANEL < MOST_DELTAS ? space.deltas.as<float>() : nullptr, panels * PANEL};
  if (deltas.data) multiply_all<E>(member, panels, matrix, adapted, u, deltas);
  multiply(member, x, stride, rows, w, AddLowRank<E>(adapted, matrix, panels, u, deltas, output), space);
}

template <class E>
void add_low_rank(const LowRank& matrix, i64 panel, const float* u, float* more) {
  float deltas[PANEL], *to = deltas;
  multiply_b<E, 1>(matrix, panel, &u, b_of<E>(matrix, panel), &to);
  for (int j = 0; j < PANEL; j++) more[j] += deltas[j];
}

template void multiply_adapted(const Member&, const Bf16*, i64, i64, const PackedLinear&, i32, const AdaptedRows&, const Output&, const Buffers&);
template void multiply_adapted(const Member&, const float*, i64, i64, const PackedLinear&, i32, const AdaptedRows&, const Output&, const Buffers&);
template void add_low_rank<Bf16>(const LowRank&, i64, const float*, float*);
template void add_low_rank<float>(const LowRank&, i64, const float*, float*);

}  // namespace aengine
