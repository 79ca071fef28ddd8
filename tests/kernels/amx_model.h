// The instructions of AMX on arrays, as Intel's manual defines them, to test what uses them on any CPU. Of this thread, as the tiles are.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

struct AmxModel {
  uint8_t bytes[8][16][64];
  uint8_t rows[8];
  uint16_t row_bytes[8];
  bool configured;
};
inline thread_local AmxModel amx_model;

inline void amx_check(bool fits) {
  if (!fits) abort();  // a CPU raises an exception
}

inline void amx_configure(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  memset(&amx_model, 0, sizeof amx_model);
  amx_check(bytes[0] == 1 && bytes[1] == 0);
  for (int tile = 0; tile < 8; tile++) {
    memcpy(&amx_model.row_bytes[tile], bytes + 16 + 2 * tile, 2);
    amx_model.rows[tile] = bytes[48 + tile];
    amx_check(amx_model.row_bytes[tile] <= 64 && amx_model.rows[tile] <= 16);
  }
  amx_model.configured = true;
}

inline void amx_load(int tile, const void* base, long stride) {
  amx_check(amx_model.configured);
  memset(amx_model.bytes[tile], 0, sizeof amx_model.bytes[tile]);
  for (int row = 0; row < amx_model.rows[tile]; row++) {
    memcpy(amx_model.bytes[tile][row], static_cast<const char*>(base) + row * stride, amx_model.row_bytes[tile]);
  }
}

inline void amx_store(int tile, void* base, long stride) {
  amx_check(amx_model.configured);
  for (int row = 0; row < amx_model.rows[tile]; row++) {
    memcpy(static_cast<char*>(base) + row * stride, amx_model.bytes[tile][row], amx_model.row_bytes[tile]);
  }
}

inline float amx_bf16(const uint8_t* bytes) {
  uint16_t half;
  memcpy(&half, bytes, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return std::fpclassify(wide) == FP_SUBNORMAL ? 0.f : wide;
}

template <class Sum, class Multiply>
void amx_multiply(int sums, int x, int weights, Multiply multiply) {
  AmxModel& m = amx_model;
  amx_check(m.configured && m.rows[sums] == m.rows[x] && m.row_bytes[sums] == m.row_bytes[weights] && m.row_bytes[x] == 4 * m.rows[weights]);
  for (int row = 0; row < m.rows[sums]; row++) {
    for (int column = 0; column < m.row_bytes[sums] / 4; column++) {
      Sum sum;
      memcpy(&sum, m.bytes[sums][row] + 4 * column, 4);
      sum = multiply(sum, m.bytes[x][row], [&](int word) { return m.bytes[weights][word] + 4 * column; }, m.rows[weights]);
      memcpy(m.bytes[sums][row] + 4 * column, &sum, 4);
    }
  }
}

inline void amx_multiply_bf16(int sums, int x, int weights) {
  amx_multiply<float>(sums, x, weights, [](float sum, const uint8_t* row, auto word_of, int words) {
    float even = 0, odd = 0;
    for (int word = 0; word < words; word++) {
      even = std::fma(amx_bf16(row + 4 * word), amx_bf16(word_of(word)), even);
      odd = std::fma(amx_bf16(row + 4 * word + 2), amx_bf16(word_of(word) + 2), odd);
    }
    return sum + (even + odd);
  });
}

template <class X, class Weight>
void amx_multiply_int8(int sums, int x, int weights) {
  amx_multiply<int32_t>(sums, x, weights, [](int32_t sum, const uint8_t* row, auto word_of, int words) {
    for (int word = 0; word < words; word++) {
      for (int i = 0; i < 4; i++) sum += (int32_t)(X)row[4 * word + i] * (Weight)word_of(word)[i];
    }
    return sum;
  });
}

inline void amx_zero(int tile) {
  amx_check(amx_model.configured);
  memset(amx_model.bytes[tile], 0, sizeof amx_model.bytes[tile]);
}

inline void amx_release() { memset(&amx_model, 0, sizeof amx_model); }

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_dpbsud
#undef _tile_zero
#define _tile_loadconfig amx_configure
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_dpbf16ps amx_multiply_bf16
#define _tile_dpbusd amx_multiply_int8<uint8_t, int8_t>
#define _tile_dpbsud amx_multiply_int8<int8_t, uint8_t>
#define _tile_zero amx_zero
#define _tile_release amx_release
