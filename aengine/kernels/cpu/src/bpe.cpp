// Byte-pair encoding as the `tokenizers` library does it: tokens and merges in hash tables, words merged with a heap.
#include "bpe.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "json.h"

namespace aengine {

namespace {

constexpr u32 NO_RANK = ~0u;
constexpr i32 NEIGHBOUR_BITS = 22;
constexpr u64 MAGIC = 0x3130657062656e65;

u64 mixed(u64 x) {  // splitmix64's finaliser
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

u64 hash_of(const char* text, i64 size) {
  u64 hash = (u64)size;
  for (; size >= 8; text += 8, size -= 8) {
    u64 word;
    std::memcpy(&word, text, 8);
    hash = mixed(hash ^ word);
  }
  u64 last = 0;
  std::memcpy(&last, text, size);
  return mixed(hash ^ last ^ 0x9E3779B97F4A7C15u);
}

// A power of two, of which at most three of four are taken.
i64 slots_for(i64 entries) {
  i64 slots = 16;
  while (slots < entries + entries / 3 + 1) slots *= 2;
  return slots;
}

bool is_spelling(const Bpe& bpe, i64 id, const char* text, i64 size) {
  const Place& place = bpe.spellings()[id];
  return place.begin >= 0 && place.end - place.begin == size && !std::memcmp(bpe.text() + place.begin, text, size);
}

const Merge* find_merge(const Bpe& bpe, u32 left, u32 right) {
  const u64 mask = bpe.num_pairs - 1;
  for (u64 slot = mixed((u64)left << 32 | right) & mask;; slot = (slot + 1) & mask) {
    const Merge& merge = bpe.pairs()[slot];
    if (merge.rank == NO_RANK) return nullptr;
    if (merge.left == left && merge.right == right) return &merge;
  }
}

// The character at the front of valid UTF-8, over which `text` goes.
u32 next_character(const char*& text, const char* end) {
  const u8 first = (u8)*text++;
  const i32 more = first < 0xC0 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
  u32 point = more ? first & (0x3F >> more) : first;
  for (i32 byte = 0; byte < more && text < end; byte++) point = point << 6 | ((u8)*text++ & 63);
  return point;
}

u64 neighbours_bit(u32 left, u32 right) { return mixed((u64)left << 32 | right) & ((1u << NEIGHBOUR_BITS) - 1); }

bool may_be_neighbours(const Bpe& bpe, u32 left, u32 right) {
  const u64 bit = neighbours_bit(left, right);
  return bpe.neighbours()[bit / 64] >> bit % 64 & 1;
}

void add_neighbours(u64* neighbours, const char* text, const char* end) {
  u32 left = 0;
  for (bool first = true; text < end; first = false) {
    const u32 right = next_character(text, end);
    const u64 bit = neighbours_bit(left, right);
    if (!first) neighbours[bit / 64] |= 1ull << bit % 64;
    left = right;
  }
}

// The spelling of a byte in vocabularies of bytes: GPT-2's letters. Printable ones are themselves, the others come from U+0100 on.
u32 letter_of(u32 byte) {
  if ((byte >= 0x21 && byte < 0x7F) || (byte >= 0xA1 && byte < 0xAD) || byte >= 0xAE) return byte;
  return 256 + (byte < 0x21 ? byte : byte < 0xA1 ? 0x21 + byte - 0x7F : 0x21 + 0x22);
}

// What a text in JSON says: the spellings one after the other, and where those of a token or a merge are.
struct Token {
  i64 id;
  Place place;
};
struct Pair {
  i64 begin, cut, end;
};
template <class Entry>
struct Said {
  std::vector<char> text;
  std::vector<Entry> entries;
};

bool read_tokens(Json json, Said<Token>& said) {
  if (!json.take('{')) return false;
  if (!json.take('}')) {
    do {
      Token token{0, {(i64)said.text.size(), 0}};
      if (!json.string(said.text) || !json.take(':') || !json.number(token.id)) return false;
      token.place.end = (i64)said.text.size();
      said.entries.push_back(token);
    } while (json.take(','));
    if (!json.take('}')) return false;
  }
  json.space();
  return json.at == json.end;
}

bool read_pairs(Json json, Said<Pair>& said) {
  std::vector<char>& text = said.text;
  if (!json.take('[')) return false;
  if (!json.take(']')) {
    do {
      Pair pair{(i64)text.size(), 0, 0};
      json.space();
      if (json.at < json.end && *json.at == '[') {
        json.at++;
        if (!json.string(text) || !json.take(',')) return false;
        pair.cut = (i64)text.size();
        if (!json.string(text) || !json.take(']')) return false;
      } else {
        if (!json.string(text)) return false;
        const auto space = std::find(text.begin() + pair.begin, text.end(), ' ');
        if (space == text.end() || std::find(space + 1, text.end(), ' ') != text.end()) return false;
        pair.cut = space - text.begin();
        text.erase(space);
      }
      pair.end = (i64)text.size();
      said.entries.push_back(pair);
    } while (json.take(','));
    if (!json.take(']')) return false;
  }
  json.space();
  text.resize(text.size() + 1);  // so that the last string may be empty
  return json.at == json.end;
}

bool add_tokens(const Said<Token>& said, Bpe& bpe) {
  std::memcpy(bpe.at<char>(bpe.text_at), said.text.data(), said.text.size());
  Place* spellings = bpe.at<Place>(bpe.spellings_at);
  std::fill(spellings, spellings + bpe.num_spellings, Place{-1, -1});
  i32* ids = bpe.at<i32>(bpe.ids_at);
  std::fill(ids, ids + bpe.num_ids, -1);
  const u64 mask = bpe.num_ids - 1;
  for (const auto& [id, place] : said.entries) {
    const char* spelling = bpe.text() + place.begin;
    if (spellings[id].begin >= 0 || id_of(bpe, spelling, place.end - place.begin) >= 0) return false;
    spellings[id] = place;
    u64 slot = hash_of(spelling, place.end - place.begin) & mask;
    while (ids[slot] >= 0) slot = (slot + 1) & mask;
    ids[slot] = (i32)id;
    if (!bpe.by_bytes) add_neighbours(bpe.at<u64>(bpe.neighbours_at), spelling, bpe.text() + place.end);
  }
  return true;
}

// Looks up the ids of pairs and of what they become. Tables and spellings are far larger than caches, so memory is asked for in advance.
bool add_merges(const Said<Pair>& said, Bpe& bpe) {
  constexpr i64 BLOCK = 64;
  const char* text = said.text.data();
  const i64 total = (i64)said.entries.size();
  Merge* table = bpe.at<Merge>(bpe.pairs_at);
  std::fill(table, table + bpe.num_pairs, Merge{0, 0, NO_RANK, 0});
  const u64 ids_mask = bpe.num_ids - 1, mask = bpe.num_pairs - 1;
  i64 last = -1;
  for (i64 begin = 0; begin < total; begin += BLOCK) {
    const i64 count = std::min(BLOCK, total - begin);
    const Pair* pairs = said.entries.data() + begin;
    u64 slots[2 * BLOCK];
    Merge merges[BLOCK];
    for (i64 index = 0; index < count; index++) {
      const Pair& pair = pairs[index];
      slots[2 * index] = hash_of(text + pair.begin, pair.cut - pair.begin) & ids_mask;
      slots[2 * index + 1] = hash_of(text + pair.cut, pair.end - pair.cut) & ids_mask;
      for (i64 side = 0; side < 2; side++) __builtin_prefetch(&bpe.ids()[slots[2 * index + side]]);
    }
    for (i64 place = 0; place < 2 * count; place++)
      if (const i32 id = bpe.ids()[slots[place]]; id >= 0) __builtin_prefetch(&bpe.spellings()[id]);
    for (i64 place = 0; place < 2 * count; place++)
      if (const i32 id = bpe.ids()[slots[place]]; id >= 0) __builtin_prefetch(bpe.text() + bpe.spellings()[id].begin);
    for (i64 index = 0; index < count; index++) {
      const Pair& pair = pairs[index];
      const i32 left = id_of(bpe, text + pair.begin, pair.cut - pair.begin), right = id_of(bpe, text + pair.cut, pair.end - pair.cut);
      const i64 size = pair.end - pair.begin, next = last + 1;  // most merges make the tokens one after another
      const bool guessed = next < bpe.num_spellings && is_spelling(bpe, next, text + pair.begin, size);
      const i32 id = guessed ? (i32)next : id_of(bpe, text + pair.begin, size);
      last = id;
      if (left < 0 || right < 0 || id < 0) return false;
      merges[index] = {(u32)left, (u32)right, (u32)(begin + index), (u32)id};
      slots[index] = mixed((u64)left << 32 | right) & mask;
      __builtin_prefetch(&table[slots[index]], 1);
    }
    for (i64 index = 0; index < count; index++) {  // of the same pair the last one counts
      const Merge& merge = merges[index];
      u64 slot = slots[index];
      while (table[slot].rank != NO_RANK && !(table[slot].left == merge.left && table[slot].right == merge.right)) slot = (slot + 1) & mask;
      table[slot] = merge;
    }
  }
  return true;
}

bool add_bytes(Bpe& bpe) {
  for (u32 byte = 0; byte < 256; byte++) {
    static const char* const digits = "0123456789ABCDEF";
    char letter[4];
    const char fallback[6] = {'<', '0', 'x', digits[byte >> 4], digits[byte & 15], '>'};
    bpe.bytes[byte] = bpe.by_bytes ? id_of(bpe, letter, utf8(letter_of(byte), letter)) : id_of(bpe, fallback, 6);
    if (bpe.by_bytes && bpe.bytes[byte] < 0) return false;
  }
  return true;
}

struct Symbol {
  i32 id, before, next;  // places of its neighbours, -1: none. id -1: it was merged into the one before it
};

struct Candidate {
  u32 rank;
  i32 place;
  u32 id;
  // std::push_heap keeps the greatest in front.
  bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : place > other.place; }
};

struct Scratch {
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
  std::vector<char> spelling;
};

void propose(const Bpe& bpe, Scratch& scratch, i32 place) {
  const Symbol& symbol = scratch.symbols[place];
  if (symbol.next < 0) return;
  const Merge* merge = find_merge(bpe, symbol.id, scratch.symbols[symbol.next].id);
  if (!merge) return;
  scratch.heap.push_back({merge->rank, place, merge->id});
  std::push_heap(scratch.heap.begin(), scratch.heap.end());
}

// Merges the symbols, as the library's Word::merge_all does.
void merge_all(const Bpe& bpe, Scratch& scratch) {
  std::vector<Symbol>& symbols = scratch.symbols;
  scratch.heap.clear();
  for (i32 place = 0; place + 1 < (i32)symbols.size(); place++) propose(bpe, scratch, place);
  while (!scratch.heap.empty()) {
    const Candidate best = scratch.heap.front();
    std::pop_heap(scratch.heap.begin(), scratch.heap.end());
    scratch.heap.pop_back();
    Symbol& symbol = symbols[best.place];
    if (symbol.id < 0 || symbol.next < 0) continue;
    Symbol& next = symbols[symbol.next];
    const Merge* merge = find_merge(bpe, symbol.id, next.id);
    if (!merge || merge->id != best.id) continue;  // one of them was merged with another one
    symbol.id = (i32)best.id;
    symbol.next = next.next;
    next.id = -1;
    if (symbol.next >= 0) symbols[symbol.next].before = best.place;
    if (symbol.before >= 0) propose(bpe, scratch, symbol.before);
    propose(bpe, scratch, best.place);
  }
}

void add_symbol(Scratch& scratch, i32 id) {
  const i32 place = (i32)scratch.symbols.size();
  if (place) scratch.symbols[place - 1].next = place;
  scratch.symbols.push_back({id, place - 1, -1});
}

// Makes the symbols of a word, or of its beginning if nothing is merged over the end of that. Returns how many characters they have; 0: one
// has no token.
i64 begin_word(const Bpe& bpe, const u32* points, i64 count, Scratch& scratch) {
  scratch.symbols.clear();
  bool was_token = false;
  for (i64 index = 0; index < count; index++) {
    char bytes[4];
    const i32 size = utf8(points[index], bytes);
    const i32 id = bpe.by_bytes ? -1 : id_of(bpe, bytes, size);
    if (id >= 0 && was_token && !may_be_neighbours(bpe, points[index - 1], points[index])) return index;
    was_token = id >= 0;
    if (id >= 0) {
      add_symbol(scratch, id);
    } else {
      for (i32 byte = 0; byte < size; byte++) {
        if (bpe.bytes[(u8)bytes[byte]] < 0) return 0;
        add_symbol(scratch, bpe.bytes[(u8)bytes[byte]]);
      }
    }
  }
  return count;
}

i32 id_of_word(const Bpe& bpe, const u32* points, i64 count, Scratch& scratch) {
  scratch.spelling.clear();
  for (i64 index = 0; index < count; index++) {
    char bytes[4], letter[4];
    const i32 size = utf8(points[index], bytes);
    if (bpe.by_bytes) {
      for (i32 byte = 0; byte < size; byte++)
        scratch.spelling.insert(scratch.spelling.end(), letter, letter + utf8(letter_of((u8)bytes[byte]), letter));
    } else {
      scratch.spelling.insert(scratch.spelling.end(), bytes, bytes + size);
    }
  }
  return id_of(bpe, scratch.spelling.data(), (i64)scratch.spelling.size());
}

}  // namespace

bool find_bpe(const char* text, i64 size, i64* places) {
  Json json{text, text + size};
  bool has_vocab = false, has_merges = false;
  const auto place = [&](bool& has, i64* found) {
    if (has) return false;
    has = true;
    json.space();
    found[0] = json.at - text;
    if (!json.skip_value()) return false;
    found[1] = json.at - text;
    return true;
  };
  const bool read = for_each_key(json, [&](const std::string& key) {
    if (key != "model") return json.skip_value();
    json.space();
    if (json.at == json.end || *json.at != '{') return json.skip_value();
    return for_each_key(json, [&](const std::string& name) {
      return name == "vocab" ? place(has_vocab, places) : name == "merges" ? place(has_merges, places + 2) : json.skip_value();
    });
  });
  return read && has_vocab && has_merges;
}

Bpe* read_bpe(const char* vocab, i64 vocab_size, const char* merges, i64 merges_size, bool by_bytes, bool whole_words) {
  Said<Token> tokens;
  Said<Pair> pairs;
  if (!read_tokens({vocab, vocab + vocab_size}, tokens) || !read_pairs({merges, merges + merges_size}, pairs)) return nullptr;
  const i64 count = (i64)tokens.entries.size();
  i64 last = -1;
  for (const Token& token : tokens.entries) last = std::max(last, token.id);
  if (last > 2 * count || last >= 1 << 30) return nullptr;
  Bpe bpe{};
  i64 end = sizeof(Bpe);
  const auto place = [&](i64 bytes) {
    const i64 begin = (end + 63) / 64 * 64;
    end = begin + bytes;
    return begin;
  };
  bpe.magic = MAGIC;
  bpe.count = count;
  bpe.by_bytes = by_bytes;
  bpe.whole_words = whole_words;
  bpe.text_at = place(bpe.text_size = (i64)tokens.text.size());
  bpe.spellings_at = place((bpe.num_spellings = last + 1) * sizeof(Place));
  bpe.ids_at = place((bpe.num_ids = slots_for(count)) * sizeof(i32));
  bpe.pairs_at = place((bpe.num_pairs = slots_for((i64)pairs.entries.size())) * sizeof(Merge));
  bpe.neighbours_at = place((bpe.neighbours_words = by_bytes ? 0 : (1 << NEIGHBOUR_BITS) / 64) * sizeof(u64));
  bpe.size = end;
  Bpe* block = static_cast<Bpe*>(std::calloc(1, end));
  if (!block) return nullptr;
  *block = bpe;
  if (add_tokens(tokens, *block) && add_merges(pairs, *block) && add_bytes(*block)) return block;
  std::free(block);
  return nullptr;
}

bool is_bpe(const Bpe* block, i64 size) {
  if (size < (i64)sizeof(Bpe) || block->magic != MAGIC || block->size != size) return false;
  const auto within = [&](i64 place, i64 count, i64 bytes) {
    return place >= (i64)sizeof(Bpe) && count >= 0 && place <= size && count <= (size - place) / bytes;
  };
  const auto slots = [](i64 count) { return count >= 16 && (count & (count - 1)) == 0; };
  return within(block->text_at, block->text_size, 1) && within(block->spellings_at, block->num_spellings, sizeof(Place)) &&
         within(block->ids_at, block->num_ids, sizeof(i32)) && within(block->pairs_at, block->num_pairs, sizeof(Merge)) &&
         within(block->neighbours_at, block->neighbours_words, sizeof(u64)) && slots(block->num_ids) && slots(block->num_pairs) &&
         block->neighbours_words == (block->by_bytes ? 0 : (1 << NEIGHBOUR_BITS) / 64);
}

i32 id_of(const Bpe& bpe, const char* spelling, i64 size) {
  const u64 mask = bpe.num_ids - 1;
  for (u64 slot = hash_of(spelling, size) & mask;; slot = (slot + 1) & mask) {
    const i32 id = bpe.ids()[slot];
    if (id < 0) return -1;
    if (is_spelling(bpe, id, spelling, size)) return id;
  }
}

i64 encode_words(const Bpe& bpe, const u32* text, const i32* places, const i32* given, i64 count, i32* ids) {
  Scratch scratch;
  i64 found = 0;
  for (i64 word = 0; word < count; word++) {
    if (given[word] != -1) {
      ids[found++] = given[word];
      continue;
    }
    const u32* points = text + places[2 * word];
    const i64 size = places[2 * word + 1] - places[2 * word];
    const i32 whole = bpe.whole_words ? id_of_word(bpe, points, size, scratch) : -1;
    if (whole >= 0) {
      ids[found++] = whole;
      continue;
    }
    for (i64 done = 0; done < size;) {
      const i64 more = begin_word(bpe, points + done, size - done, scratch);
      if (!more) return -1;
      done += more;
      merge_all(bpe, scratch);
      for (const Symbol& symbol : scratch.symbols)
        if (symbol.id >= 0) ids[found++] = symbol.id;
    }
  }
  return found;
}

}  // namespace aengine
