// Low-rank adapters (Hu et al., 2021): rows of a product y = W x get B (A x) more, of the adapter that each has.
//
// First u = A x is computed for all rows, those of an adapter together; then B u where there are few rows. The product runs as without
// adapters, and B u is added to the values of a panel before its output takes them. A row's result depends on nothing but itself and its adapter.
#pragma once
#include "gemm.h"

namespace aengine {

// Rows `order[first .. first + count)`, which have the same adapter.
struct AdapterSpan {
  i32 adapter, first, count;
};

// The adapters of some rows: the tokens of a step, or those at its logits indices.
struct AdaptedRows {
  const LowRank* const* adapters = nullptr;
  const i32* of_rows = nullptr;  // -1: none
  const i32* order = nullptr;    // the rows that have one, by adapter
  const AdapterSpan* spans = nullptr;
  i64 num_spans = 0;

  const LowRank& of(i64 adapter, i32 matrix) const { return adapters[adapter][matrix]; }
  // The largest part of A that one of the adapters has for a matrix; 0: none changes it.
  i64 most(i32 matrix) const {
    i64 size = 0;
    for (i64 i = 0; i < num_spans && matrix >= 0; i++) size = larger(size, of(spans[i].adapter, matrix).size);
    return size;
  }
};

// Fills `out`, whose arrays are in `memory`, for rows that are tokens `indices` of a step (null: all). False when there is no memory.
bool plan_adapters(const StepAdapters& given, const i32* indices, i64 rows, Buffer& memory, AdaptedRows& out);

constexpr i64 MOST_DELTAS = 1 << 19;  // elements of B u that are kept before they are added

// Room for A x of so many rows, and for B u.
inline bool reserve_low_rank(Buffers& space, const StepAdapters& given, i64 rows) {
  return space.low_rank.reserve<float>(rows * given.most) && space.deltas.reserve<float>(MOST_DELTAS);
}

// As `multiply`, with what the adapters of the rows add to the matrix of this number. Needs `reserve_low_rank`.
template <class E>
void multiply_adapted(const Member& member, const E* x, i64 stride, i64 rows, const PackedLinear& w, i32 matrix, const AdaptedRows& adapted,
                      const Output& output, const Buffers& space);

// The product with an output head.
template <class E>
void multiply_logits(const Member& member, const E* x, i64 stride, i64 rows, const PackedLinear& head, float soft_cap,
                     const AdaptedRows& adapted, const Output& output, const Buffers& space) {
  const auto multiply_to = [&](const Output& out) { multiply_adapted(member, x, stride, rows, head, HEAD, adapted, out, space); };
  if (soft_cap > 0) return multiply_to(CapLogits(soft_cap, output));
  multiply_to(output);
}

// more[j] += column `panel` * PANEL + j of B u.
template <class E>
void add_low_rank(const LowRank& matrix, i64 panel, const float* u, float* more);

}  // namespace aengine
