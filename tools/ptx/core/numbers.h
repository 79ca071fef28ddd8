// Numbers as GPUs have them: bits to values and back. The same as `tools/ptx/numbers.py`, which is the reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using Bits = uint64_t;

// As in `encoding.py`.
enum Kind : int32_t { PRED, B8, U8, S8, B16, U16, S16, F16, BF16, B32, U32, S32, F32, B64, U64, S64, F64, E4M3, E5M2, TF32 };

inline int bits_of(int kind) {
    static const int bits[] = {1, 8, 8, 8, 16, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64, 8, 8, 32};
    return bits[kind];
}
inline bool is_signed(int kind) { return kind == S8 || kind == S16 || kind == S32 || kind == S64; }
inline Bits mask_of(int bits) { return bits >= 64 ? ~Bits(0) : (Bits(1) << bits) - 1; }

// The low bits alone, with the sign in all others if the type has one.
inline Bits cut(Bits x, int bits, bool with_sign) {
    if (bits >= 64) return x;
    return with_sign ? Bits(int64_t(x << (64 - bits)) >> (64 - bits)) : x & mask_of(bits);
}

template <class To, class From>
inline To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float f32(Bits x) { return cast<float>(uint32_t(x)); }
inline Bits f32_bits(float x) { return std::isnan(x) ? 0x7FFFFFFFu : cast<uint32_t>(x); }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// The bits of float32 that are cut off, with the last one set if anything was: a second rounding is then that of the exact number.
inline uint32_t odd_f32(double x) {
    float near = float(x);
    uint32_t bits = cast<uint32_t>(near);
    if (std::fabs(double(near)) > std::fabs(x)) bits -= 1;
    return double(cast<float>(bits)) == x ? bits : bits | 1;
}
inline Bits bf16_bits(double x, bool towards_zero = false) {
    if (std::isnan(x)) return 0x7FFF;
    Bits wide = odd_f32(x);
    Bits half = towards_zero || std::isinf(x) ? 0 : 0x7FFF + ((wide >> 16) & 1);
    return ((wide + half) >> 16) & 0xFFFF;
}
inline float bf16(Bits x) { return cast<float>(uint32_t(x) << 16); }

inline float f16(Bits x) {
    uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = uint32_t(x >> 10) & 31, mantissa = uint32_t(x) & 1023;
    if (exponent == 31) return cast<float>(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    float small = float(mantissa) * 0x1p-24f;
    return sign ? -small : small;
}
inline Bits f16_bits(double x) {
    if (std::isnan(x)) return 0x7FFF;
    Bits sign = std::signbit(x) ? 0x8000 : 0;
    double size = std::fabs(x);
    if (size >= 65520.0) return sign | 0x7C00;
    int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
    double steps = std::nearbyint(std::ldexp(size, 10 - exponent));  // ties to even
    if (size < 0x1p-14) return sign | Bits(steps);
    if (steps == 2048.0) return sign | Bits(exponent + 16) << 10;
    return sign | Bits(exponent + 15) << 10 | (Bits(steps) & 1023);
}

inline float e4m3(Bits x) {
    int exponent = int(x >> 3) & 15, mantissa = int(x) & 7;
    float size = exponent ? std::ldexp(1.0f + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa), -9);
    if ((x & 127) == 127) size = NAN;
    return x & 128 ? -size : size;
}
inline float e5m2(Bits x) {
    int exponent = int(x >> 2) & 31, mantissa = int(x) & 3;
    float size = exponent ? std::ldexp(1.0f + float(mantissa) / 4, exponent - 15) : std::ldexp(float(mantissa), -16);
    if (exponent == 31) size = mantissa ? NAN : INFINITY;
    return x & 128 ? -size : size;
}

// Of the low bits of a number of any floating type but float64, as float32, which holds all of them.
inline float value_of(Bits x, int kind) {
    switch (kind) {
        case BF16: return bf16(x);
        case F16: return f16(x & 0xFFFF);
        case E4M3: return e4m3(x & 255);
        case E5M2: return e5m2(x & 255);
        default: return f32(x);
    }
}
