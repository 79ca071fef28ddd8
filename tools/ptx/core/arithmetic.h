// What an instruction computes of registers alone, for the types and forms that kernels use most: the rest is `tools/ptx/arithmetic.py`'s.
#pragma once

#include "numbers.h"

// As in `encoding.py`. Those up to FALLBACK compute a result of registers alone.
enum Code : int32_t {
    MOV, ADD, SUB, MUL, MUL_WIDE, MAD, MAD_WIDE, FMA, NEG, ABS, MIN, MAX, DIV, REM, RCP, SQRT, RSQRT, EX2, LG2,
    AND, OR, XOR, NOT, SHL, SHR, SETP, SELP, PRMT, LOP3, MUL_HI, BFI, BFE, POPC, CLZ, BREV, CVT,
    FALLBACK, BRA, EXIT, BARRIER, NOTHING, FENCE, PACK, UNPACK, LOAD, STORE, PARAM, COPY, COMMIT, WAIT, MMA, WGMMA, WGMMA_COMMIT, WGMMA_WAIT,
    ATOMIC, SHUFFLE, VOTE, LDMATRIX, STMATRIX,
};
enum Test : int32_t { EQ, NE, LT, LE, GT, GE };
enum Flags : int32_t { FTZ = 1, NAN_SPREADS = 2, UNORDERED = 4, TOWARDS_ZERO = 8, WITH_AND = 16, WITH_OR = 32, WITH_XOR = 64, PAIR = 128 };

struct Op {
    int32_t code, kind, source_kind, flags, extra, guard, negated, first, count;
    int64_t offset;
};

template <class T>
inline bool holds(int test, T x, T y) {
    switch (test) {
        case EQ: return x == y;
        case NE: return x != y;
        case LT: return x < y;
        case LE: return x <= y;
        case GT: return x > y;
        default: return x >= y;
    }
}

inline float least(float x, float y, bool spreads) {
    if (std::isnan(x) || std::isnan(y)) return spreads || (std::isnan(x) && std::isnan(y)) ? NAN : std::isnan(x) ? y : x;
    if (x == 0 && y == 0) return std::signbit(x) || std::signbit(y) ? -0.0f : 0.0f;
    return x < y ? x : y;
}
inline float most(float x, float y, bool spreads) { return -least(-x, -y, spreads); }

inline Bits permuted(Bits x, Bits y, Bits selectors) {
    Bits both = (x & 0xFFFFFFFF) | y << 32, out = 0;
    for (int at = 0; at < 4; at++) {
        Bits selector = selectors >> (4 * at) & 15, byte = both >> (8 * (selector & 7)) & 255;
        if (selector & 8) byte = (byte >> 7) * 255;
        out |= byte << (8 * at);
    }
    return out;
}
inline Bits logic(Bits x, Bits y, Bits z, Bits table) {
    Bits out = 0;
    for (int combination = 0; combination < 8; combination++)
        if (table >> combination & 1) out |= (combination & 4 ? x : ~x) & (combination & 2 ? y : ~y) & (combination & 1 ? z : ~z);
    return out & 0xFFFFFFFF;
}

inline Bits inserted(Bits what, Bits into, Bits at, Bits count, int bits) {
    at &= 255, count &= 255;
    if (at >= Bits(bits)) return into;
    Bits covered = mask_of(std::min<int>(count, bits - at)) << at;
    return (into & ~covered) | (what << at & covered);
}

inline Bits extracted(Bits from, Bits at, Bits count, int bits, bool with_sign) {
    at &= 255, count &= 255;
    if (!count) return 0;
    const Bits field = mask_of(std::min<int>(count, 64));
    Bits shifted = with_sign ? Bits(int64_t(from) >> std::min<Bits>(at, bits - 1)) : at >= Bits(bits) ? 0 : from >> at;
    const bool negative = with_sign && (from >> std::min<Bits>(at + count - 1, bits - 1) & 1);
    return negative ? shifted | ~field : shifted & field;
}
inline Bits counted(int code, Bits x, int bits) {
    if (code == POPC) return __builtin_popcountll(x);
    if (code == CLZ) return x ? __builtin_clzll(x) - (64 - bits) : bits;
    Bits out = 0;
    for (int at = 0; at < bits; at++) out |= (x >> at & 1) << (bits - 1 - at);
    return out;
}

// a * b + c of numbers whose products are exact in float64, rounded to odd: a second rounding is then that of the exact number.
inline double fused(double a, double b, double c) {
    const double product = a * b, total = product + c, back = total - product;
    const double error = (product - (total - back)) + (c - back);
    auto bits = cast<int64_t>(total);
    if (!std::isfinite(total) || !(error != 0) || (bits & 1)) return total;
    return cast<double>(bits + ((error > 0) == (total > 0) ? 1 : -1));
}
inline double summed(int code, double a, double b, double c) {
    switch (code) {
        case ADD: return fused(a, 1, b);
        case SUB: return fused(a, 1, -b);
        case MUL: return a * b;
        default: return fused(a, b, c);
    }
}
inline Bits f64_bits(double x) { return std::isnan(x) ? 0x7FF8000000000000 : cast<Bits>(x); }

inline Bits to_integer(double x, int kind) {
    int bits = bits_of(kind);
    bool with_sign = is_signed(kind);
    if (std::isnan(x)) return 0;
    double below = with_sign ? -std::ldexp(1.0, bits - 1) : 0.0, beyond = std::ldexp(1.0, with_sign ? bits - 1 : bits);
    Bits last = with_sign ? mask_of(bits - 1) : mask_of(bits), first = with_sign ? ~mask_of(bits - 1) : 0;
    if (x >= beyond) return last;
    if (x < below) return first;
    return cut(with_sign ? Bits(int64_t(x)) : Bits(x), bits, with_sign);
}

// Calls `f(lane)` for the result of each lane, of which those that are doing get it: all, if `doing` is null.
template <class F>
inline void each(Bits* to, Bits mask, const uint8_t* doing, int lanes, F f) {
    if (!doing) {
#pragma GCC ivdep
        for (int lane = 0; lane < lanes; lane++) to[lane] = f(lane) & mask;
        return;
    }
    for (int lane = 0; lane < lanes; lane++)
        if (doing[lane]) to[lane] = f(lane) & mask;
}

// One of the codes before FALLBACK. `x`: the operands; a predicate result has the mask 1.
inline void compute(const Op& op, Bits* to, Bits mask, const Bits* const* x, const uint8_t* doing, int lanes) {
    const Bits *a = x[0], *b = x[1], *c = x[2];
    const int kind = op.kind, bits = bits_of(kind);
    const bool with_sign = is_signed(kind), ftz = op.flags & FTZ;
    auto lane_by_lane = [&](auto f) { each(to, mask, doing, lanes, f); };
    auto in = [&](Bits number) { return ftz ? flushed(f32(number)) : f32(number); };
    auto out = [&](float number) { return f32_bits(ftz ? flushed(number) : number); };
    auto signed_cut = [&](Bits number) { return cut(number, bits, with_sign); };
    if (kind == F32 && op.code < AND) {
        switch (op.code) {
            case ADD: return lane_by_lane([&](int i) { return out(in(a[i]) + in(b[i])); });
            case SUB: return lane_by_lane([&](int i) { return out(in(a[i]) - in(b[i])); });
            case MUL: return lane_by_lane([&](int i) { return out(in(a[i]) * in(b[i])); });
            case FMA: return lane_by_lane([&](int i) { return out(std::fma(in(a[i]), in(b[i]), in(c[i]))); });
            case MIN: return lane_by_lane([&](int i) { return f32_bits(least(in(a[i]), in(b[i]), op.flags & NAN_SPREADS)); });
            case MAX: return lane_by_lane([&](int i) { return f32_bits(most(in(a[i]), in(b[i]), op.flags & NAN_SPREADS)); });
            case NEG: return lane_by_lane([&](int i) { return ftz ? out(-in(a[i])) : (a[i] ^ 0x80000000u); });
            case ABS: return lane_by_lane([&](int i) { return ftz ? out(std::fabs(in(a[i]))) : (a[i] & 0x7FFFFFFFu); });
            case DIV: return lane_by_lane([&](int i) { return out(in(a[i]) / in(b[i])); });
            case RCP: return lane_by_lane([&](int i) { return out(1.0f / in(a[i])); });
            case SQRT: return lane_by_lane([&](int i) { return out(std::sqrt(in(a[i]))); });
            case RSQRT: return lane_by_lane([&](int i) { return out(float(1.0 / std::sqrt(double(in(a[i]))))); });
            case EX2: return lane_by_lane([&](int i) { return out(float(std::exp2(double(in(a[i]))))); });
            case LG2: return lane_by_lane([&](int i) { return out(float(std::log2(double(in(a[i]))))); });
            default: break;
        }
    }
    if ((kind == BF16 || kind == F16) && (op.code == ADD || op.code == SUB || op.code == MUL || op.code == FMA)) {
        auto half = [&](int i, int at) {
            auto value = [&](const Bits* of) { return of ? double(value_of(of[i] >> at & 0xFFFF, kind)) : 0.0; };
            const double sum = summed(op.code, value(a), value(b), value(op.code == FMA ? c : nullptr));
            return kind == BF16 ? bf16_bits(sum) : f16_bits(sum);
        };
        if (op.flags & PAIR) return lane_by_lane([&](int i) { return half(i, 0) | half(i, 16) << 16; });
        return lane_by_lane([&](int i) { return half(i, 0); });
    }
    if (kind == F64) {
        auto wide = [](Bits x) { return cast<double>(x); };
        switch (op.code) {
            case ADD: return lane_by_lane([&](int i) { return f64_bits(wide(a[i]) + wide(b[i])); });
            case SUB: return lane_by_lane([&](int i) { return f64_bits(wide(a[i]) - wide(b[i])); });
            case MUL: return lane_by_lane([&](int i) { return f64_bits(wide(a[i]) * wide(b[i])); });
            default: break;
        }
    }
    switch (op.code) {
        case MOV: return lane_by_lane([&](int i) { return signed_cut(a[i]); });
        case ADD: return lane_by_lane([&](int i) { return a[i] + b[i]; });
        case SUB: return lane_by_lane([&](int i) { return a[i] - b[i]; });
        case MUL: return lane_by_lane([&](int i) { return a[i] * b[i]; });
        case MUL_WIDE: return lane_by_lane([&](int i) { return signed_cut(a[i]) * signed_cut(b[i]); });
        case MAD: return lane_by_lane([&](int i) { return a[i] * b[i] + c[i]; });
        case MAD_WIDE: return lane_by_lane([&](int i) { return signed_cut(a[i]) * signed_cut(b[i]) + c[i]; });
        case NEG: return lane_by_lane([&](int i) { return Bits(0) - a[i]; });
        case ABS: return lane_by_lane([&](int i) { return Bits(std::llabs(int64_t(signed_cut(a[i])))); });
        case MIN:
        case MAX:
            return lane_by_lane([&](int i) {
                Bits p = signed_cut(a[i]), q = signed_cut(b[i]);
                bool below = with_sign ? int64_t(p) < int64_t(q) : p < q;
                return below == (op.code == MIN) ? p : q;
            });
        case DIV:
        case REM:
            return lane_by_lane([&](int i) {
                Bits p = signed_cut(a[i]), q = signed_cut(b[i]);
                if (!q) return op.code == DIV ? ~Bits(0) : p;
                if (!with_sign) return op.code == DIV ? p / q : p % q;
                if (q == ~Bits(0)) return op.code == DIV ? Bits(0) - p : Bits(0);
                return Bits(op.code == DIV ? int64_t(p) / int64_t(q) : int64_t(p) % int64_t(q));
            });
        case AND: return lane_by_lane([&](int i) { return a[i] & b[i]; });
        case OR: return lane_by_lane([&](int i) { return a[i] | b[i]; });
        case XOR: return lane_by_lane([&](int i) { return a[i] ^ b[i]; });
        case NOT: return lane_by_lane([&](int i) { return ~a[i]; });
        case SHL:
            return lane_by_lane([&](int i) { Bits by = b[i] & 0xFFFFFFFF; return by >= Bits(bits) ? 0 : cut(a[i], bits, false) << by; });
        case SHR:
            return lane_by_lane([&](int i) {
                Bits by = b[i] & 0xFFFFFFFF;
                if (with_sign) return Bits(int64_t(signed_cut(a[i])) >> std::min<Bits>(by, bits - 1));
                return by >= Bits(bits) ? 0 : cut(a[i], bits, false) >> by;
            });
        case SELP: return lane_by_lane([&](int i) { return c[i] & 1 ? a[i] : b[i]; });
        case PRMT: return lane_by_lane([&](int i) { return permuted(a[i], b[i], c[i]); });
        case LOP3: return lane_by_lane([&](int i) { return logic(a[i], b[i], c[i], x[3][i]); });
        case BFE: return lane_by_lane([&](int i) { return extracted(signed_cut(a[i]), b[i], c[i], bits, with_sign); });
        case POPC:
        case CLZ:
        case BREV: return lane_by_lane([&](int i) { return counted(op.code, cut(a[i], bits, false), bits); });
        case BFI: return lane_by_lane([&](int i) { return inserted(a[i], b[i], c[i], x[3][i], bits); });
        case MUL_HI:
            return lane_by_lane([&](int i) {
                Bits p = signed_cut(a[i]), q = signed_cut(b[i]);
                return Bits(with_sign ? (__int128(int64_t(p)) * int64_t(q)) >> bits : ((unsigned __int128)(p) * q) >> bits);
            });
        case SETP:
            return lane_by_lane([&](int i) {
                bool found;
                if (kind == F32) {
                    float p = in(a[i]), q = in(b[i]);
                    bool unordered = std::isnan(p) || std::isnan(q);
                    found = unordered ? bool(op.flags & UNORDERED) : holds(op.extra, p, q);
                } else {
                    Bits p = signed_cut(a[i]), q = signed_cut(b[i]);
                    found = with_sign ? holds(op.extra, int64_t(p), int64_t(q)) : holds(op.extra, p, q);
                }
                if (op.flags & WITH_AND) found = found && (c[i] & 1);
                if (op.flags & WITH_OR) found = found || (c[i] & 1);
                if (op.flags & WITH_XOR) found = found != bool(c[i] & 1);
                return Bits(found);
            });
        case CVT: break;
    }
    // CVT: `kind` is what it becomes, `extra` how a float is made whole (0: not, 1: nearest, 2: towards zero, 3: down, 4: up)
    const int from = op.source_kind, source_bits = bits_of(from);
    if (kind == F64) return lane_by_lane([&](int i) { return f64_bits(ftz ? flushed(f32(a[i])) : f32(a[i])); });
    if (from == F64) {
        return lane_by_lane([&](int i) {
            const double number = cast<double>(a[i]);
            return out(float(ftz && std::fabs(number) < 0x1p-126 ? std::copysign(0.0, number) : number));
        });
    }
    const bool rz = op.flags & TOWARDS_ZERO, from_float = from == F32 || from == BF16 || from == F16;
    auto whole = [&](double number) {
        switch (op.extra) {
            case 1: return std::nearbyint(number);
            case 2: return std::trunc(number);
            case 3: return std::floor(number);
            case 4: return std::ceil(number);
            default: return number;
        }
    };
    auto made = [&](double number) -> Bits {
        switch (kind) {
            case F32: return out(float(number));
            case BF16: return bf16_bits(number, rz);
            case F16: return f16_bits(number);
            default: return to_integer(op.extra ? number : std::trunc(number), kind);
        }
    };
    if (op.flags & PAIR) {  // of two numbers of 16 bits, the upper one first
        lane_by_lane([&](int i) { return made(value_of(b[i], from)) | made(value_of(a[i], from)) << 16; });
    } else if (from_float) {
        lane_by_lane([&](int i) {
            float number = value_of(a[i], from);
            return made(whole(ftz ? flushed(number) : number));
        });
    } else if (kind == F32) {
        if (is_signed(from)) lane_by_lane([&](int i) { return f32_bits(float(int64_t(cut(a[i], source_bits, true)))); });
        else lane_by_lane([&](int i) { return f32_bits(float(cut(a[i], source_bits, false))); });
    } else if (kind == BF16 || kind == F16) {
        lane_by_lane([&](int i) {
            Bits number = cut(a[i], source_bits, is_signed(from));
            return made(is_signed(from) ? double(int64_t(number)) : double(number));
        });
    } else {
        lane_by_lane([&](int i) { return cut(cut(a[i], source_bits, is_signed(from)), bits, with_sign); });
    }
}
