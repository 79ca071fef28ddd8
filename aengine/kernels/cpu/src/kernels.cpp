// The C interface: every function that `library.py` declares. No exceptions, no state outside a workspace.
//
// Functions that can fail return a `Status`. Pointers are not checked; sizes are the caller's word, ids and indices are checked.
#include <cstdlib>
#include <new>

#include "bpe.h"
#include "code_packing.h"
#include "layout.h"
#include "packing.h"
#include "quantise.h"
#include "stack.h"

#ifndef AENGINE_LEVEL
#define AENGINE_LEVEL "unnamed"
#endif

using namespace aengine;

namespace {

Status check_step(const Model& model, const Pool& pool, const Step& step, const Workspace& space) {
  if (space.workers.busy()) return BUSY;
  if (has_failed(space)) return (Status)failure_of(*space.exchange);
  if (const Status status = check_tokens(model, pool, step)) return status;
  if (const Status status = read_last_tokens(step)) return status;
  if (const Status status = check_ids(model, step)) return status;
  return check_rows(pool, step);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* aengine_level() { return AENGINE_LEVEL; }

// Where the fields of the shared structs are, so that a library whose structs are others than Python's is noticed.
const char* aengine_layout_names() { return LAYOUT_NAMES; }
const i64* aengine_layout_places() { return LAYOUT_PLACES; }

i32 aengine_tiles_agree() { return tiles_agree(); }

Workspace* aengine_workspace_create(Exchange* exchange) {
  Workspace* space = new (std::nothrow) Workspace;
  if (space) space->exchange = exchange;
  return space;
}
void aengine_workspace_destroy(Workspace* space) { delete space; }

// Frees the scratch memory, which is allocated again when it is needed. No step has begun that is not finished.
void aengine_workspace_trim(Workspace* space) {
  Buffers* buffers = space;
  buffers->~Buffers();
  new (buffers) Buffers;
}

// Packs the rows of the parts one after another into w, whose arrays are allocated.
void aengine_pack(const Part* parts, i64 num_parts, i32 source, const PackedLinear* w, int threads) {
  with_element(source, [&](auto element) { pack<decltype(element)>(parts, num_parts, *w, threads); });
}

// Packs the rows of the parts into w likewise, each code with the bits of `flip` changed.
void aengine_pack_codes(const CodesPart* parts, i64 num_parts, i32 flip, const PackedLinear* w, int threads) {
  pack_codes(parts, num_parts, flip, *w, threads);
}

// The rows of a part -> codes [rows, columns] below 16 and scales [rows, ceil(columns / 32)].
void aengine_quantise(const Part* part, i32 source, i64 columns, u8* codes, float* scales, int threads) {
  with_element(source, [&](auto element) { quantise<decltype(element)>(*part, columns, codes, scales, threads); });
}

// out = W x + b in float32, [rows, out_features], capped unless soft_cap is 0; rows of x as in abi.h. Adapters add to it as to the head.
i32 aengine_logits(i32 element, const void* x, i64 x_stride, i64 rows, const PackedLinear* w, float soft_cap, const StepAdapters* adapters,
                   float* out, Workspace* space, int threads) {
  if (space->workers.busy()) return BUSY;
  if (!reserve_prepared(*space, rows, w->in_features)) return OUT_OF_MEMORY;
  AdaptedRows adapted;
  if (adapters && !(reserve_low_rank(*space, *adapters, rows) && plan_adapters(*adapters, nullptr, rows, space->adapted_logits, adapted))) {
    return OUT_OF_MEMORY;
  }
  with_element(element, [&](auto e) {
    using E = decltype(e);
    space->workers.run(threads, [&](const Member& member) {
      multiply_logits(member, static_cast<const E*>(x), x_stride, rows, *w, soft_cap, adapted, StoreLogits{out, w->out_features}, *space);
    });
  });
  return OK;
}

// The `meet` of exchanges whose `self` is a SharedRanks.
i32 aengine_meet_in_memory(void* self, i64 bytes) { return meet_in_memory(self, bytes); }

// Rows of `out`, float32 and as wide as all ranks' together, = the columns of all ranks, of which this one has firsts[index] .. firsts[index + 1]
// in `in`. A null `out` takes nothing.
i32 aengine_gather_ranks(const float* in, i64 rows, const i64* firsts, float* out, Workspace* space, int threads) {
  if (space->workers.busy()) return BUSY;
  Exchange& exchange = *space->exchange;
  const i64 width = firsts[exchange.index + 1] - firsts[exchange.index], total = firsts[exchange.size];
  space->workers.run(threads, [&](const Member& member) { gather_ranks(member, exchange, in, width, rows, firsts, out, total, total); });
  return failure_of(exchange);
}

// tokens[row] = what is drawn from row `row` of [rows, vocab] logits; of a row without a logit that can be chosen, its argmax.
i32 aengine_draw(const float* logits, i64 rows, i64 vocab, const DrawParams* params, i64* tokens, Workspace* space, int threads) {
  if (space->workers.busy()) return BUSY;
  if (!reserve_draws(*space, rows, vocab, threads)) return OUT_OF_MEMORY;
  space->workers.run(threads, [&](const Member& member) { draw_tokens(member, logits, rows, vocab, params, tokens, *space); });
  for (i64 row = 0; row < rows; row++) tokens[row] = tokens[row] < 0 ? ~tokens[row] : tokens[row];
  return OK;
}

// out[row] = log of the sum of exp over row `row` of [rows, vocab] logits.
i32 aengine_log_sums(const float* logits, i64 rows, i64 vocab, const float* own, float* out, i64* greater, Workspace* space, int threads) {
  if (space->workers.busy()) return BUSY;
  if (!reserve_log_sums(*space, rows, vocab)) return OUT_OF_MEMORY;
  space->workers.run(threads, [&](const Member& member) { log_sums(member, logits, rows, vocab, own, out, greater, *space); });
  return OK;
}

// A whole step: writes keys and values, and brings hidden states or sampled tokens at the logits indices.
i32 aengine_run_layers(const Model* model, const Pool* pool, const Step* step, Workspace* space, int threads) {
  if (const Status status = check_step(*model, *pool, *step, *space)) return status;
  return with_element(model->element, [&](auto e) -> i32 { return run_layers<decltype(e)>(*model, *pool, *step, *space, threads); });
}

// The same on the workspace's worker threads, while the caller does something else: all that it points to must not change before
// `aengine_finish_layers`, in which the caller takes part.
i32 aengine_begin_layers(const Model* model, const Pool* pool, const Step* step, Workspace* space, int threads) {
  if (const Status status = check_step(*model, *pool, *step, *space)) return status;
  return with_element(model->element, [&](auto e) -> i32 { return begin_layers<decltype(e)>(*model, *pool, *step, *space, threads); });
}
i32 aengine_finish_layers(Workspace* space) { return space->workers.finish(); }

// Finishes the step that has begun, then begins the next one, unless the first failed or `hold` is not 0 by then.
i32 aengine_finish_and_begin(const Model* model, const Pool* pool, const Step* next, Workspace* space, int threads, const i32* hold) {
  if (const Status status = space->workers.finish()) return status;
  if (__atomic_load_n(hold, __ATOMIC_ACQUIRE)) return HELD;
  return aengine_begin_layers(model, pool, next, space, threads);
}

// Copies page sources[i] to page destinations[i], all sources before any destination.
i32 aengine_copy_pages(const Pool* pool, const i32* sources, const i32* destinations, i64 count, Workspace* space, int threads) {
  const i64 staged_bytes = count * larger(pool->key_page_bytes, pool->value_page_bytes);
  if (space->workers.busy()) return BUSY;
  if (!space->gathered.reserve<u8>(threads * staged_bytes)) return OUT_OF_MEMORY;
  for (i64 i = 0; i < count; i++) {
    if (sources[i] < 0 || sources[i] >= pool->num_pages || destinations[i] < 0 || destinations[i] >= pool->num_pages) return BAD_PAGE;
  }
  space->workers.run(threads, [&](const Member& member) {
    u8* staged = space->gathered.as<u8>() + member.index() * staged_bytes;
    member.each(2 * pool->layers_per_page, [&](i64 task) {
      const i64 bytes = task % 2 ? pool->value_page_bytes : pool->key_page_bytes;
      u8* pages = static_cast<u8*>((task % 2 ? pool->values : pool->keys)[task / 2]);
      for (i64 i = 0; i < count; i++) memcpy(staged + i * bytes, pages + sources[i] * bytes, (size_t)bytes);
      for (i64 i = 0; i < count; i++) memcpy(pages + destinations[i] * bytes, staged + i * bytes, (size_t)bytes);
    });
  });
  return OK;
}

// Reads pages to out [count, keys of each layer, then values of each layer].
i32 aengine_read_pages(const Pool* pool, const i32* pages, i64 count, u8* out) {
  for (i64 i = 0; i < count; i++) {
    if (pages[i] < 0 || pages[i] >= pool->num_pages) return BAD_PAGE;
  }
  for (i64 i = 0; i < count; i++) {
    for (i64 part = 0; part < 2 * pool->layers_per_page; part++) {
      const bool is_key = part < pool->layers_per_page;
      const i64 bytes = is_key ? pool->key_page_bytes : pool->value_page_bytes;
      const void* of_layer = is_key ? pool->keys[part] : pool->values[part - pool->layers_per_page];
      memcpy(out, static_cast<const u8*>(of_layer) + pages[i] * bytes, (size_t)bytes);
      out += bytes;
    }
  }
  return OK;
}

// Places [2, 2] of the vocabulary and the merges in the text of a tokenizer.json. 0: they are not there.
i32 aengine_bpe_find(const char* json, i64 size, i64* places) { return find_bpe(json, size, places); }

// Null: the vocabulary and merges are not what `read_bpe` reads.
Bpe* aengine_bpe_create(const char* vocab, i64 vocab_size, const char* merges, i64 merges_size, i32 by_bytes, i32 whole_words) {
  return read_bpe(vocab, vocab_size, merges, merges_size, by_bytes, whole_words);
}
void aengine_bpe_destroy(Bpe* bpe) { std::free(bpe); }

// Whether memory holds what `aengine_bpe_create` makes, and may be used as that.
i32 aengine_bpe_is(const Bpe* bpe, i64 size) { return is_bpe(bpe, size); }

// The bytes of the block, and how many tokens there are.
i64 aengine_bpe_size(const Bpe* bpe) { return bpe->size; }
i64 aengine_bpe_count(const Bpe* bpe) { return bpe->count; }
i32 aengine_bpe_id(const Bpe* bpe, const char* spelling, i64 size) { return id_of(*bpe, spelling, size); }

// The spelling of an id and its bytes; null if it is not one of a token.
const char* aengine_bpe_spelling(const Bpe* bpe, i64 id, i64* size) {
  if (id < 0 || id >= bpe->num_spellings || bpe->spellings()[id].begin < 0) return nullptr;
  const Place& place = bpe->spellings()[id];
  *size = place.end - place.begin;
  return bpe->text() + place.begin;
}

i64 aengine_bpe_encode(const Bpe* bpe, const u32* text, const i32* places, const i32* given, i64 count, i32* ids) {
  return encode_words(*bpe, text, places, given, count, ids);
}

}  // extern "C"
#pragma GCC visibility pop
