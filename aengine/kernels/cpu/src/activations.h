// Activations of feed-forward blocks, in float32. Relative errors are of 5e-7 at most where results are above 1e-30.
#pragma once
#include "simd.h"

namespace aengine {

// The distribution function of the normal distribution: e^(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.3 |x|) below zero, the form of
// Abramowitz and Stegun 7.1.26; the coefficients are fitted to a relative error of 1.5e-7.
AE_INLINE VecF normal_distribution(VecF x) {
  const VecF t = 1.f / fma(splat(0.3f), larger(x, -x), splat(1.f));
  VecF p = fma(t, splat(0.03567488f), splat(-0.15720311f));
  p = fma(p, t, splat(0.20635353f));
  p = fma(p, t, splat(-0.05368367f));
  p = fma(p, t, splat(0.12856165f));
  p = fma(p, t, splat(0.09991349f));
  p = fma(p, t, splat(0.12075396f));
  p = fma(p, t, splat(0.11962930f));
  const VecF tail = exp(x * x * -0.5f) * t * p;
  return x < 0.f ? tail : 1.f - tail;
}

template <i32 KIND>
AE_INLINE VecF activate(VecF x) {
  if constexpr (KIND == GELU) return x * normal_distribution(x);
  // x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016)
  if constexpr (KIND == GELU_TANH) return x / (1.f + exp(x * fma(x * x, splat(-0.071354816f), splat(-1.5957691f))));
  if constexpr (KIND == RELU) return x < 0.f ? splat(0.f) : x;
  if constexpr (KIND == RELU_SQUARED) return x < 0.f ? splat(0.f) : x * x;
  // The gate of GPT-OSS.
  if constexpr (KIND == CLIPPED_SWIGLU) {
    const VecF clipped = x > 7.f ? splat(7.f) : x;
    return clipped / (1.f + exp(clipped * -1.702f));
  }
  return silu(x);
}

template <i32 KIND>
AE_INLINE VecF gated(VecF gate, VecF up) {
  if constexpr (KIND == CLIPPED_SWIGLU) {
    const VecF below = up > 7.f ? splat(7.f) : up;
    return activate<KIND>(gate) * ((below < -7.f ? splat(-7.f) : below) + 1.f);
  }
  return activate<KIND>(gate) * up;
}

// Calls `f` with the kind as a compile-time constant.
template <class F>
AE_INLINE void with_activation(i32 kind, F&& f) {
  switch (static_cast<Activation>(kind)) {
    case SILU: return f(std::integral_constant<i32, SILU>{});
    case GELU: return f(std::integral_constant<i32, GELU>{});
    case GELU_TANH: return f(std::integral_constant<i32, GELU_TANH>{});
    case RELU: return f(std::integral_constant<i32, RELU>{});
    case RELU_SQUARED: return f(std::integral_constant<i32, RELU_SQUARED>{});
    case CLIPPED_SWIGLU: return f(std::integral_constant<i32, CLIPPED_SWIGLU>{});
  }
}

}  // namespace aengine
