// Where the keys and values of a token lie in a layer's pages; see `Pool` for the layouts.
//
// A block is 16 tokens of one KV head as words of 32 bits: keys [key_width / per_word][16], values [16 / per_word][value_dim], where
// per_word is 2 in bf16, 1 in float32 and 4 in int8, in the order 0, 2, 1, 3 (see Int16Dot). So one vector of key words is the same depths
// of LANES tokens, and scores need no horizontal sums; one vector of value words is the same tokens at LANES depths.
#pragma once
#include "simd.h"

namespace aengine {

// `P` is what pages are made of: Bf16, float, or i8, which has scales behind each key.
template <class P>
struct LayerPages {
  P* keys;
  P* values;
  i64 key_stride, value_stride;  // elements from page to page
  i64 kv_heads, key_dim, value_dim, page_size;

  static constexpr i64 PER_WORD = 4 / sizeof(P);
  static constexpr bool QUANTISED = std::is_same_v<P, i8>;

  i64 key_width() const { return key_dim + (QUANTISED ? KV_SCALE_BYTES : 0); }

  bool blocked() const { return page_size % BLOCK == 0; }

  // Where the keys and the values of a head begin in a page.
  P* head_keys(i64 page, i64 head) const { return keys + page * key_stride + head * page_size * key_width(); }
  P* head_values(i64 page, i64 head) const { return values + page * value_stride + head * page_size * value_dim; }

  // The blocks of token `offset` of a page; only where pages are blocked.
  const u32* key_block(i64 page, i64 head, i64 offset) const { return block(head_keys(page, head), offset, key_width()); }
  const u32* value_block(i64 page, i64 head, i64 offset) const { return block(head_values(page, head), offset, value_dim); }

  void put_key(P* block, i64 token, const P* key) const {
    for (i64 i = 0; i < key_width(); i += PER_WORD) {
      u32 word;
      memcpy(&word, key + i, sizeof word);
      if (QUANTISED && i < key_dim) word = (word & 0xff0000ffu) | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u);
      memcpy(block + (i * BLOCK + token * PER_WORD), &word, sizeof word);
    }
  }
  void put_value(P* block, i64 token, const P* value) const {
    const i64 number = token % PER_WORD, at = QUANTISED && (number == 1 || number == 2) ? 3 - number : number;
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
    if (begin > first) memset(static_cast<void*>(value_blocks), 0, (size_t)(BLOCK * value_dim) * sizeof(P));
    for (i64 token = begin; token < end; token++) {
      const i64 page = pages[token / page_size], offset = token % page_size, to = (token - first) / BLOCK * BLOCK;
      put_key(key_blocks + to * key_width(), token % BLOCK, head_keys(page, head) + offset * key_width());
      put_value(value_blocks + to * value_dim, token % BLOCK, head_values(page, head) + offset * value_dim);
    }
  }

 private:
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
          pool.value_page_bytes / size, op.kv_heads, key_dim, value_dim, pool.page_size};
}

// Calls `f` with a layer's pages in the pool of a model of `E`.
template <class E, class F>
AE_INLINE void with_pages(const Pool& pool, const AttentionOp& op, F&& f) {
  pool.element == INT8 ? f(layer_pages<i8>(pool, op)) : f(layer_pages<E>(pool, op));
}

}  // namespace aengine
