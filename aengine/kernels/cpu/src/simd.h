// Vectors of floats and of 32-bit words, in the width of the level this is compiled for, and the two element types.
//
// Written with the vector extensions of GCC and clang; the level is chosen by compiler flags alone.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define AE_INLINE inline __attribute__((always_inline))
#define AE_ALWAYS_INLINE __attribute__((always_inline))  // of a lambda
#define AE_NOINLINE __attribute__((noinline))

namespace aengine {

// ACCUMULATORS: how many vector registers a tile of sums may hold, so that weights and activations keep some for themselves.
#if defined(__AVX512F__)
constexpr int LANES = 16, ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int LANES = 8, ACCUMULATORS = 12;
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 24;
#else
constexpr int LANES = 4, ACCUMULATORS = 12;
#endif
constexpr int TILE_ROWS = 6;

// Vectors next to each other in a tile of `rows` rows: a power of two, at most a panel wide.
constexpr int tile_vectors(int rows) {
  int vectors = 1;
  while (2 * vectors * LANES <= PANEL && 2 * vectors * rows <= ACCUMULATORS) vectors *= 2;
  return vectors;
}

typedef float VecF __attribute__((vector_size(4 * LANES)));
typedef u32 VecU __attribute__((vector_size(4 * LANES)));
typedef i32 VecI __attribute__((vector_size(4 * LANES)));
typedef u16 VecH __attribute__((vector_size(2 * LANES)));
typedef u32 Quad __attribute__((vector_size(16)));

// Four words out of two quads, which are numbered 0..3 and 4..7.
#if defined(__clang__)
#define AE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Quad{__VA_ARGS__})
#endif

struct Bf16 {
  u16 bits;
};

AE_INLINE VecF splat(float x) { return x - VecF{}; }  // folded to a broadcast; x + 0 is not, since -0 + 0 is 0
AE_INLINE VecU splat_word(u32 x) { return VecU{} + x; }
// The four bytes at p, in all lanes.
AE_INLINE VecU splat_word_at(const void* p) {
  u32 word;
  memcpy(&word, p, sizeof word);
  return splat_word(word);
}
// a * b + c, rounded once. Elsewhere compilers round each product and each sum (-ffp-contract=off), so that equal numbers have equal bits at
// every use, on every level and with every compiler. Without the instruction it is emulated (AENGINE_FUSED), or rounded twice.
#if defined(__FMA__) || defined(__aarch64__) || defined(AENGINE_FUSED)
AE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
AE_INLINE float fma(float a, float b, float c) { return a * b + c; }
#endif
AE_INLINE VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(AENGINE_FUSED)
  VecF all;
  for (int i = 0; i < LANES; i++) all[i] = fma(a[i], b[i], c[i]);
  return all;
#else
  return a * b + c;
#endif
}

AE_INLINE VecF smaller(VecF a, VecF b) { return a < b ? a : b; }
AE_INLINE VecF larger(VecF a, VecF b) { return a > b ? a : b; }

AE_INLINE VecI lane_numbers() {
  VecI numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

template <class V, class T>
AE_INLINE V load_as(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// All lanes in one: quads of them are combined in pairs, then the lanes of the last quad.
template <class F>
AE_INLINE float fold(VecF v, const F& combine) {
  typedef float QuadF __attribute__((vector_size(16)));
  QuadF quads[LANES / 4];
  memcpy(quads, &v, sizeof v);
  for (int count = LANES / 8; count; count /= 2) {
    for (int i = 0; i < count; i++) quads[i] = combine(quads[i], quads[i + count]);
  }
  return combine(combine(quads[0][0], quads[0][1]), combine(quads[0][2], quads[0][3]));
}

AE_INLINE float sum(VecF v) {
  return fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

AE_INLINE float largest(VecF v) {
  return fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}


// Sums of 16 lanes, on every level: what is added up of a row, element i in lane i % 16, has one order.
struct WideSum {
  static constexpr int PARTS = 16 / LANES;
  VecF parts[PARTS] = {};

  // Calls f(sum, i) for all `size` elements, a multiple of 16, a vector from i on at a time.
  template <class F>
  AE_INLINE void each(i64 size, F&& f) {
    for (i64 i = 0; i < size; i += 16) {
      for (int part = 0; part < PARTS; part++) f(parts[part], i + part * LANES);
    }
  }

  AE_INLINE float total() const {
    VecF sums[PARTS];
    for (int part = 0; part < PARTS; part++) sums[part] = parts[part];
    for (int count = PARTS / 2; count; count /= 2) {
      for (int i = 0; i < count; i++) sums[i] += sums[i + count];
    }
    return sum(sums[0]);
  }
};

AE_INLINE VecU load_words(const u32* p) { return load_as<VecU>(p); }
AE_INLINE VecF load(const float* p) { return load_as<VecF>(p); }
AE_INLINE VecF load(const Bf16* p) { return (VecF)(__builtin_convertvector(load_as<VecH>(p), VecU) << 16); }

AE_INLINE void store(float* p, VecF v) { memcpy(p, &v, sizeof v); }
AE_INLINE void store(u32* p, Quad v) { memcpy(p, &v, sizeof v); }

// Rounds to the nearest bf16, ties to even; a NaN stays one.
AE_INLINE void store(Bf16* p, VecF v) {
#if defined(__AVX512BF16__)
  const VecH half = (VecH)_mm512_cvtneps_pbh((__m512)v);
#else
  const VecU bits = (VecU)v;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecH half = __builtin_convertvector((VecU)(v == v ? rounded : splat_word(0x7fc0u)), VecH);
#endif
  memcpy(p, &half, sizeof half);
}

// The first `size` elements as float32, and zeros up to the next multiple of 16.
template <class E>
AE_INLINE void load_padded(const E* p, i64 size, float* out) {
  i64 i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(p + i));
  if (i == size && size % 16 == 0) return;
  E rest[16] = {};
  if (size > i) memcpy(static_cast<void*>(rest), p + i, (size_t)(size - i) * sizeof(E));
  for (i64 j = 0; i + j < round_up(size, 16); j += LANES) store(out + i + j, load(rest + j));
}

// Stores the first `size` of `values` times `factor`; they are readable to the next multiple of 16.
template <class E>
AE_INLINE void store_scaled(const float* values, float factor, i64 size, E* p) {
  i64 i = 0;
  for (; i + LANES <= size; i += LANES) store(p + i, load(values + i) * factor);
  if (i == size) return;
  E rest[LANES];
  store(rest, load(values + i) * factor);
  memcpy(static_cast<void*>(p + i), rest, (size_t)(size - i) * sizeof(E));
}

AE_INLINE float widen(float x) { return x; }
AE_INLINE float widen(Bf16 x) {
  const u32 bits = (u32)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class E>
AE_INLINE E narrow(float x) {
  if constexpr (std::is_same_v<E, float>) {
    return x;
  } else {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return Bf16{0x7fc0};
    return Bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
}

// 2^y with a relative error of about 2e-7 near 0, of y in [-126, 126].
AE_INLINE VecF exp2(VecF y) {
  const float round = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const VecF shifted = y + round;
  const VecF f = y - (shifted - round);
  VecF p = fma(f, splat(1.5403530e-4f), splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.f));
  const VecI n = (VecI)shifted - 0x4b400000;
  return (VecF)((VecI)p + (VecI)((VecU)n << 23));
}

// e^x; clamped to 2^-126 .. 2^126, NaN for NaN.
AE_INLINE VecF exp(VecF x) {
  VecF y = x * 1.44269504088896f;
  y = y < splat(-126.f) ? splat(-126.f) : y;
  y = y > splat(126.f) ? splat(126.f) : y;
  return y == y ? exp2(y) : y;
}

AE_INLINE float exp(float x) { return exp(splat(x))[0]; }
AE_INLINE VecF tanh(VecF x) { return 1.f - 2.f / (exp(2.f * x) + 1.f); }
AE_INLINE VecF silu(VecF x) { return x / (1.f + exp(-x)); }

// Calls `f` with `rows`, 1..TILE_ROWS, as a compile-time constant.
template <class F>
AE_INLINE void with_rows(i64 rows, F&& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, TILE_ROWS>{});
  }
}

// Calls `f` with an element of the kind, for its type.
template <class F>
AE_INLINE auto with_element(i32 kind, F&& f) {
  return kind == BF16 ? f(Bf16{}) : f(float{});
}

}  // namespace aengine
