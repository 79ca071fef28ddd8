// Dynamic int8: weights with a scale per output column, activations quantised row by row as they come (W8A8, symmetric).
//
// Products are summed exactly in int32, so every level gives the same sums.
#pragma once
#include "simd.h"

namespace aengine {

// Words of four int8 with activations as pairs of int16: the first for bytes 0 and 2 of a word, the second for 1 and 3.
struct Int16Dot {
  using X = i16;
  using Sum = VecI;
  static constexpr int X_PER_WORD = 4, PARTS = 2;
  static constexpr bool OFFSET = false;
  typedef i16 VecS __attribute__((vector_size(4 * LANES)));
  template <int PART>
  static AE_INLINE VecU weights(VecU words) {  // both bytes of a part as int16, sign and all
    const VecU at_top = PART == 0 ? words << 8 : words;
    return (VecU)((VecS)at_top >> 8);
  }
  template <int PART>
  static AE_INLINE VecU activations(const X* x) { return splat_word_at(x + 2 * PART); }
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) {
#if defined(__AVX512VNNI__)
    return (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
    return sum + (VecI)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
    return sum + (VecI)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__SSE2__)
    return sum + (VecI)_mm_madd_epi16((__m128i)x, (__m128i)w);
#elif defined(__aarch64__)
    const int16x8_t pairs = (int16x8_t)x, weights = (int16x8_t)w;
    return sum + (VecI)vpaddq_s32(vmull_s16(vget_low_s16(pairs), vget_low_s16(weights)), vmull_high_s16(pairs, weights));
#else
    const VecI low = ((VecI)(x << 16) >> 16) * ((VecI)(w << 16) >> 16);
    return sum + low + ((VecI)x >> 16) * ((VecI)w >> 16);
#endif
  }
  static AE_INLINE void put(X* out, VecI q) {
    typedef i16 VecHalf __attribute__((vector_size(2 * LANES)));
    const VecHalf narrowed = __builtin_convertvector(q, VecHalf);
    memcpy(out, &narrowed, sizeof narrowed);
  }
};

// Int8 values in memory.
struct Int8Values {
  using X = i8;
  static AE_INLINE void put(X* out, VecI q) {
    typedef i8 VecB __attribute__((vector_size(LANES)));
    const VecB bytes = __builtin_convertvector(q, VecB);
    memcpy(out, &bytes, sizeof bytes);
  }
};

// Whole words with the four activations at x, which are stored as T.
template <class T>
struct QuadDot {
  using X = T;
  using Sum = VecI;
  static constexpr int X_PER_WORD = 4, PARTS = 1;
  template <int PART>
  static AE_INLINE VecU weights(VecU words) { return words; }
  template <int PART>
  static AE_INLINE VecU activations(const X* x) { return splat_word_at(x); }
};

// Unsigned activations (q + 128); `PackedLinear::offsets` is what the 128 adds to a column's sum.
struct UnsignedQuads : QuadDot<u8> {
  static constexpr bool OFFSET = true;
  static AE_INLINE void put(X* out, VecI q) {
    typedef u8 VecB __attribute__((vector_size(LANES)));
    const VecB bytes = __builtin_convertvector(q + 128, VecB);
    memcpy(out, &bytes, sizeof bytes);
  }
};

// Words of four int8 weights at consecutive depths, with quantised activations in the form that the level multiplies fastest.
#if defined(__AVX512VNNI__)
struct Int8Dot : UnsignedQuads {
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) { return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct Int8Dot : QuadDot<i8> {
  static constexpr bool OFFSET = false;
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) { return (VecI)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)w); }
  static AE_INLINE void put(X* out, VecI q) { Int8Values::put(out, q); }
};
#else
struct Int8Dot : Int16Dot {
  static AE_INLINE void put(X* out, VecI q) {
    for (int i = 0; i < LANES; i += 4) {
      out[i] = (i16)q[i], out[i + 1] = (i16)q[i + 2], out[i + 2] = (i16)q[i + 1], out[i + 3] = (i16)q[i + 3];
    }
  }
};
#endif

constexpr float INT8_MAX_VALUE = 127.f;

// The nearest integers to x * factor, ties to even, in -limit .. limit; some of those for a NaN. With the bound in between, the product is
// rounded before the sum on every level.
AE_INLINE VecI round_scaled(VecF x, float factor, float limit = INT8_MAX_VALUE) {
  const VecF scaled = smaller(larger(x * factor, splat(-limit)), splat(limit));
  return (VecI)(scaled + 12582912.f) - 0x4b400000;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
}

// One row of `size` elements, a multiple of 16 -> its integers as `To` stores them, and the scale that they are to be multiplied with. The
// largest becomes `limit`. `maximum` has the largest magnitude in one of its lanes, `not_finite` a NaN if the row has a NaN or an infinity:
// its scale is NaN then, so that it does not turn into numbers.
template <class To, class E>
AE_INLINE float round_row(const E* x, typename To::X* out, i64 size, VecF maximum, VecF not_finite, float limit) {
  const float absmax = largest(maximum), factor = absmax > 0 ? limit / absmax : 0.f;
  for (i64 i = 0; i < size; i += LANES) To::put(out + i, round_scaled(load(x + i), factor, limit));
  return absmax / limit + sum(not_finite);
}

template <class To = Int8Dot, class E>
float quantise_row(const E* x, typename To::X* out, i64 size, float limit = INT8_MAX_VALUE) {
  VecF maximum = {}, not_finite = {};
  for (i64 i = 0; i < size; i += LANES) {
    const VecF v = load(x + i);
    maximum = larger(maximum, larger(v, -v));
    not_finite += v * 0.f;
  }
  return round_row<To>(x, out, size, maximum, not_finite, limit);
}

}  // namespace aengine
