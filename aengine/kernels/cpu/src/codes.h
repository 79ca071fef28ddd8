// Weights as codes of 4 or 8 bits with scales per group of the depth, and the activations that they are multiplied with.
#pragma once
#include "gemm.h"
#include "int8.h"

namespace aengine {

// `multiply_groups` with matrices of codes.
template <class E>
void multiply_codes(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                    const Output& output, const Buffers& space);

// Words of the scales of a panel's columns for one group, or of their offsets.
inline i64 scale_words(const PackedLinear& w) { return w.scale_kind == F32_SCALES ? PANEL : PANEL / 2; }
inline i64 block_words(const PackedLinear& w) {
  return w.group_size / elements_per_word(w.format) * PANEL + scale_words(w) * (w.with_offsets ? 2 : 1);
}
inline i64 panel_words(const PackedLinear& w) { return round_up(ceil_div(w.in_features, w.group_size) * block_words(w), PANEL); }

// Finite float16 numbers.
AE_INLINE VecF load_half(const u16* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtph_ps((__m256i)load_as<VecH>(p));
#else
  const VecU bits = __builtin_convertvector(load_as<VecH>(p), VecU);
  const VecF magnitude = (VecF)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (VecF)((VecU)magnitude | ((bits & 0x8000u) << 16));
#endif
}

// The scales of LANES columns from number `column` on.
AE_INLINE VecF load_scales(const u32* scales, i64 column, i32 kind) {
  if (kind == BF16_SCALES) return load(reinterpret_cast<const Bf16*>(scales) + column);
  if (kind == F16_SCALES) return load_half(reinterpret_cast<const u16*>(scales) + column);
  return load(reinterpret_cast<const float*>(scales) + column);
}

// A Dot of codes is made for a matrix. It says what an activation is stored as (X), how many of them a word takes (X_PER_WORD), and in how
// many PARTS a word is multiplied. `put_group` stores `size` elements of a row, a multiple of 16, as X, and returns what their sums are to
// be multiplied with; `total` becomes the sum of what was stored.

// Unsigned codes with activations quantised to int8: sums are exact. Without VNNI in pairs of int16: depths 0 and 2 of a quad, then 1 and 3.
struct QuantisedDot {
  using Sum = VecI;
  using Total = i32;
#if defined(__AVX512VNNI__)
  using X = signed char;
  static constexpr int PARTS_PER_QUAD = 1;
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) { return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
  static AE_INLINE void put(X* out, VecI q) {
    typedef X VecB __attribute__((vector_size(LANES)));
    const VecB bytes = __builtin_convertvector(q, VecB);
    memcpy(out, &bytes, sizeof bytes);
  }
#else
  using X = i16;
  static constexpr int PARTS_PER_QUAD = 2;
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) { return Int8Dot::multiply_add(sum, x, w); }
  static AE_INLINE void put(X* out, VecI q) { Int8Dot::put(out, q); }
#endif
  explicit QuantisedDot(const PackedLinear& w) : zero(w.zero) {}

  AE_INLINE VecI first_sum(i32 total) const { return VecI{} - zero * total; }

  template <int PART>
  static AE_INLINE VecU activations(const X* x) {
    u32 word;
    memcpy(&word, x + 4 / PARTS_PER_QUAD * PART, sizeof word);
    return splat_word(word);
  }

  static float put_group(const float* x, i64 size, X* out, i32& total) {
    VecF maximum = {}, not_finite = {};
    for (i64 i = 0; i < size; i += LANES) {
      const VecF v = load(x + i);
      maximum = larger(maximum, larger(v, -v));
      not_finite += v * 0.f;
    }
    const float absmax = largest(maximum), factor = absmax > 0 ? INT8_MAX_VALUE / absmax : 0.f;
    VecI totals = {};
    for (i64 i = 0; i < size; i += LANES) {
      const VecI q = round_scaled(load(x + i), factor);
      totals += q;
      put(out + i, q);
    }
    total = 0;
    for (int i = 0; i < LANES; i++) total += totals[i];
    return absmax / INT8_MAX_VALUE + sum(not_finite);  // a NaN stays in its row, as an infinity does
  }

  i32 zero;
};

struct Int4Dot : QuantisedDot {
  using QuantisedDot::QuantisedDot;
  static constexpr int X_PER_WORD = 8, PARTS = 2 * PARTS_PER_QUAD;
  template <int PART>
  AE_INLINE VecU weights(VecU words) const {
    if constexpr (PARTS == 2) return (words >> (4 * PART)) & 0x0f0f0f0fu;
    return (words >> (4 * (PART / 2) + 8 * (PART % 2))) & 0x000f000fu;
  }
};

struct ByteDot : QuantisedDot {
  using QuantisedDot::QuantisedDot;
  static constexpr int X_PER_WORD = 4, PARTS = PARTS_PER_QUAD;
  template <int PART>
  AE_INLINE VecU weights(VecU words) const {
    if constexpr (PARTS == 1) return words;
    return (words >> (8 * PART)) & 0x00ff00ffu;
  }
};

// The numbers of codes with activations in float32.
struct WideDot {
  using X = float;
  using Sum = VecF;
  using Total = float;
  static AE_INLINE VecF first_sum(float) { return VecF{}; }
  template <int PART>
  static AE_INLINE VecF activations(const X* x) { return splat(x[PART]); }
  static AE_INLINE VecF multiply_add(VecF sum, VecF x, VecF w) { return sum + x * w; }
  static float put_group(const float* x, i64 size, X* out, float& total) {
    VecF totals = {};
    for (i64 i = 0; i < size; i += LANES) totals += load(x + i), store(out + i, load(x + i));
    total = sum(totals);
    return 1.f;
  }
};

struct WideInt4Dot : WideDot {
  static constexpr int X_PER_WORD = 8, PARTS = 8;
  template <int PART>
  AE_INLINE VecF weights(VecU words) const {
    const VecU codes = words >> (8 * (PART % 4) + 4 * (PART / 4));
#if defined(__AVX512F__)
    return (VecF)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)codes);
    return (VecF)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    VecF numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = table[codes[i] & 15u];
    return numbers;
#endif
  }
  explicit WideInt4Dot(const PackedLinear& w) : table(w.table) {}
  const float* table;
};

struct WideByteDot : WideDot {
  static constexpr int X_PER_WORD = 4, PARTS = 4;
  template <int PART>
  AE_INLINE VecF weights(VecU words) const {
    return __builtin_convertvector((VecI)((words >> (8 * PART)) & 0xffu) - zero, VecF);
  }
  explicit WideByteDot(const PackedLinear& w) : zero(w.zero) {}
  i32 zero;
};

// e4m3fn has the sign, 4 bits of exponent with a bias of 7 and 3 of mantissa, and no infinities.
struct Float8Dot : WideDot {
  static constexpr int X_PER_WORD = 4, PARTS = 4;
  template <int PART>
  AE_INLINE VecF weights(VecU words) const {
    const VecU codes = words >> (8 * PART);
    const VecF magnitude = (VecF)((codes & 0x7fu) << 20) * 0x1p120f;
    return (VecF)((VecU)magnitude | ((codes & 0x80u) << 24));
  }
  explicit Float8Dot(const PackedLinear&) {}
};

}  // namespace aengine
