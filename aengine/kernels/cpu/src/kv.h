// Where the keys and values of a token lie in a layer's pages; see `Pool` for the layouts.
//
// A block is 16 tokens of one KV head as words of 32 bits: keys [head_dim / per_word][16], values [16 / per_word][head_dim], where
// per_word is 2 in bf16 and 1 in float32. So one vector of key words is the same depths of LANES tokens, and scores need no
// horizontal sums; one vector of value words is the same tokens at LANES depths.
#pragma once
#include "simd.h"

namespace aengine {

template <class E>
struct LayerPages {
  E* keys;
  E* values;
  i64 kv_heads, head_dim, page_size;

  static constexpr i64 PER_WORD = 4 / sizeof(E);

  bool blocked() const { return page_size % BLOCK == 0; }
  i64 block_elements() const { return BLOCK * head_dim; }
  i64 block_words() const { return block_elements() / PER_WORD; }
  i64 head_offset(i64 page, i64 head) const { return (page * kv_heads + head) * page_size * head_dim; }

  // The block of token `offset` of a page; only where pages are blocked.
  const u32* block(const E* cache, i64 page, i64 head, i64 offset) const {
    return reinterpret_cast<const u32*>(cache + head_offset(page, head) + offset / BLOCK * block_elements());
  }

  static void put_key(E* block, i64 head_dim, i64 token, const E* key) {
    for (i64 i = 0; i < head_dim; i += PER_WORD) memcpy(block + (i * BLOCK + token * PER_WORD), key + i, 4);
  }
  static void put_value(E* block, i64 head_dim, i64 token, const E* value) {
    E* first = block + token / PER_WORD * head_dim * PER_WORD + token % PER_WORD;
    for (i64 i = 0; i < head_dim; i++) first[i * PER_WORD] = value[i];
  }

  // Stores one head's key and value of a token at slot = page * page_size + offset.
  void write(i64 slot, i64 head, const E* key, const E* value) const {
    const i64 page = slot / page_size, offset = slot % page_size, start = head_offset(page, head);
    if (blocked()) {
      const i64 block = start + offset / BLOCK * block_elements();
      put_key(keys + block, head_dim, offset % BLOCK, key);
      put_value(values + block, head_dim, offset % BLOCK, value);
    } else {
      memcpy(keys + start + offset * head_dim, key, (size_t)head_dim * sizeof(E));
      memcpy(values + start + offset * head_dim, value, (size_t)head_dim * sizeof(E));
    }
  }

  // Makes blocks out of pages that are not blocked: those of tokens first .. end of a sequence, first being a multiple of 16. Tokens
  // before `begin`, which is in the first block, have values of zero; all else that is not a token of begin .. end is left as it is.
  void gather(const i32* pages, i64 head, i64 first, i64 begin, i64 end, E* key_blocks, E* value_blocks) const {
    if (begin > first) memset(static_cast<void*>(value_blocks), 0, (size_t)block_elements() * sizeof(E));
    for (i64 token = begin; token < end; token++) {
      const i64 from = head_offset(pages[token / page_size], head) + token % page_size * head_dim;
      const i64 to = (token - first) / BLOCK * block_elements();
      put_key(key_blocks + to, head_dim, token % BLOCK, keys + from);
      put_value(value_blocks + to, head_dim, token % BLOCK, values + from);
    }
  }
};

template <class E>
LayerPages<E> layer_pages(const Pool& pool, i64 layer) {
  return {static_cast<E*>(pool.keys[layer]), static_cast<E*>(pool.values[layer]), pool.kv_heads, pool.head_dim, pool.page_size};
}

}  // namespace aengine
