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

// log E of an exponential variable that comes of a uniform one: argmax(score - log E) is a draw from softmax(score).
inline float log_exponential(float uniform) { return std::log(-std::log1p(-uniform)); }

}  // namespace aengine
