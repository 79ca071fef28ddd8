// Activations of feed-forward blocks.
#pragma once
#include "simd.h"

namespace aengine {

template <i32 KIND>
using ActivationConstant = std::integral_constant<i32, KIND>;

// Calls `f` with the kind as a compile-time constant.
template <class F>
AE_INLINE void with_activation(i32 kind, F&& f) {
  switch (static_cast<Activation>(kind)) {
    case SILU: return f(ActivationConstant<SILU>{});
    default: return;
  }
}

template <i32 KIND>
AE_INLINE VecF activate(VecF x) {
  return silu(x);
}

template <i32 KIND>
AE_INLINE VecF gated(VecF gate, VecF up) {
  return activate<KIND>(gate) * up;
}

}  // namespace aengine
