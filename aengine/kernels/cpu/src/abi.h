// The structs of the C interface; `library.py` declares the same ones. All sizes count elements unless they say bytes.
//
// Activations are rows of `Element`s with a stride; a row is readable up to the next multiple of 16 elements, and what lies
// beyond its true length there is zero.
#pragma once
#include <cstdint>

namespace aengine {

using u8 = uint8_t;
using i8 = int8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// INT8 and INT4 are of pages alone.
enum ElementKind : i32 { BF16 = 0, F32 = 1, INT8 = 2, INT4 = 3 };

// What a packed matrix is made of. In every format a panel is 64 output columns, and one step of a panel is 64 words of 32 bits:
// for each column two bf16, one float32, or four int8 that follow each other in the depth. The formats of codes have scales per group of the
// depth: a word is four codes of 8 bits, integers or float8 (e4m3fn); eight of 4 bits, code i of the first four in the low bits of byte i and
// of the last four in its high bits; or 16 of 2 bits, code i of the n-th four in bits 2n and 2n + 1 of byte i. 16 codes of 6 bits are two
// words of their low 4 bits, then one of their high 2.
enum Format : i32 {
  BF16_PAIRS = 0, F32_WORDS = 1, INT8_QUADS = 2, INT4_CODES = 3, INT8_CODES = 4, FLOAT8_CODES = 5, INT2_CODES = 6, INT6_CODES = 7
};

// How scales of codes are stored, or where these are whole multiples, int8, of a factor of several groups: how the factors are.
enum ScaleKind : i32 { BF16_SCALES = 0, F32_SCALES = 1, F16_SCALES = 2 };

enum Status : i32 {
  OK = 0,
  OUT_OF_MEMORY = 1,
  BAD_TOKEN_ID = 2,
  BAD_POSITION = 3,
  BAD_SLOT = 4,
  BAD_PAGE = 5,
  BAD_ROW_LENGTH = 6,
  BAD_LOGITS_INDEX = 7,
  BUSY = 8,  // the workspace is in a step that has begun and is not finished
  BAD_ROW = 9,
  HELD = 10,  // the step did not begin because it was held
  EXCHANGE_ABORTED = 11,
  EXCHANGE_TIMED_OUT = 12,  // a rank did not come
};

// What becomes of a product: stored; added to what is there, times a multiplier; an activation of it stored, or of its gate times up; stored in
// float32 for SUM_RANKS; what is there is multiplied by an activation of it.
enum Epilogue : i32 { STORE = 0, ADD = 1, ACTIVATE = 2, GATED = 3, PARTIAL = 4, MULTIPLY = 5 };

// See activations.h.
enum Activation : i32 { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU_SQUARED = 4, CLIPPED_SWIGLU = 5 };

// See norm.h.
enum NormKind : i32 { RMS_NORM = 0, LAYER_NORM = 1 };

// y = W x + b, W [out_features, in_features] packed as [panels][steps][64] words with zeros where a panel or a step is not full.
// Interleaved: out_features is twice the width of an MLP and a panel holds gate 0..15, up 0..15, gate 16..31, up 16..31 of its 32.
//
// Of codes, a panel is for each group of the depth the scales of its 64 columns, their offsets if there are any, and the words of the group;
// with factors, these and those of the offsets stand before the groups that they belong to. Panels begin at multiples of 64 words. A weight
// is (code - zero) * scale + offset, where a table says what a code stands for, or table[code] * scale + offset with a float32 table.
// Activations are quantised to int8 in groups of their own, which do not cross those of the weights, or multiplied in float32.
struct PackedLinear {
  u32* words;
  float* bias;         // in packed order, [panels * 64]; null: none
  float* scales;       // of INT8_QUADS, in packed order
  i32* offsets;        // of INT8_QUADS, in packed order: 128 times the sum of a column
  const void* table;   // of INT4_CODES, [16]: float32 with float32 activations, otherwise u8; null: codes are their numbers
  const i32* order;    // of codes, [in_features]: the element of x that each depth is multiplied with; null: the same
  i64 out_features;
  i64 in_features;
  i64 group_size;        // of codes, a multiple of 16
  i64 activation_group;  // of codes, a multiple of 16, at most MAX_ACTIVATION_GROUP
  i32 format;
  i32 interleaved;
  i32 scale_kind;         // of codes
  i32 with_offsets;       // of codes
  i32 zero;               // of codes
  i32 float_activations;  // of codes
  i32 groups_per_factor;  // of codes; 0: scales have no factors
};

// Rows of a matrix as a checkpoint has them: `rows` of `in_features` elements each.
struct Part {
  const void* data;
  i64 rows;
  i64 stride;
};

// Rows of codes, a byte each, with scales and offsets [rows, groups]: of a matrix's `scale_kind`, or int8 with factors of that kind,
// [rows, ceil(groups / groups_per_factor)].
struct CodesPart {
  const void* codes;
  const void* scales;
  const void* offsets;  // null: the matrix has none
  const void* factors;  // of the scales; null: the matrix has none
  const void* offset_factors;
  i64 rows;
  i64 stride;  // of the codes
};

// 16 columns of B: `count` rows of B transposed, from `row` on, which elements first .. first + count of A x are multiplied with.
struct LowRankBlock {
  u32 row;
  u16 first, count;
};

// What an adapter adds to a product y = W x: B (A x). Elements are those of activations. The parts of a fused matrix have rows of A of their
// own, and a block of B those of its parts.
struct LowRank {
  const void* a;               // [size, in_features padded with zeros to a multiple of 16]; of the embedding transposed, [vocab, size]
  const void* b;               // [rows of all blocks, 16]
  const LowRankBlock* blocks;  // [panels * 4], in packed order
  i64 size;                    // a multiple of 4, the last rows of A are zero where need be; 0: nothing is added
};

struct Norm {
  const float* weight;  // [size, padded with zeros to a multiple of 16]
  const float* bias;    // the same; null: none
  i64 size;
  float eps;
  i32 kind;
};

// The operations of a step, each done before the next begins. Buffers of activations are numbers; each has a row for each token, or from
// GATHER on for each logits index.
enum OpKind : i32 {
  EMBED = 0, NORM = 1, LINEAR = 2, ROTATE = 3, ATTEND = 4, GATHER = 5, EXPERTS = 6, HEADS = 7, COPY = 8, READ_KEPT = 9, WRITE_KEPT = 10,
  GATHER_RANKS = 11, SUM_RANKS = 12, CONVOLVE = 13, CONVOLVE_STATES = 14, RECUR = 15, GATE = 16, KEEP_INPUTS = 17,
  ADD_IMAGES = 18
};

struct Op {
  i32 kind;
  const void* item;  // the struct of the kind

  template <class T>
  const T& as() const { return *static_cast<const T*>(item); }
};

// The numbers of two matrices to which adapters add something; those of linears follow.
constexpr i32 EMBEDDING = 0, HEAD = 1;

// out = the rows of the token ids times `scale`, plus those of the positions. The row of an id below 0 is row ~id of the step's images.
struct EmbedOp {
  const void* embedding;  // [vocab, width]; null: the rows are the step's inputs
  const void* positions;  // [num_positions, width]; null: none
  i64 width;
  i32 out;
  float scale;
  i64 image_id;  // whose row is that of all images; -1: they have rows of their own, which are not scaled
};

// out += addition number `addition` of the step's images, at the tokens that have one.
struct AddImagesOp {
  i64 addition, width;
  i32 out;
};

// out = norm(in), or out = scale * (out + multiplier * norm(in)), from column `first` of both on. In place if `in` is `out`.
struct NormOp {
  Norm norm;
  const NormOp* next;  // done right after it for the same row; null: nothing
  i64 first;
  i32 in, out, adds;
  float multiplier, scale;
};

// out = what the epilogue makes of W in + b.
struct LinearOp {
  const PackedLinear* weight;
  i32 matrix, in, out, epilogue, activation;  // matrix: its number; -1: adapters add nothing to it
  float multiplier;
};

// ROTATE: heads of queries and keys are normalised, their first `rotary_dim` elements are rotated, all in place, and keys and values go to
// their pages. With a v_norm, values may be what keys were before. ATTEND: attention of the queries over the pages. In a row, heads follow each other: queries and keys of key_dim elements,
// values and what was attended of value_dim.
struct AttentionOp {
  const float* cos_sin;  // [num_positions, rotary_dim]: cosines, then sines; null: no rotation
  const float* sinks;    // [heads], logits that take part in the softmax without a value; null: none
  const float* query_scales;  // [num_positions], by which rotated queries are multiplied; null: nothing
  const float* slopes;   // [heads], what a score loses for each position between key and query, after the soft cap; null: nothing
  Norm q_norm, k_norm, v_norm;  // of each head; without a weight: none
  i64 norm_stride;       // from the weights and biases of one head's norm to those of the next; 0: all heads share them
  i64 group, place, part;  // of the layer, see Pool
  i64 heads, kv_heads, key_dim, value_dim, rotary_dim;
  i64 window;                  // latest positions that a query attends to, itself included; 0: all
  i64 chunked;                 // of these, only those from the last position on that is a multiple of the window
  i64 sees_images;             // if not 0, a query attends to what the step says that its token sees
  i64 key_first, value_first;  // columns of their buffers
  float scale, soft_cap;       // soft_cap 0: none
  i32 kind;                    // of the model's head kinds
  i32 query, key, value, out;  // without a key, -1, none is written: it and its value are in the pages
};

// out = the rows of `in` at the logits indices.
struct GatherOp {
  i32 in, out;
};

enum Scoring : i32 { SOFTMAX = 0, SIGMOID = 1 };

// out = the outputs of the MLPs that a router chooses for a row of `in`, added with their weights, or as the epilogue ADD has it. Matrices
// `gate_up` are interleaved.
struct ExpertsOp {
  const PackedLinear* router;          // [num_experts, hidden], and one row more if there is a shared gate; of the rows of `router_in`
  const float* correction;             // [num_experts], added to scores for the choice alone; null: none
  const float* expert_scale;           // [num_experts], by which weights are multiplied at last; null: nothing
  const PackedLinear* gate_up;         // [num_experts]
  const PackedLinear* down;            // [num_experts]
  const PackedLinear* shared_gate_up;  // of an MLP of all tokens, as shared_down; null: none
  const PackedLinear* shared_down;
  i64 num_experts, top_k;
  i64 num_groups, top_groups;  // experts are chosen from the best groups of num_experts / num_groups,
  i64 group_top;               // ranked by the sum of so many of their highest scores
  float scaling;               // of the weights of the chosen
  i32 scoring;
  i32 normalize;    // the chosen's scores are divided by their sum
  i32 shared_gate;  // the last output of the router is a logit, the sigmoid of which is the weight of the shared MLP, otherwise 1
  i32 scaled_inputs;  // the weights multiply what experts read, not what they make
  i32 shared_gate_up_matrix, shared_down_matrix;  // as in LinearOp
  i32 router_in, in, out, epilogue, activation;
  i32 chosen;         // a buffer whose rows get the numbers of the chosen experts from column `chosen_first` on, the best first, each in
  i32 chosen_first;   // the bits of an element; -1: none does
  float multiplier;
  const i32* gate_up_orders;  // [num_experts, in_features], as `order` of a PackedLinear, where experts have orders of their own; null: they
  const i32* down_orders;     // have none, or that of their matrices
  const i64* gated_firsts;    // [ranks + 1], as in GatherRanksOp, where ranks have columns of the gated activations of every expert; null:
  const i64* shared_firsts;   // this rank has what `down` reads
};

// A matrix for each head: from `in_features` elements (a multiple of 16) at column in_first + head * in_stride of `in` to those at column
// out_first + head * out_stride of `out`. The `copied` elements before the one are copied to before the other. What follows
// the last head becomes zero up to a multiple of 16.
struct HeadsOp {
  const PackedLinear* weights;  // [num_heads]
  i64 num_heads, copied, in_first, in_stride, out_first, out_stride;
  i32 in, out;
};

// `width` columns of `in` from column in_first on become those of `out` from out_first on; what follows them there becomes zero.
struct CopyOp {
  i64 in_first, out_first, width;
  i32 in, out;
};

// READ_KEPT: the hidden states that are kept at the slots of the step's tokens become columns of `rows` from `first` on; what follows them
// becomes zero. WRITE_KEPT: the first columns of `rows` are kept at the step's `kept_slots`.
struct KeptOp {
  i64 first, width;
  i32 rows;
};

// Columns of `out` from out_first on = those of all ranks: rank r's are firsts[r] .. firsts[r + 1] of them, and in `in` on that rank from
// column in_first on.
struct GatherRanksOp {
  const i64* firsts;  // [ranks + 1]
  i64 in_first, out_first;
  i32 in, out;
};

// out = the sum of the PARTIAL results of all ranks, in float32 and in their order, or `out` + multiplier * the sum.
struct SumRanksOp {
  i64 width;
  i32 out, epilogue;
  float multiplier;
};

constexpr i64 MAX_TAPS = 16;  // of a convolution

// Channels first .. first + width of a convolution, whose inputs are where a place has keys or values; `width` is a multiple of 16.
struct ConvolvePart {
  i64 group, place, of_values, first, width;
};

// out = c * conv(b * x), where b, c and x follow each other in the rows of `in`, each of `channels` columns, a multiple of 16, and conv is
// causal and depthwise. The inputs b * x of the step go to pages.
struct ConvolveOp {
  const float* weights;  // [taps][channels], the last is of the newest input
  const float* bias;     // [channels]; null: none
  const ConvolvePart* parts;
  i64 num_parts, channels, taps;
  i32 in, out;
};

// Where a layer's part of a recurrent state lies, as `LayerState` of recurrence.py says it, and its sizes.
struct StateLayer {
  i64 first, blocks_per_piece, pieces_per_block, tail, lines_per_piece, pieces_per_page;
  i64 width;  // columns of a block
  i64 heads, key_heads, key_dim, value_dim;  // key_dim and value_dim are multiples of 16
  i64 channels, gates, taps;  // channels and gates are an input
  i64 num_inputs;             // that a state has
};
constexpr i64 MAX_BLOCK_FLOATS = 8192, MAX_BLOCK_COLUMNS = 64;

// The kinds of `Recurrence` in spec.py; MAMBA2 without a `step_bias` and a `skip` is lightning attention.
enum class Rule : i32 { DELTA, KIMI_DELTA, MAMBA1, MAMBA2 };

// CONVOLVE_STATES: convolved = silu(conv(mixed)), causal and depthwise, of the first columns of `mixed`. RECUR: out = what the rule makes of
// q, k and v in `convolved`, and of the gates; of MAMBA1 of v alone, where q and k are the first gates. Those for the steps are the last
// ones. KEEP_INPUTS follows: what states have of `mixed` and `gates`.
struct RecurOp {
  StateLayer state;
  const float* conv;       // [taps, conv_stride], the last is of the newest input
  const float* conv_bias;  // [conv_stride]; null: none
  const float* rates;      // [heads], how fast each forgets; of MAMBA1 [key_dim, heads * value_dim], times -log2(e)
  const float* step_bias;  // [heads]; of KIMI_DELTA [heads, key_dim], of MAMBA1 [heads, value_dim]; null: steps are 1
  const float* skip;       // [heads]; of MAMBA1 [heads, value_dim]; null: nothing is added
  i64 conv_stride;         // a multiple of 32
  i32 mixed, convolved, gates, out;
  Rule rule;
};

// out = norm(out) * activation(gate), each of `heads` by itself; the gates are in columns from `first` on. `width` is a multiple of 16 if
// there is more than one head.
struct GateOp {
  Norm norm;  // without a weight: none
  i64 heads, width, first;
  i32 gate, out, sigmoid;  // else silu
};

// How the ranks that compute parts of a step meet: each writes to its slot of a round, calls `meet`, and then reads the slots of all.
struct Exchange {
  void* self;
  i32 (*meet)(void* self, i64 bytes);  // returns a Status when all ranks have called it; `bytes` is the most that one of them wrote
  u8* const* slots;  // [2][size], of even rounds and of odd ones; multiples of 64 bytes from each other
  i64 slot_bytes;    // a multiple of 64
  i64 round;         // how many there were
  i32 index, size;   // of this rank, and how many there are
  i32 status;        // the first failure; there are no more rounds after it
  i64 nanoseconds;   // that this rank has spent so far: copying, and waiting for others
};

// Layers whose attention is cut into tasks alike.
struct HeadKind {
  i64 heads, kv_heads;
  i64 key_dim, value_dim;  // in the pages
};
constexpr i64 MAX_HEAD_KINDS = 4;

struct Model {
  const Op* ops;
  const PackedLinear* head;  // null: it is not computed here
  const i64* strides;  // [num_buffers], of rows of activations, multiples of PANEL
  const HeadKind* head_kinds;
  i64 num_ops, num_buffers, num_head_kinds, vocab, num_positions;
  float logit_soft_cap;  // 0: none
  i32 hidden;            // the buffer in which the hidden states are that the head reads
  i32 element;
};

constexpr i64 KV_SCALE_BYTES = 8;

// Pages of layers_per_page places: each layer has one in the pages of its group, or a part of one: layers whose heads take less room share
// it. Where page_size is a multiple of 16 a page of a layer
// is, for each KV head, blocks of 16 tokens: keys [key_dim / 2][16][2] and values [8][value_dim][2] in bf16, keys [key_dim][16] and values
// [16][value_dim] in float32. Otherwise it is [kv_heads][page_size][key_dim], and the same of values. Both widths are multiples
// of 16; what a head does not fill is zero. INT8 is the bytes of integers in -127 .. 127, four in a word (see kv.h): a key ends with two
// more words, the float32 scales that its integers and those of the value are to be multiplied with. INT4 is the same with two integers in
// -7 .. 7 in a byte, each with 8 added: of a token at a depth and half of the width beyond it, but for keys in blocks, where they are of a
// word and the next one.
struct Pool {
  void* const* keys;  // [layers_per_page]
  void* const* values;
  i64 layers_per_page, num_pages, page_size;
  i64 key_page_bytes, value_page_bytes;  // of a place of a page
  i32 element;

  // Of a head of a token that is `dim` wide in the pages.
  i64 key_bytes(i64 dim) const { return value_bytes(dim) + (element >= INT8 ? KV_SCALE_BYTES : 0); }
  i64 value_bytes(i64 dim) const { return element == INT4 ? dim / 2 : dim * (element == INT8 ? 1 : element == BF16 ? 2 : 4); }
};

// How a token is drawn: `DRAW_PARAMS` of aengine/kernels/draw_params.py.
struct DrawParams {
  float temperature, top_p, min_p;
  i32 top_k;  // 0: off
  u64 seed;
  i32 position, unused;
};

// The adapters of a step.
struct StepAdapters {
  const LowRank* const* adapters;  // [num_adapters], of each the matrices by number
  const i32* of_tokens;            // [num_tokens], which one; -1: none
  i64 num_adapters;
  i64 most;  // the largest `size` of a matrix
};

// A step's rows, as `StepLayout` has them.
struct Step {
  i32* token_ids;  // [num_tokens]; ~i: row i of `image_rows`
  const i32* positions;
  const i32* slots;  // [num_groups, num_tokens]
  const i32* qo_indptr;  // [num_rows + 1]
  const i32* kv_indptr;
  const i32* kv_indices;  // [num_groups, kv_indptr[num_rows]]
  const i32* last_page_len;
  const i32* logits_indices;      // [num_logits], the tokens of the step whose hidden states or next tokens are computed
  i32* last_tokens;               // [num_last_tokens], the last token of each row
  const i32* input_rows;          // [num_input_rows], rows whose last tokens become the first `token_ids` when the step begins
  const i32* output_rows;         // [num_output_rows], rows whose last tokens become the `sampled` ones when the step ends; num_logits or 0
  void* hidden;                   // [num_logits, stride of the hidden buffer]; null: not stored
  i64* sampled;                   // [num_logits], the next token of each, ~token where none can be chosen; null: nothing is sampled
  const DrawParams* draw_params;  // [num_logits], how each is sampled; null: greedy
  void* kept;              // [num_pages * page_size, width], hidden states by slot of group 0; null: the model has no operation for them
  const i32* kept_slots;   // [num_kept], where WRITE_KEPT writes its rows; -1: nowhere
  const void* inputs;      // [num_tokens, width], in place of the rows of an embedding; null: there are none
  const StepAdapters* adapters;  // null: no token has one
  const void* image_rows;        // [num_image_rows, width]
  const i32* seen;               // [num_tokens], tokens of its row that each token sees, itself included; null: those up to itself
  const void* image_layers;      // [additions of the model, num_image_rows, width], what ADD_IMAGES adds
  const i32* state_reads;   // [num_rows, state_pages], of the recurrent state of the tokens before the step, which a row without any has not
  const i32* state_writes;  // [num_rows, state_pages], of that of all tokens; may be the same pages
  const i32* state_replays;       // [num_rows], how many tokens are computed before those of the step, from inputs that the states have
  const i32* state_drafts;        // [num_rows]; if not 0, the states get the inputs of the step's tokens alone, at most 17
  const i32* kept_state_rows;     // [num_kept_states], ascending: rows of which another state is written,
  const i32* kept_state_lengths;  // of so many of the row's tokens, replayed ones included, ascending within a row,
  const i32* kept_state_pages;    // [num_kept_states, state_pages], to these pages
  i64 num_tokens, num_rows, num_logits, num_last_tokens, num_input_rows, num_output_rows, num_groups, num_kept;
  i64 state_pages, num_kept_states, num_image_rows;

  const i32* group_slots(i64 group) const { return slots + group * num_tokens; }
  const i32* group_pages(i64 group) const { return kv_indices + group * kv_indptr[num_rows]; }
};

constexpr i64 PANEL = 64;  // output columns
constexpr i64 BLOCK = 16;  // tokens
constexpr i64 MAX_ACTIVATION_GROUP = 128;

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
inline i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
inline i64 larger(i64 a, i64 b) { return a > b ? a : b; }

inline i64 bits_of(i32 format) {
  constexpr i64 bits[] = {16, 32, 8, 4, 8, 8, 2, 6};
  return bits[format];
}
// Words of a column that have `count` elements, which are a multiple of 16.
inline i64 words_of(i32 format, i64 count) { return count * bits_of(format) / 32; }
inline i64 num_panels(const PackedLinear& w) {
  return w.interleaved ? ceil_div(w.out_features / 2, PANEL / 2) : ceil_div(w.out_features, PANEL);
}
inline i64 num_steps(const PackedLinear& w) { return words_of(w.format, round_up(w.in_features, 16)); }

}  // namespace aengine
