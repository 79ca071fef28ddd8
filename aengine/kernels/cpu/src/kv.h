// Where the keys and values of a token lie in a layer's pages; see `Pool` for the layouts.
//
// A block is 16 tokens of one KV head as words of 32 bits: keys [key_width / per_word][16], values [16 / per_word][value_dim], where
// per_word is 2 in bf16, 1 in float32 and 4 in int8, in the order 0, 2, 1, 3 (see Int16Dot). So one vector of key words is the same depths
// of LANES tokens, and scores need no horizontal sums; one vector of value words is the same tokens at LANES depths.
#pragma once
#include "simd.h"

namespace aengine {

constexpr i64 MAX_KEY_DIM = 576, MAX_VALUE_DIM = 512;  // of a head

// `P` is what pages are made of: Bf16, float, or i8, which has scales behind each key. Pages of 4 bits are bytes with two integers; they are
// read as blocks of int8.
template <class P>
struct LayerPages {
  P* keys;
  P* values;
  i64 key_stride, value_stride;  // elements from page to page
  i64 kv_heads, key_dim, value_dim, page_size;
  bool halves;  // whether a byte has two integers

  static constexpr i64 PER_WORD = 4 / sizeof(P);
  static constexpr bool QUANTISED = std::is_same_v<P, i8>;

  static constexpr i64 ORDER[] = {0, 2, 1, 3};  // of the bytes of a word of int8

  i64 key_width() const { return key_dim + (QUANTISED ? KV_SCALE_BYTES : 0); }

  // How wide they are in the pages.
  i64 stored_key() const { return (halves ? key_dim / 2 : key_dim) + (QUANTISED ? KV_SCALE_BYTES : 0); }
  i64 stored_value() const { return halves ? value_dim / 2 : value_dim; }

  // Whether the pages are made of blocks, and whether these are as they are multiplied.
  bool has_blocks() const { return page_size % BLOCK == 0; }
  bool blocked() const { return has_blocks() && !halves; }

  // Where the keys and the values of a head begin in a page.
  P* head_keys(i64 page, i64 head) const { return keys + page * key_stride + head * page_size * stored_key(); }
  P* head_values(i64 page, i64 head) const { return values + page * value_stride + head * page_size * stored_value(); }

  // The blocks of token `offset` of a page; only where pages have blocks.
  const u32* key_block(i64 page, i64 head, i64 offset) const { return block(head_keys(page, head), offset, stored_key()); }
  const u32* value_block(i64 page, i64 head, i64 offset) const { return block(head_values(page, head), offset, stored_value()); }

  void put_key(P* block, i64 token, const P* key) const {
    for (i64 i = 0; i < key_width(); i += PER_WORD) {
      u32 word;
      memcpy(&word, key + i, sizeof word);
      if (QUANTISED && i < key_dim) word = (word & 0xff0000ffu) | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u);
      memcpy(block + (i * BLOCK + token * PER_WORD), &word, sizeof word);
    }
  }
  void put_value(P* block, i64 token, const P* value) const {
    const i64 number = token % PER_WORD, at = QUANTISED ? ORDER[number] : number;
    P* first = block + token / PER_WORD * value_dim * PER_WORD + at;
    for (i64 i = 0; i < value_dim; i++) first[i * PER_WORD] = value[i];
  }

  // Of the 16 tokens of a key block: the scales of their keys, and those of their values.
  const float* key_scales(const u32* block) const { return reinterpret_cast<const float*>(block + key_dim / PER_WORD * BLOCK); }
  const float* value_scales(const u32* block) const { return key_scales(block) + BLOCK; }

  // Stores one head's key, with its scales, and value of a token at slot = page * page_size + offset.
  void write(i64 slot, i64 head, const P* key, const P* value) const {
    const i64 page = slot / page_size, offset = slot % page_size;
    P *key_page = head_keys(page, head), *value_page = head_values(page, head);
    if constexpr (QUANTISED) {
      if (halves) return write_halves(key_page, value_page, offset, key, value);
    }
    if (blocked()) {
      const i64 first = offset / BLOCK * BLOCK;
      put_key(key_page + first * key_width(), offset % BLOCK, key);
      put_value(value_page + first * value_dim, offset % BLOCK, value);
    } else {
      memcpy(key_page + offset * key_width(), key, (size_t)key_width() * sizeof(P));
      memcpy(value_page + offset * value_dim, value, (size_t)value_dim * sizeof(P));
    }
  }

  // Makes blocks out of pages that are not blocked: those of tokens first .. end of a sequence, first being a multiple of 16. Tokens
  // before `begin`, which is in the first block, have values of zero; all else that is not a token of begin .. end is left as it is.
  void gather(const i32* pages, i64 head, i64 first, i64 begin, i64 end, P* key_blocks, P* value_blocks) const {
    if constexpr (QUANTISED) {
      if (halves) return gather_halves(pages, head, first, begin, end, key_blocks, value_blocks);
    }
    if (begin > first) memset(static_cast<void*>(value_blocks), 0, (size_t)(BLOCK * value_dim) * sizeof(P));
    for (i64 token = begin; token < end; token++) {
      const i64 page = pages[token / page_size], offset = token % page_size, to = (token - first) / BLOCK * BLOCK;
      put_key(key_blocks + to * key_width(), token % BLOCK, head_keys(page, head) + offset * key_width());
      put_value(value_blocks + to * value_dim, token % BLOCK, head_values(page, head) + offset * value_dim);
    }
  }

 private:
  static i8 joined(i8 low, i8 high) { return (i8)((low + 8) | (high + 8) << 4); }

  // Bytes of two integers each, a multiple of 8 -> those of the lower halves, and those of the upper ones.
  AE_INLINE static void split(const i8* from, i64 count, i8* low, i8* high) {
    const auto split_some = [&](i64 i, auto bytes) __attribute__((always_inline)) {
      using Bytes = decltype(bytes);
      memcpy(&bytes, from + i, sizeof bytes);
      const Bytes lower = (bytes & 15) - 8, upper = (bytes >> 4) - 8;
      memcpy(low + i, &lower, sizeof bytes), memcpy(high + i, &upper, sizeof bytes);
    };
    typedef u8 Bytes8 __attribute__((vector_size(8)));
    typedef u8 Bytes32 __attribute__((vector_size(32)));
    i64 i = 0;
    for (; i + 32 <= count; i += 32) split_some(i, Bytes32{});
    for (; i < count; i += 8) split_some(i, Bytes8{});
  }

  void write_halves(i8* key_page, i8* value_page, i64 offset, const i8* key, const i8* value) const {
    const i64 half = value_dim / 2;
    if (!has_blocks()) {
      i8 *to_key = key_page + offset * stored_key(), *to_value = value_page + offset * half;
      for (i64 i = 0; i < key_dim / 2; i++) to_key[i] = joined(key[i], key[i + key_dim / 2]);
      memcpy(to_key + key_dim / 2, key + key_dim, KV_SCALE_BYTES);
      for (i64 i = 0; i < half; i++) to_value[i] = joined(value[i], value[i + half]);
      return;
    }
    const i64 token = offset % BLOCK, first = offset / BLOCK * BLOCK;
    i8 *keys_of = key_page + first * stored_key(), *values_of = value_page + first * half;
    for (i64 i = 0; i < key_dim; i += 2 * PER_WORD) {
      i8* word = keys_of + (i / 2 * BLOCK + token * PER_WORD);
      for (i64 j = 0; j < PER_WORD; j++) word[j] = joined(key[i + ORDER[j]], key[i + PER_WORD + ORDER[j]]);
    }
    for (i64 i = 0; i < KV_SCALE_BYTES; i += PER_WORD) {
      memcpy(keys_of + ((key_dim / 2 + i) * BLOCK + token * PER_WORD), key + key_dim + i, PER_WORD);
    }
    i8* column = values_of + token / PER_WORD * half * PER_WORD + ORDER[token % PER_WORD];
    for (i64 i = 0; i < half; i++) column[i * PER_WORD] = joined(value[i], value[i + half]);
  }

  void gather_halves(const i32* pages, i64 head, i64 first, i64 begin, i64 end, i8* key_blocks, i8* value_blocks) const {
    if (has_blocks()) {
      for (i64 token = first; token < end; token += BLOCK, key_blocks += BLOCK * key_width(), value_blocks += BLOCK * value_dim) {
        const i64 page = pages[token / page_size], offset = token % page_size;
        const i8 *from_keys = head_keys(page, head) + offset * stored_key(), *from_values = head_values(page, head) + offset * stored_value();
        constexpr i64 WORDS = BLOCK * PER_WORD;
        for (i64 i = 0; i < key_dim / 8; i++) split(from_keys + i * WORDS, WORDS, key_blocks + 2 * i * WORDS, key_blocks + (2 * i + 1) * WORDS);
        memcpy(key_blocks + key_dim * BLOCK, from_keys + key_dim / 2 * BLOCK, KV_SCALE_BYTES * BLOCK);
        const i64 half = value_dim / 2 * PER_WORD;
        for (i64 i = 0; i < BLOCK / PER_WORD; i++) split(from_values + i * half, half, value_blocks + 2 * i * half, value_blocks + (2 * i + 1) * half);
      }
      return;
    }
    alignas(64) i8 wide[MAX_KEY_DIM + KV_SCALE_BYTES];
    const auto widened = [&](const i8* from, i64 dim) {
      split(from, dim / 2, wide, wide + dim / 2);
      return wide;
    };
    for (i64 token = begin; token < end; token++) {
      const i64 page = pages[token / page_size], offset = token % page_size, to = (token - first) / BLOCK * BLOCK;
      const i8* key = head_keys(page, head) + offset * stored_key();
      memcpy(wide + key_dim, key + key_dim / 2, KV_SCALE_BYTES);
      put_key(key_blocks + to * key_width(), token % BLOCK, widened(key, key_dim));
      put_value(value_blocks + to * value_dim, token % BLOCK, widened(head_values(page, head) + offset * stored_value(), value_dim));
    }
  }

  static const u32* block(const P* of_head, i64 offset, i64 dim) { return reinterpret_cast<const u32*>(of_head + offset / BLOCK * BLOCK * dim); }
};

// How wide `dim` elements of a head are in the pages.
inline i64 stored_dim(i64 dim) { return round_up(dim, BLOCK); }

template <class P>
LayerPages<P> layer_pages(const Pool& pool, const AttentionOp& op) {
  const i64 key_dim = stored_dim(op.key_dim), value_dim = stored_dim(op.value_dim), size = (i64)sizeof(P);
  const i64 keys = op.part * op.kv_heads * pool.page_size * pool.key_bytes(key_dim);
  const i64 values = op.part * op.kv_heads * pool.page_size * pool.value_bytes(value_dim);
  u8 *key_pages = static_cast<u8*>(pool.keys[op.place]), *value_pages = static_cast<u8*>(pool.values[op.place]);
  return {reinterpret_cast<P*>(key_pages + keys), reinterpret_cast<P*>(value_pages + values), pool.key_page_bytes / size,
          pool.value_page_bytes / size, op.kv_heads, key_dim, value_dim, pool.page_size, pool.element == INT4};
}

// Calls `f` with a layer's pages in the pool of a model of `E`.
template <class E, class F>
AE_INLINE void with_pages(const Pool& pool, const AttentionOp& op, F&& f) {
  pool.element >= INT8 ? f(layer_pages<i8>(pool, op)) : f(layer_pages<E>(pool, op));
}

}  // namespace aengine
