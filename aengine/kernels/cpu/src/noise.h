// Counter-based noise: the bits of aengine/sampling/draw.py, a hash of (seed, position, token id).
#pragma once
#include "simd.h"

namespace aengine {

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15;  // odd fraction of 2^64

AE_INLINE u64 mix64(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// For a number or a vector of them.
template <class U>
AE_INLINE U mix32(U x) {
  x ^= x >> 16, x *= 0x7feb352du;
  x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Independent for each seed, position and stream.
struct NoiseKey {
  u32 low, high;
  NoiseKey(u64 seed, i32 position, u64 stream) {
    const u64 bits = mix64(mix64(seed + GOLDEN) + ((u64)(i64)position + (stream << 40)) * GOLDEN);
    low = (u32)bits, high = (u32)(bits >> 32);
  }

  // 0 .. 2^31 - 1, of token ids or other small numbers.
  template <class U>
  AE_INLINE U bits(U id) const {
    U x = mix32(id * 0x9e3779b9u) ^ low;
    x *= 0x7feb352du;
    x ^= x >> 15;
    return mix32(x + high) & 0x7fffffffu;
  }

  // In (0, 1).
  AE_INLINE VecF uniform(VecU ids) const { return smaller((__builtin_convertvector((VecI)bits(ids), VecF) + 0.5f) * SCALE, splat(MOST)); }
  float uniform(u32 id) const {
    const float x = ((float)(i32)bits(id) + 0.5f) * SCALE;
    return x < MOST ? x : MOST;
  }

  static constexpr float SCALE = 1.f / 2147483648.f, MOST = 1.f - 1.f / 16777216.f;
};

// Libraries of C have their own last bits on each machine; these functions have the same everywhere.

// log((1 + f) / (1 - f)) of |f| < 0.18, by the series of the inverse hyperbolic tangent.
inline double log_ratio(double f) {
  const double square = f * f;
  double series = 0;
  for (int n = 23; n >= 1; n -= 2) series = series * square + 1. / n;
  return 2 * f * series;
}

// The natural logarithm of a normal number.
inline double natural_log(double x) {
  u64 bits;
  memcpy(&bits, &x, sizeof bits);
  i64 exponent = (i64)(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) m /= 2, exponent++;
  return (double)exponent * 0.6931471805599453 + log_ratio((m - 1) / (m + 1));
}

// e^x of x <= 0; 0 below -700.
inline double natural_exp(double x) {
  if (x < -700) return 0;
  const double n = (double)(i64)(x * 1.4426950408889634 - 0.5);
  const double rest = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;  // log 2 in two parts, the first of 32 bits
  double series = 1;
  for (int k = 13; k >= 1; k--) series = series * rest / k + 1;
  const u64 bits = (u64)((i64)n + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return series * power;
}

// log E of an exponential variable that comes of a uniform one: argmax(score - log E) is a draw from softmax(score).
inline float log_exponential(float uniform) {
  const double u = uniform;
  return (float)natural_log(u < 0.25 ? -log_ratio(-u / (2 - u)) : -natural_log(1 - u));
}

}  // namespace aengine
