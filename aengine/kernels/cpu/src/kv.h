// Where the keys and values of a token lie in a layer's pages; see `Pool` for the layouts.
//
// A block is 16 tokens of one KV head as words of 32 bits: keys [key_dim / per_word][16], values [16 / per_word][value_dim], where
// per_word is 2 in bf16 and 1 in float32. So one vector of key words is the same depths of LANES tokens, and scores need no
// horizontal sums; one vector of value words is the same tokens at LANES depths.
#pragma once
#include "simd.h"

namespace aengine {

template <class E>
struct LayerPages {
  E* keys;
  E* values;
  i64 kv_heads, key_dim, value_dim, page_size;

  static constexpr i64 PER_WORD = 4 / sizeof(E);

  bool blocked() const { return page_size % BLOCK == 0; }

  // Where `dim` elements of each token of a head begin in a page.
  i64 head_offset(i64 page, i64 head, i64 dim) const { return (page * kv_heads + head) * page_size * dim; }

  // The blocks of token `offset` of a page; only where pages are blocked.
  const u32* key_block(i64 page, i64 head, i64 offset) const { return block(keys, page, head, offset, key_dim); }
  const u32* value_block(i64 page, i64 head, i64 offset) const { return block(values, page, head, offset, value_dim); }

  void put_key(E* block, i64 token, const E* key) const {
    for (i64 i = 0; i < key_dim; i += PER_WORD) memcpy(block + (i * BLOCK + token * PER_WORD), key + i, 4);
  }
  void put_value(E* block, i64 token, const E* value) const {
    E* first = block + token / PER_WORD * value_dim * PER_WORD + token % PER_WORD;
    for (i64 i = 0; i < value_dim; i++) first[i * PER_WORD] = value[i];
  }

  // Stores one head's key and value of a token at slot = page * page_size + offset.
  void write(i64 slot, i64 head, const E* key, const E* value) const {
    const i64 page = slot / page_size, offset = slot % page_size;
    E *key_page = keys + head_offset(page, head, key_dim), *value_page = values + head_offset(page, head, value_dim);
    if (blocked()) {
      const i64 first = offset / BLOCK * BLOCK;
      put_key(key_page + first * key_dim, offset % BLOCK, key);
      put_value(value_page + first * value_dim, offset % BLOCK, value);
    } else {
      memcpy(key_page + offset * key_dim, key, (size_t)key_dim * sizeof(E));
      memcpy(value_page + offset * value_dim, value, (size_t)value_dim * sizeof(E));
    }
  }

  // Makes blocks out of pages that are not blocked: those of tokens first .. end of a sequence, first being a multiple of 16. Tokens
  // before `begin`, which is in the first block, have values of zero; all else that is not a token of begin .. end is left as it is.
  void gather(const i32* pages, i64 head, i64 first, i64 begin, i64 end, E* key_blocks, E* value_blocks) const {
    if (begin > first) memset(static_cast<void*>(value_blocks), 0, (size_t)(BLOCK * value_dim) * sizeof(E));
    for (i64 token = begin; token < end; token++) {
      const i64 page = pages[token / page_size], offset = token % page_size, to = (token - first) / BLOCK * BLOCK;
      put_key(key_blocks + to * key_dim, token % BLOCK, keys + head_offset(page, head, key_dim) + offset * key_dim);
      put_value(value_blocks + to * value_dim, token % BLOCK, values + head_offset(page, head, value_dim) + offset * value_dim);
    }
  }

 private:
  const u32* block(const E* cache, i64 page, i64 head, i64 offset, i64 dim) const {
    return reinterpret_cast<const u32*>(cache + head_offset(page, head, dim) + offset / BLOCK * BLOCK * dim);
  }
};

template <class E>
LayerPages<E> layer_pages(const Pool& pool, i64 place) {
  E *keys = static_cast<E*>(pool.keys[place]), *values = static_cast<E*>(pool.values[place]);
  return {keys, values, pool.kv_heads, pool.key_dim, pool.value_dim, pool.page_size};
}

}  // namespace aengine
