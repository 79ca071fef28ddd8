// How a 32-bit word of weights meets activations: one `Dot` per format and level.
//
// A Dot says what an activation is stored as (X), how many of them a word takes (X_PER_WORD), and in how many PARTS a word is
// multiplied: part p of a word of weights with part p of the activations at x. Sums are taken in the order of the depth, so that
// a sum depends on nothing but its own row and column.
#pragma once
#include "int8.h"
#include "simd.h"

namespace aengine {

// A float32 weight with a float32 activation.
struct F32Dot {
  using X = float;
  using Sum = VecF;
  static constexpr int X_PER_WORD = 1, PARTS = 1;
  template <int PART>
  static AE_INLINE VecF weights(VecU words) { return (VecF)words; }
  template <int PART>
  static AE_INLINE VecF activations(const X* x) { return splat(*x); }
  static AE_INLINE VecF multiply_add(VecF sum, VecF x, VecF w) { return fma(x, w, sum); }
};

// CPUs with AMX take longer for the instruction that multiplies pairs than for two products in float32 (measured: attention of 2,048 tokens).
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define AE_BF16_PAIRS
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define AE_BF16_PAIRS
#endif

#if defined(AE_BF16_PAIRS)
// A pair of bf16 weights with a pair of bf16 activations, in one instruction.
struct Bf16Dot {
  using X = Bf16;
  using Sum = VecF;
  static constexpr int X_PER_WORD = 2, PARTS = 1;
  template <int PART>
  static AE_INLINE VecU weights(VecU words) { return words; }
  template <int PART>
  static AE_INLINE VecU activations(const X* x) { return splat_word_at(x); }
  static AE_INLINE VecF multiply_add(VecF sum, VecU x, VecU w) {
#if defined(__AVX512BF16__)
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    return (VecF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)w);
#endif
  }
};
#else
// A pair of bf16 weights with a pair of activations widened to float32.
struct Bf16Dot {
  using X = float;
  using Sum = VecF;
  static constexpr int X_PER_WORD = 2, PARTS = 2;
  template <int PART>
  static AE_INLINE VecF weights(VecU words) { return PART == 0 ? (VecF)(words << 16) : (VecF)(words & 0xffff0000u); }
  template <int PART>
  static AE_INLINE VecF activations(const X* x) { return splat(x[PART]); }
  static AE_INLINE VecF multiply_add(VecF sum, VecF x, VecF w) { return fma(x, w, sum); }
};
#endif

template <class E>
using DotOf = std::conditional_t<std::is_same_v<E, float>, F32Dot, Bf16Dot>;

// Calls f<0>(), f<1>(), ... for the parts of a Dot.
template <class Dot, class F>
AE_INLINE void for_each_part(F&& f) {
  f(std::integral_constant<int, 0>{});
  if constexpr (Dot::PARTS == 2) f(std::integral_constant<int, 1>{});
}

}  // namespace aengine
