// Mixtures of experts (Shazeer et al., 2017): a router chooses some MLPs for each token, whose outputs are added with its weights.
#pragma once
#include "adapters.h"
#include "workspace.h"

namespace aengine {

constexpr i64 MAX_EXPERTS = 1024;

// Room for the operation on `rows` rows; false when there is no memory.
template <class E>
bool reserve_experts(Buffers& space, const ExpertsOp& op, i64 rows);

// Sums are taken in float32, in the order of a token's choices, the best first and the shared MLP last, so that a row depends on nothing but
// itself. Needs `reserve_experts`.
template <class E>
void run_experts(const Member& member, const ExpertsOp& op, const StepRows<E>& buffers, i64 rows, const AdaptedRows& adapted,
                 const Workspace& space);

}  // namespace aengine
