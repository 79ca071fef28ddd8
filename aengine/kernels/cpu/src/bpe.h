// Byte-pair encoding: a vocabulary and its merges, as tokenizer.json writes them, and words to ids. Knows nothing of how a text is cut.
#pragma once

#include "abi.h"

namespace aengine {

// Merges a pair of ids into `id`; of several pairs that of the lowest rank is first.
struct Merge {
  u32 left, right, rank, id;  // rank NO_RANK: a free slot
};

struct Place {
  i64 begin, end;  // begin -1: there is nothing
};

// The beginning of one block of memory that has all of a vocabulary: places are bytes from here on, so it may also be mapped from a file.
struct Bpe {
  u64 magic;
  i64 size;                             // bytes of the block
  i64 text_at, text_size;               // the spellings of all tokens in UTF-8
  i64 spellings_at, num_spellings;      // Place by id, in the text; some ids may be no tokens
  i64 ids_at, num_ids;                  // i32 by a spelling's hash, in the next slot where that one is taken; -1: free
  i64 pairs_at, num_pairs;              // Merge by the hash of left and right, likewise
  i64 neighbours_at, neighbours_words;  // u64, a bit for the hash of two characters: clear if no token has one behind the other
  i64 count;                            // of tokens
  i32 bytes[256];                       // ids of single bytes; -1: it has none, which may be so where words begin as characters
  i32 by_bytes;     // words begin as bytes, not as characters, of which those without a token become bytes
  i32 whole_words;  // a word that is a token is not merged from its parts

  template <class T>
  const T* at(i64 place) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(this) + place);
  }
  template <class T>
  T* at(i64 place) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(this) + place);
  }
  const char* text() const { return at<char>(text_at); }
  const Place* spellings() const { return at<Place>(spellings_at); }
  const i32* ids() const { return at<i32>(ids_at); }
  const Merge* pairs() const { return at<Merge>(pairs_at); }
  const u64* neighbours() const { return at<u64>(neighbours_at); }
};

// Where the values of "vocab" and "merges" in the object "model" of a JSON text begin and end. False: they are not there, or not once.
bool find_bpe(const char* json, i64 size, i64* places);

// Reads {"spelling": id, ..} and ["left right", ..] or [["left", "right"], ..] to a block that `std::free` frees. Null: the texts are
// something else, two tokens have one id, most ids are none of a token, a merge has no ids, bytes have none, or there is no memory.
Bpe* read_bpe(const char* vocab, i64 vocab_size, const char* merges, i64 merges_size, bool by_bytes, bool whole_words);

// Whether memory that begins on a multiple of 8 bytes is such a block, as far as the places of its parts tell.
bool is_bpe(const Bpe* block, i64 size);

// The id of a spelling; -1: it has none.
i32 id_of(const Bpe& bpe, const char* spelling, i64 size);

// The ids of words of a text: [count, 2] places in its characters. A word whose `given` is not -1 stands for that id. `ids` has room for 4 ids
// for each character and one for each given id; the number of ids is returned. -1: a character has no token.
i64 encode_words(const Bpe& bpe, const u32* text, const i32* places, const i32* given, i64 count, i32* ids);

}  // namespace aengine
