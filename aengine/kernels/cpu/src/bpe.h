// Byte-pair encoding: a vocabulary and its merges, as tokenizer.json writes them, and words to ids. Knows nothing of how a text is cut.
#pragma once

#include <vector>

#include "abi.h"

namespace aengine {

// Merges a pair of ids into `id`; of several pairs that of the lowest rank is first.
struct Merge {
  u32 left, right, rank, id;  // rank NO_RANK: a free slot
};

struct Place {
  i64 begin, end;  // begin -1: there is nothing
};

struct Bpe {
  std::vector<char> text;        // the spellings of all tokens in UTF-8
  std::vector<Place> spellings;  // by id, in the text; some ids may be no tokens
  i64 count;                     // of tokens
  std::vector<u64> neighbours;   // a bit for the hash of two characters: clear if no token has one behind the other
  std::vector<i32> ids;      // by a spelling's hash, in the next slot where that one is taken; -1: free
  std::vector<Merge> pairs;  // by the hash of left and right, likewise
  i32 bytes[256];            // ids of single bytes; -1: it has none, which may be so where words begin as characters
  bool by_bytes;             // words begin as bytes, not as characters, of which those without a token become bytes
  bool whole_words;          // a word that is a token is not merged from its parts
};

// Where the values of "vocab" and "merges" in the object "model" of a JSON text begin and end. False: they are not there, or not once.
bool find_bpe(const char* json, i64 size, i64* places);

// Reads {"spelling": id, ..} and ["left right", ..] or [["left", "right"], ..]. False: the texts are something else, two tokens have one
// id, most ids are none of a token, a merge has no ids, or bytes have none.
bool read_bpe(const char* vocab, i64 vocab_size, const char* merges, i64 merges_size, Bpe& bpe);

// The id of a spelling; -1: it has none.
i32 id_of(const Bpe& bpe, const char* spelling, i64 size);

// The ids of words of a text: [count, 2] places in its characters. A word whose `given` is not -1 stands for that id. `ids` has room for 4 ids
// for each character and one for each given id; the number of ids is returned. -1: a character has no token.
i64 encode_words(const Bpe& bpe, const u32* text, const i32* places, const i32* given, i64 count, i32* ids);

}  // namespace aengine
