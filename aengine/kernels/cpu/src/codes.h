// Weights as codes of 2 to 8 bits with scales per group of the depth, and the activations that they are multiplied with.
#pragma once
#include "gemm.h"
#include "int8.h"

namespace aengine {

// `multiply_groups` with matrices of codes.
template <class E>
void multiply_codes(const Member& member, const E* x, i64 stride, i64 rows, i64 width, const Groups& groups, const PackedLinear& shape,
                    const Output& output, const Buffers& space);

// Bytes of a number of `scale_kind`, and of a scale or an offset as it is stored.
inline i64 number_bytes(const PackedLinear& w) { return w.scale_kind == F32_SCALES ? 4 : 2; }
inline i64 scale_bytes(const PackedLinear& w) { return w.groups_per_factor ? 1 : number_bytes(w); }
// Words of the scales of a panel's columns for one group, or of their offsets.
inline i64 scale_words(const PackedLinear& w) { return PANEL * scale_bytes(w) / 4; }
// Words of the factors of a panel's columns, those of offsets too, that stand before the groups that have them.
inline i64 factor_words(const PackedLinear& w) { return w.groups_per_factor ? PANEL * number_bytes(w) / 4 * (w.with_offsets ? 2 : 1) : 0; }
inline i64 block_words(const PackedLinear& w) {
  return words_of(w.format, w.group_size) * PANEL + scale_words(w) * (w.with_offsets ? 2 : 1);
}
inline i64 panel_words(const PackedLinear& w) {
  const i64 groups = ceil_div(w.in_features, w.group_size), factors = w.groups_per_factor ? ceil_div(groups, w.groups_per_factor) : 0;
  return round_up(groups * block_words(w) + factors * factor_words(w), PANEL);
}

// Finite float16 numbers.
AE_INLINE VecF load_half(const u16* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtph_ps((__m256i)load_as<VecH>(p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (VecF)_mm256_cvtph_ps((__m128i)load_as<VecH>(p));
#elif defined(__aarch64__)
  return (VecF)vcvt_f32_f16((float16x4_t)load_as<VecH>(p));
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

// LANES int8 as numbers.
AE_INLINE VecF load_multiples(const u32* multiples, i64 column) {
  const u8* const p = reinterpret_cast<const u8*>(multiples) + column;
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef i8 VecB __attribute__((vector_size(LANES)));
  return __builtin_convertvector(__builtin_convertvector(load_as<VecB>(p), VecI), VecF);
#endif
}

// The scales of a panel's columns for one group to out[0], and their offsets, if there are any, to out[1]. `factors`: that stand before it.
AE_INLINE void load_group_scales(const PackedLinear& w, const u32* block, const u32* factors, float (*out)[PANEL]) {
  for (int i = 0; i <= (w.with_offsets ? 1 : 0); i++, block += scale_words(w)) {
    if (w.groups_per_factor) {
      const i64 first = i * PANEL;
      for (int column = 0; column < PANEL; column += LANES) {
        store(out[i] + column, load_multiples(block, column) * load_scales(factors, first + column, w.scale_kind));
      }
    } else {
      for (int column = 0; column < PANEL; column += LANES) store(out[i] + column, load_scales(block, column, w.scale_kind));
    }
  }
}

// How activations meet unpacked weights, one step of the depth after another: a step multiplies X_PER_STEP activations, stored as X, with
// one W for each vector of columns. `put_group` stores `size` elements of a row, a multiple of 16, as X, and returns what their sums are to
// be multiplied with; `total` becomes the sum of what was stored.

// Activations that are quantised to int8, so that sums are exact. `Store` says how they are stored.
template <class Store>
struct QuantisedStep {
  using X = typename Store::X;
  using Sum = VecI;
  using Total = i32;

  explicit QuantisedStep(const PackedLinear& w) : zero(w.zero) {}
  AE_INLINE VecI first_sum(i32 total) const { return VecI{} - zero * total; }

  template <class E>
  static float put_group(const E* x, i64 size, X* out, i32& total) {
    VecI maximum = {};  // of the bits of magnitudes, which are in the order of the numbers; infinities and NaNs are larger than all
    for (i64 i = 0; i < size; i += LANES) {
      const VecI bits = (VecI)load(x + i) & 0x7fffffff;
      maximum = maximum > bits ? maximum : bits;
    }
    const i32 bits = largest_of(maximum);
    float absmax;
    memcpy(&absmax, &bits, sizeof absmax);
    const float factor = absmax > 0 ? INT8_MAX_VALUE / absmax : 0.f;
    VecI totals = {};
    for (i64 i = 0; i < size; i += LANES) {
      const VecI q = round_scaled(load(x + i), factor);
      totals += q;
      Store::put(out + i, q);
    }
    total = sum_of(totals);
    return absmax / INT8_MAX_VALUE + (absmax - absmax);  // a NaN stays in its row, as an infinity does
  }

  static AE_INLINE i32 largest_of(VecI v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    i32 found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
#endif
  }
  static AE_INLINE i32 sum_of(VecI v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    i32 total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
  }

  i32 zero;
};

#if defined(__AVX512VNNI__) || defined(AENGINE_AMX_MODEL) || defined(__ARM_FEATURE_DOTPROD)
// Quads of unsigned bytes with int8.
struct QuadStep : QuantisedStep<Int8Values> {
  using QuantisedStep::QuantisedStep;
  using W = VecU;
  static constexpr int X_PER_STEP = 4;
  static AE_INLINE VecU activations(const X* x) { return splat_word_at(x); }
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) {
#if defined(__AVX512VNNI__)
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (VecI)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#else
    for (int i = 0; i < 32; i += 8) sum += (VecI)((w >> i) & 0xffu) * ((VecI)(x << (24 - i)) >> 24);
    return sum;
#endif
  }
};
using FewBitsStep = QuadStep;
#if defined(__ARM_FEATURE_DOTPROD)
// Bytes of 8 bits, 128 less for an instruction that takes them as signed, and their zero with them.
struct ByteStep : QuadStep {
  explicit ByteStep(const PackedLinear& w) : QuadStep(w) { zero -= 128; }
};
#else
using ByteStep = QuadStep;
#endif
#else
// Pairs of int16: depths 0 and 2 of four, then 1 and 3.
struct PairStep : QuantisedStep<Int8Dot> {
  using QuantisedStep::QuantisedStep;
  using W = VecU;
  static constexpr int X_PER_STEP = 2;
  static AE_INLINE VecU activations(const X* x) { return Int8Dot::activations<0>(x); }
  static AE_INLINE VecI multiply_add(VecI sum, VecU x, VecU w) { return Int8Dot::multiply_add(sum, x, w); }
};
using ByteStep = PairStep;
using FewBitsStep = PairStep;
#endif

// A number, or activations, in float32.
struct FloatStep {
  using X = float;
  using Sum = VecF;
  using Total = float;
  using W = VecF;
  static constexpr int X_PER_STEP = 1;
  explicit FloatStep(const PackedLinear&) {}
  static AE_INLINE VecF first_sum(float) { return VecF{}; }
  static AE_INLINE VecF activations(const X* x) { return splat(*x); }
  static AE_INLINE VecF multiply_add(VecF sum, VecF x, VecF w) { return fma(x, w, sum); }
  template <class E>
  static float put_group(const E* x, i64 size, X* out, float& total) {
    WideSum totals;
    totals.each(size, [&](VecF& sum, i64 i) AE_ALWAYS_INLINE { sum += load(x + i), store(out + i, load(x + i)); });
    total = totals.total();
    return 1.f;
  }
};

// The words of a column that have some fours of codes, PANEL apart; `quad<N>` is the N-th four of LANES columns, as bytes.
template <int BITS>
struct CodeUnit;
template <>
struct CodeUnit<8> {
  static constexpr int WORDS = 1, QUADS = 1;
  template <int N>
  static AE_INLINE VecU quad(const u32* words) { return load_words(words); }
};
template <>
struct CodeUnit<4> {
  static constexpr int WORDS = 1, QUADS = 2;
  template <int N>
  static AE_INLINE VecU quad(const u32* words) { return (load_words(words) >> (4 * N)) & 0x0f0f0f0fu; }
};
template <>
struct CodeUnit<2> {
  static constexpr int WORDS = 1, QUADS = 4;
  template <int N>
  static AE_INLINE VecU quad(const u32* words) { return (load_words(words) >> (2 * N)) & 0x03030303u; }
};
template <>
struct CodeUnit<6> {
  static constexpr int WORDS = 3, QUADS = 4;
  template <int N>
  static AE_INLINE VecU quad(const u32* words) {
    const VecU high = load_words(words + 2 * PANEL), shifted = N < 2 ? high << (4 - 2 * N) : high >> (2 * N - 4);
    return CodeUnit<4>::quad<N % 2>(words + N / 2 * PANEL) | (shifted & 0x30303030u);
  }
};

// A Dot unpacks the words of a matrix: a unit of WORDS words, PANEL apart, has STEPS steps.

// Bytes as the steps of a Step.
template <class Step, int STEP>
AE_INLINE VecU step_of_bytes(VecU bytes) {
  if constexpr (Step::X_PER_STEP == 4) {
#if defined(__ARM_FEATURE_DOTPROD)
    if (std::is_same_v<Step, ByteStep>) return bytes ^ 0x80808080u;
#endif
    return bytes;
  }
  return (bytes >> (8 * STEP)) & 0x00ff00ffu;
}

// Codes as bytes, in the steps of `Step`.
template <int BITS, class Step>
struct ByteCodes {
  static constexpr int WORDS = CodeUnit<BITS>::WORDS, PER_QUAD = 4 / Step::X_PER_STEP, STEPS = CodeUnit<BITS>::QUADS * PER_QUAD;
};

struct ByteDot : ByteStep, ByteCodes<8, ByteStep> {
  using ByteStep::ByteStep;
  using Step = ByteStep;
  template <int STEP>
  AE_INLINE VecU weights(const u32* words) const { return step_of_bytes<ByteStep, STEP>(load_words(words)); }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Eight codes below 64 with int8: sums of pairs of products are at most 63 * 127 * 4 with those of the other four.
struct OctetStep : QuantisedStep<Int8Values> {
  using QuantisedStep::QuantisedStep;
  struct W {
    VecU low, high;
  };
  static constexpr int X_PER_STEP = 8;
  static AE_INLINE W activations(const X* x) {
    u32 low, high;  // loaded by themselves, and so broadcast from memory
    memcpy(&low, x, sizeof low);
    memcpy(&high, x + sizeof low, sizeof high);
    return {splat_word(low), splat_word(high)};
  }
  static AE_INLINE VecI multiply_add(VecI sum, const W& x, const W& w) {
#if defined(__AVX512BW__)
    const __m512i low = _mm512_maddubs_epi16((__m512i)w.low, (__m512i)x.low), high = _mm512_maddubs_epi16((__m512i)w.high, (__m512i)x.high);
    return sum + (VecI)_mm512_madd_epi16(_mm512_add_epi16(low, high), _mm512_set1_epi16(1));
#else
    const __m256i low = _mm256_maddubs_epi16((__m256i)w.low, (__m256i)x.low), high = _mm256_maddubs_epi16((__m256i)w.high, (__m256i)x.high);
    return sum + (VecI)_mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
#endif
  }
};

// Integers of fewer than 8 bits.
template <int BITS>
struct FewBitsDot : OctetStep {
  using OctetStep::OctetStep;
  using Step = OctetStep;
  static constexpr int WORDS = CodeUnit<BITS>::WORDS, STEPS = CodeUnit<BITS>::QUADS / 2;
  template <int STEP>
  AE_INLINE W weights(const u32* words) const {
    return {CodeUnit<BITS>::template quad<2 * STEP>(words), CodeUnit<BITS>::template quad<2 * STEP + 1>(words)};
  }
};
#else
template <int BITS>
struct FewBitsDot : FewBitsStep, ByteCodes<BITS, FewBitsStep> {
  using FewBitsStep::FewBitsStep;
  using Step = FewBitsStep;
  using ByteCodes<BITS, Step>::PER_QUAD;
  template <int STEP>
  AE_INLINE VecU weights(const u32* words) const {
    return step_of_bytes<Step, STEP % PER_QUAD>(CodeUnit<BITS>::template quad<STEP / PER_QUAD>(words));
  }
};
#endif

// Codes of 4 bits with a table of bytes.
struct TableInt4Dot : ByteStep, ByteCodes<4, ByteStep> {
  using Step = ByteStep;
  template <int STEP>
  AE_INLINE VecU weights(const u32* words) const {
    return step_of_bytes<Step, STEP % PER_QUAD>(look_up(CodeUnit<4>::quad<STEP / PER_QUAD>(words)));
  }
  AE_INLINE VecU look_up(VecU codes) const {
#if defined(__AVX512BW__)
    return (VecU)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)codes);
#elif defined(__AVX2__)
    return (VecU)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)codes);
#elif defined(__aarch64__)
    return (VecU)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
    u8 bytes[4 * LANES];
    memcpy(bytes, &codes, sizeof bytes);
    for (u8& byte : bytes) byte = table[byte];
    return load_as<VecU>(bytes);
#endif
  }
  explicit TableInt4Dot(const PackedLinear& w) : ByteStep(w), table(static_cast<const u8*>(w.table)) {}
  const u8* table;
};

// Codes of 4 bits as numbers.
struct WideInt4Dot : FloatStep {
  using Step = FloatStep;
  static constexpr int WORDS = 1, STEPS = 8;
  template <int STEP>
  AE_INLINE VecF weights(const u32* words) const {
    const VecU codes = load_words(words) >> (8 * (STEP % 4) + 4 * (STEP / 4));
#if defined(__AVX512F__)
    return (VecF)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)codes);
    return (VecF)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#elif defined(__aarch64__)
    const VecU places = (codes & 15u) * 0x04040404u + 0x03020100u;  // of the bytes of each number
    return (VecF)vqtbl4q_u8(vld1q_u8_x4(reinterpret_cast<const u8*>(table)), (uint8x16_t)places);
#else
    VecF numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = table[codes[i] & 15u];
    return numbers;
#endif
  }
  explicit WideInt4Dot(const PackedLinear& w) : FloatStep(w), table(static_cast<const float*>(w.table)) {}
  const float* table;
};

struct WideByteDot : FloatStep {
  using Step = FloatStep;
  static constexpr int WORDS = 1, STEPS = 4;
  template <int STEP>
  AE_INLINE VecF weights(const u32* words) const {
    return __builtin_convertvector((VecI)((load_words(words) >> (8 * STEP)) & 0xffu) - zero, VecF);
  }
  explicit WideByteDot(const PackedLinear& w) : FloatStep(w), zero(w.zero) {}
  i32 zero;
};

// e4m3fn has the sign, 4 bits of exponent with a bias of 7 and 3 of mantissa, and no infinities.
struct Float8Dot : FloatStep {
  using FloatStep::FloatStep;
  using Step = FloatStep;
  static constexpr int WORDS = 1, STEPS = 4;
  template <int STEP>
  AE_INLINE VecF weights(const u32* words) const {
    const VecI at_top = (VecI)(load_words(words) << (24 - 8 * STEP));
    return (VecF)((VecU)(at_top >> 4) & 0x87f00000u) * 0x1p120f;
  }
};

}  // namespace aengine
