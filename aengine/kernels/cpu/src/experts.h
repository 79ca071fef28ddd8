// Mixtures of experts (Shazeer et al., 2017): a router chooses some MLPs for each token, whose outputs are added with its weights.
#pragma once
#include "gemm.h"

namespace aengine {

constexpr i64 MAX_EXPERTS = 1024;

// Room for a layer of experts and `rows` rows; false when there is no memory.
template <class E>
bool reserve_experts(Buffers& space, const Experts& experts, i64 rows);

// out[row] += the output of the experts that the router chooses for a row of x, with their weights, and that of the shared expert. Sums
// are taken in float32, in the order of a token's choices, so that a row depends on nothing but itself. Needs `reserve_experts`.
template <class E>
void add_experts(const Member& member, const Experts& experts, const E* x, i64 stride, i64 rows, E* out, i64 out_stride,
                 const Buffers& space);

}  // namespace aengine
