// The kernels of one kind of device, as an immutable table: what a back end for GPUs holds. The same sources make two tables: for
// CUDA, and for the host (kernels/cuda/emulate), where pointers are host pointers and a launch has ended when it returns.
//
// Every launch is pure over the arrays in its arguments: no globals, no allocation, no plan, no ranks, no synchronisation. It is
// queued on the stream given and returns nothing: whatever the driver or a library answers goes to the stream's LaunchCheck. A
// wrong argument stops the program (a bug of the caller: what `supported` says no to, an extent that does not fit, a null array).
//
// Arrays need the alignment of their element; where every array of a launch is aligned to 16 bytes and rows are whole multiples of
// 16 bytes, memory is accessed 16 bytes at a time. Outputs are overwritten whatever they held, unless `accumulate` says otherwise,
// and overlap inputs only where the docstring says so ("may be": the very same array).
//
// Element types. T is one of f32, bf16, f16: the type of activations and of their gradients, one per launch. Parameters, their
// gradients and optimizer state each may be f32 or T. Statistics, log-sum-exps, losses and sums are f32. All arithmetic is in fp32;
// a result is rounded once, to nearest even, when it is written.
//
// Order of sums: kernels/cuda/README.md. A launch gives the same bits on every run and device, and the bits of a logical result do
// not depend on how sequences, heads, contraction extents and vocabularies are shared out over ranks; only Matmul (the library) is
// free in its order.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "kernels/attention.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/named.h"
#include "kernels/cuda/operands.h"
#include "kernels/leaves.h"
#include "plan/base/dtype.h"
#include "plan/base/philox.h"

namespace shardlab::gpu {

using kernels::Part;
using kernels::Tokens;

/// The receiver of launch failures. The back end owns it; `failed` may throw. kernel: "norm_forward"; library: "cuda", "cublasLt";
/// code and text: the library's own. With cuda the error may stem from earlier work on the device.
class LaunchCheck {
 public:
  virtual void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) = 0;

 protected:
  ~LaunchCheck() = default;
};

/// The target of launches. handle: a cudaStream_t; for the host table an emulate::Settings*
/// (kernels/cuda/emulate/settings.h), or null.
struct Stream {
  void* handle = nullptr;
  LaunchCheck* check = nullptr;  ///< never null
};

// ---- embedding and positions

/// F. ids i32[rows], table[table_rows,width] (f32 or T) -> x[rows,width]. The table holds rows row_begin .. of the vocabulary; an
/// id outside of it gives a row of +0.
struct EmbedForward {
  const int32_t* ids = nullptr;
  Input table;
  Output x;
  int64_t rows = 0, width = 0;
  int64_t row_begin = 0, table_rows = 0;
};

/// W. ids i32[sequences,tokens], dx[sequences,tokens,width] -> dtable[table_rows,width] (f32 or T); rows without a token become +0.
/// With `accumulate` the new sum is added to the rows that have one.
struct EmbedWeight {
  const int32_t* ids = nullptr;
  Input dx;
  Output dtable;
  int64_t sequences = 1, tokens = 0, width = 0;
  int64_t row_begin = 0, table_rows = 0;
  bool accumulate = false;
  Part part{};             ///< which tokens of a sequence they are, where it is cut
  int64_t ids_stride = 0;  ///< from one sequence's ids to the next's, where they lie apart; 0: tokens
};

/// F. x[sequences,tokens,width], table[tokens,width] (f32 or T) -> y = x + table; y may be x. With `positions`: token t of sequence b
/// takes row positions[b * positions_stride + t] of a table of `table_rows`, and nothing where there is no such row.
struct PositionsForward {
  Input x, table;
  Output y;
  int64_t sequences = 1, tokens = 0, width = 0;
  const int32_t* positions = nullptr;
  int64_t positions_stride = 0, table_rows = 0;
};

/// W. dx[sequences,tokens,width] -> dtable[tokens,width] (f32 or T): the tree over sequences, plus +0. With `accumulate`: old + new.
/// (Rows of a longer table: Fill.)
struct PositionsWeight {
  Input dx;
  Output dtable;
  int64_t sequences = 1, tokens = 0, width = 0;
  bool accumulate = false;
  int64_t stride = 0;  ///< elements from one sequence of dx to the next, where they lie apart; 0: tokens * width
};

// ---- norms

/// F. x[rows,width], gamma, beta [width] (f32 or T; beta unused with rms) -> y[rows,width], stats f32 [rows,2] (mean, 1/std) or,
/// with rms, [rows,1] (1/rms). y may be x.
struct NormForward {
  Input x, gamma, beta;
  Output y;
  float* stats = nullptr;
  int64_t rows = 0, width = 0;
  float epsilon = 1e-5f;
  bool rms = false;
};

/// I. dy, x[rows,width], gamma, stats, residual[rows,width] (or null) -> dx (+ residual); dx may be dy or residual.
struct NormInput {
  Input dy, x, gamma;
  const float* stats = nullptr;
  Input residual;
  Output dx;
  int64_t rows = 0, width = 0;
  bool rms = false;
};

/// W. dy, x[rows,width], stats -> dgamma, dbeta [width] (f32 or T; dbeta unused with rms). rows = tokens.rows().
struct NormWeight {
  Input dy, x;
  const float* stats = nullptr;
  Output dgamma, dbeta;
  Tokens tokens;
  int64_t width = 0;
  bool rms = false;
  bool accumulate = false;
  Scratch scratch;
};

/// Rows of a token as kernels::HeadNormShape (kernels/head_norm.h) has them: by kv head its query heads, one key, one value.
struct HeadNormShape {
  Tokens tokens;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank
  constexpr int64_t queries() const { return heads / kv_heads; }
  constexpr int64_t stats_width() const { return int64_t{heads} + kv_heads; }
};

/// F. qkv, gamma_q[head_dim], gamma_k[head_dim] (f32 or T) -> y like qkv, stats f32[rows,heads+kv_heads]: 1/rms, by kv head of its query
/// heads and of its key. Values pass as they are.
struct HeadNormForward {
  HeadNormShape shape;
  Input qkv, gamma_q, gamma_k;
  Output y;
  float* stats = nullptr;
  float epsilon = 1e-5f;
};

/// I. dy, qkv, gammas, stats -> dqkv.
struct HeadNormInput {
  HeadNormShape shape;
  Input dy, qkv, gamma_q, gamma_k;
  const float* stats = nullptr;
  Output dqkv;
};

/// W. dy, qkv, stats -> dgamma_q, dgamma_k [head_dim] (f32 or T). `apart`: sums of each sequence stay apart, one (1), or one for each leaf
/// of it that the tokens are of: [sequences,apart,head_dim].
struct HeadNormWeight {
  HeadNormShape shape;
  Input dy, qkv;
  const float* stats = nullptr;
  Output dgamma_q, dgamma_k;
  bool accumulate = false;
  int64_t apart = 0;
  Scratch scratch;
};

// ---- linear: y = x w^T + bias, w [out,in] row-major. x, dy of T, w of T (dy also f32, but not for Matmul); bias f32 or T.

/// F. x[rows,in], w[out,in], bias[out] (or null) -> y[rows,out] of T or f32.
struct LinearForward {
  Input x, w, bias;
  Output y;
  int64_t rows = 0, in = 0, out = 0;
  Part in_part;     ///< which part of the logical contraction extent `in` is; Matmul ignores it
  Scratch scratch;  ///< Matmul's workspace: any size, the more the more algorithms; the fixed-order kernel needs none
};

/// I. dy[rows,out], w[out,in] -> dx[rows,in] of T or f32.
struct LinearInput {
  Input dy, w;
  Output dx;
  int64_t rows = 0, in = 0, out = 0;
  Part out_part;
  Scratch scratch;
};

/// W. x[rows,in], dy[rows,out] -> dw[out,in] of T or f32. rows = tokens.rows(). dbias: BiasWeight on the same dy.
/// `accumulate`: old + new (in canonical mode plans never ask for it).
struct LinearWeight {
  Input x, dy;
  Output dw;
  Tokens tokens;
  int64_t in = 0, out = 0;
  bool accumulate = false;
  Scratch scratch;
};

/// The matrix product of the device's library (cuBLASLt), with its handle and its choice of algorithm for each shape. One per
/// device and thread. On the host the fixed-order kernels stand in for it.
class Matmul {
 public:
  virtual ~Matmul() = default;
  virtual void forward(const LinearForward& a, Stream s) = 0;
  virtual void input(const LinearInput& a, Stream s) = 0;
  virtual void weight(const LinearWeight& a, Stream s) = 0;
  /// "cublasLt 13.1.0": what results name.
  virtual std::string_view name() const = 0;
};
struct MatmulOptions {
  bool tf32 = false;  ///< fp32 products may round their factors to tf32
};

/// Rows cut in parts, or put together of parts with `join`: x[sequences,tokens,row], y[parts,tokens,sequences,width], one type, as
/// kernels::Regroup (kernels/regroup.h) has them; at most 16 copies.
struct Regroup {
  Input from;
  Output to;
  int64_t sequences = 1, tokens = 0, parts = 1, width = 0;
  bool join = false;
  int copies = 1;
  int64_t head_dim = 0;  ///< where there are copies
};

// ---- rotary positions, attention

/// F, or I with `backward` (rotates back), in place: q and k of qkv[sequences,tokens,kv_heads*(heads/kv_heads+2)*head_dim], rows
/// grouped by kv head (its query heads, one key, one value). table f32[tokens,head_dim/2,2]: cosine and sine of each angle, as
/// kernels::rope_table (kernels/rope.h) fills it on the host.
struct Rope {
  Output qkv;
  int64_t sequences = 1, tokens = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank; head_dim even
  bool backward = false;
  const float* table = nullptr;
  /// Of packed documents: token t of sequence b takes row positions[b * positions_stride + t] of the table, which has `table_rows`; a
  /// position outside of it takes the nearest.
  const int32_t* positions = nullptr;
  int64_t positions_stride = 0, table_rows = 0;
};

/// Rows of q, k and v of latent attention, put together or, with `back`, taken apart: arrays and sums as kernels::LatentHeads
/// (kernels/latent_heads.h) has them, all of T. `back`: dqkv is read, and dq, dkv, dk_rope are written.
struct LatentHeads {
  Output q, kv, k_rope, qkv;
  int64_t sequences = 1, tokens = 0;
  int heads = 0;                          ///< on this rank
  int nope = 0, rope = 0, value_dim = 0;  ///< rope: even
  bool back = false;
  const float* table = nullptr;  ///< f32[table_rows,rope/2,2], as Rope's; positions as Rope's
  const int32_t* positions = nullptr;
  int64_t positions_stride = 0, table_rows = 0;
  constexpr int64_t depth() const { return int64_t{nope} + rope; }
  constexpr int64_t q_width() const { return heads * depth(); }
  constexpr int64_t kv_width() const { return int64_t{heads} * (nope + value_dim); }
  constexpr int64_t qkv_width() const { return heads * (2 * depth() + value_dim); }
};

/// qkv as Rope's, but that a value may have `value_dim` elements. kv_heads divides heads; head_dim is even, and neither width is over 256
/// (64 and 128 are the fast ones).
struct AttentionShape {
  int64_t sequences = 1, tokens = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank
  bool canonical = false;                     ///< sums of 16 leaves of the sequence, which can be cut over ranks
  TokenOrder order{};                         ///< of the tokens; canonical: its parts divide 16
  const int32_t* positions = nullptr;         ///< as kernels::AttentionShape's: the documents that a query sees no further than
  int64_t window = 0;                         ///< as kernels::AttentionShape's
  int value_dim = 0;                          ///< elements of a head of v and o; 0: head_dim
  constexpr int values() const { return value_dim == 0 ? head_dim : value_dim; }
  constexpr int64_t qkv_width() const { return int64_t{heads} * head_dim + int64_t{kv_heads} * (head_dim + values()); }
  constexpr int64_t out_width() const { return int64_t{heads} * values(); }
};

/// F. qkv -> o[sequences,tokens,heads*values], lse f32[sequences,heads,tokens]. Causal. bf16 and f16 run on the tensor cores
/// with fp32 sums (probabilities are rounded to T before they meet the values); f32, and all types in leaves, in an order of their own,
/// within documents, within a window or with values of another width, on the fp32 units. No S x S matrix.
/// Flops: 2 sequences heads tokens (tokens + 1) head_dim. Source: Dao 2023 (FlashAttention-2).
struct AttentionForward {
  AttentionShape shape;
  Input qkv;
  Output o;
  float* lse = nullptr;
};

/// I. dout, o, lse, qkv -> dqkv, all of it overwritten. Scores are computed twice (once for dq, once for dk and dv), so that no
/// sum is shared between blocks and the bits are fixed: 3.5 times F's flops, 2.5 of them useful.
struct AttentionInput {
  AttentionShape shape;
  Input dout, o;
  const float* lse = nullptr;
  Input qkv;
  Output dqkv;
  Scratch scratch;
};

/// Rows of qkv taken apart, q[rows,heads*head_dim] and kv[rows,kv_heads*(head_dim+value_dim)]; with `back` put together. Types may differ.
struct SplitHeads {
  Output qkv, q, kv;
  int64_t rows = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  bool back = false;
  int value_dim = 0;  ///< 0: head_dim
};

/// Queries at the places [first_query, first_query + queries) of a sequence of `tokens`, keys and values at [first_key, first_key +
/// keys). Where canonical, both are whole leaves.
struct AttentionBlockShape {
  int64_t sequences = 1, queries = 0, keys = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int64_t tokens = 0, first_query = 0, first_key = 0;
  TokenOrder order{};
  bool canonical = false;
  const int32_t* positions = nullptr;  ///< of the whole sequence
  int64_t window = 0;                  ///< as kernels::AttentionShape's
  int value_dim = 0;                   ///< as AttentionShape's
  constexpr int values() const { return value_dim == 0 ? head_dim : value_dim; }
  constexpr int widest() const { return values() > head_dim ? values() : head_dim; }
};

/// F. As kernels::AttentionBlockForward; q and kv of any type, worked on as fp32.
struct AttentionBlockForward {
  AttentionBlockShape shape;
  Input q, kv;
  float* o = nullptr;
  float* lse = nullptr;
  float* sums = nullptr;
  bool carry = false;
};

/// I. As kernels::AttentionBlockInput; operands of any type.
struct AttentionBlockInput {
  AttentionBlockShape shape;
  Input dout, o;
  const float* lse = nullptr;
  Input q, kv;
  Output dq, dkv;
  bool carry = false, carry_kv = false, by_head = false;
  Scratch scratch;
};

/// As kernels::AttentionMergeForward and kernels::AttentionMergeInput, but for the type of the result.
struct AttentionMergeForward {
  kernels::AttentionMergeForward merge;  ///< all but o
  Output o;
};
struct AttentionMergeInput {
  kernels::AttentionMergeInput merge;  ///< all but y
  Output y;
};

// ---- elementwise

/// F. gelu (tanh form): u[n] -> a[n], a may be u. swiglu: u[2n], a_i = silu(u_2i) * u_(2i+1) -> a[n].
struct ActivationForward {
  Input u;
  Output a;
  int64_t n = 0;  ///< elements of a
  bool swiglu = false;
};

/// I. da[n], u -> du (like u). du may be u, and for gelu da.
struct ActivationInput {
  Input da, u;
  Output du;
  int64_t n = 0;  ///< elements of da
  bool swiglu = false;
};

/// F. x, z[rows,width], bias[width] (f32 or T, or null) -> y = x + (z + bias); y may be x or z.
struct ResidualForward {
  Input x, z, bias;
  Output y;
  int64_t rows = 0, width = 0;
};

/// W of a bias (residual's, linear's). dy[rows,width] -> dbias[width] (f32 or T), the sum over tokens. With `accumulate`:
/// old + new.
struct BiasWeight {
  Input dy;
  Output dbias;
  Tokens tokens;
  int64_t width = 0;
  bool accumulate = false;
  Scratch scratch;
};

/// F and I, in place: kept elements times 1/(1-p), the others +0. The mask is the mask of kernels::Dropout (kernels/dropout.h), bit
/// by bit: random_bits(key, e) >= p * 2^32 with
///   e = ((sequence_begin + b) * tokens_total + token_begin + t) * width_total + width_begin + c.
/// A total of 0 means the extent held.
struct Dropout {
  Output z;
  int64_t sequences = 1, tokens = 0, width = 0;
  int64_t sequence_begin = 0;
  int64_t token_begin = 0, tokens_total = 0;
  int64_t width_begin = 0, width_total = 0;
  float p = 0;  ///< in [0, 1)
  RandomKey key;
};

/// c[n] = a[n] + b[n], each of T by itself, or all of f64. c may be a or b of its type.
struct Add {
  Input a, b;
  Output c;
  int64_t n = 0;
};

/// x[n] = value, of T or f64.
struct Fill {
  Output x;
  int64_t n = 0;
  float value = 0;
};

/// to[n] = from[n], each of T or f64 (equal bytes of any type: the back end's memory copy). from and to are apart, or the same
/// where the types have one size.
struct Cast {
  Input from;
  Output to;
  int64_t n = 0;
};

// ---- loss

/// Next-token cross-entropy; the parts and their operands are those of kernels::CrossEntropy (kernels/cross_entropy.h):
///   fused:     logits, targets -> nll, logits overwritten by dlogits
///   loss_only: logits, targets -> nll
///   max:       logits -> max[rows]
///   sum:       logits, targets, max -> sums[rows,2]: sum of exp(x - max), the target's logit or +0 where it is not held
///   grad:      targets, max, sums -> nll, logits overwritten by dlogits
/// logits of T; all else f32. rows = tokens.rows(). Between the parts: the maximum, then the sum, over ranks.
/// A target outside of the vocabulary: the row's nll becomes NaN.
struct CrossEntropy {
  Output logits;
  const int32_t* targets = nullptr;
  float* nll = nullptr;  ///< [tokens.sequences], a plain sum over tokens
  float* max = nullptr;
  float* sums = nullptr;
  Tokens tokens;
  int64_t vocab = 0;
  Part vocab_part;
  int64_t words = 0;  ///< as of kernels::CrossEntropy
  int64_t loss_tokens = 1;
  const float* loss_scale = nullptr;  ///< fused and grad: dlogits are multiplied by it; none: by 1
  Scratch scratch;                    ///< fused, loss_only and grad
};

// ---- sums

/// A list of arrays of one type, on the host: read before the launch returns.
struct ArrayList {
  const void* const* data = nullptr;
  const int64_t* sizes = nullptr;  ///< elements of each
  int count = 0;
};

/// total f32[1] = (tree over all elements of all parts f32, in order) * (float)((double)factor_num / factor_den). No parts: +0.
struct SumScalars {
  ArrayList parts;
  int64_t factor_num = 1, factor_den = 1;
  float* total = nullptr;
  Scratch scratch;
};

/// total f64[1] = sum of squares, in fp64, of every element of every part (of dtype T). No parts: +0.
struct SquaredNorm {
  ArrayList parts;
  DType dtype = DType::f32;
  double* total = nullptr;
  Scratch scratch;
};

/// The sum over ranks of a collective among ranks that share a device: every outs[j][n] = the tree over parts[0 .. count-1], or
/// their maximum, elementwise. f32, bf16, f16 (sums in fp32, rounded once), f64, i32, i64. Each element is read from every part
/// before it is written, so an out may be one of the parts. all_reduce: outs = parts; reduce_scatter: one launch a rank, on its
/// slice of every part.
struct Combine {
  static constexpr int kMost = 64;  ///< parts, and outs
  const void* const* parts = nullptr;
  int count = 0;
  void* const* outs = nullptr;
  int out_count = 1;
  int64_t n = 0;
  DType dtype = DType::f32;
  bool maximum = false;
};

// ---- optimizers, in place. grad f32 or T; param f32 or T; m and v f32. factor: what gradients are multiplied by, in fp32;
// none: 1.

/// param[n] -= learning_rate * (grad[n] + weight_decay * param[n]).
struct Sgd {
  Input grad;
  Output param;
  int64_t n = 0;
  float learning_rate = 0;
  float weight_decay = 0;
  const float* factor = nullptr;
};

/// Decoupled weight decay, bias-corrected. `step` counts optimizer steps from 0. Source: Loshchilov & Hutter 2019.
struct AdamW {
  Input grad;
  Output param;
  float* m = nullptr;
  float* v = nullptr;
  int64_t n = 0;
  int64_t step = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0;
  const float* factor = nullptr;
};

/// With c = beta1 m + (1 - beta1) grad: param -= learning_rate * (sign(c) + weight_decay * param); then m = beta2 m + (1 - beta2) grad. Source:
/// Chen et al. 2023, algorithm 2.
struct Lion {
  Input grad;
  Output param;
  float* m = nullptr;
  int64_t n = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.99f;
  float weight_decay = 0;
  const float* factor = nullptr;
};

/// AdamW on moments in 8 bits (plan/base/moment_codes.h): m[n], v[n], m_scale[blocks], v_scale[blocks]. Source: Dettmers et al. 2022.
struct AdamW8bit {
  Input grad;
  Output param;
  uint8_t* m = nullptr;
  uint8_t* v = nullptr;
  float* m_scale = nullptr;
  float* v_scale = nullptr;
  int64_t n = 0;
  int64_t step = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0;
  const float* factor = nullptr;
};

/// Scratch in bytes. Only extents and flags of the arguments are looked at.
int64_t scratch_bytes(const NormWeight& a);
int64_t scratch_bytes(const HeadNormWeight& a);
int64_t scratch_bytes(const BiasWeight& a);
int64_t scratch_bytes(const AttentionInput& a);
int64_t scratch_bytes(const AttentionBlockInput& a);
int64_t scratch_bytes(const CrossEntropy& a);
int64_t scratch_bytes(const SumScalars& a);
int64_t scratch_bytes(const SquaredNorm& a);

/// Whether T may be `t`.
constexpr bool is_activation_type(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }
/// Why attention refuses a shape ("head_dim 320 is over 256"), or empty.
std::string_view attention_refusal(const AttentionShape& shape);
std::string_view attention_refusal(const AttentionBlockShape& shape);

/// The table. One launch an op; `matmul` opens the library.
struct Kernels {
  std::string_view name;  ///< "cuda", "emulated"

  void (*embed_forward)(const EmbedForward&, Stream);
  void (*embed_weight)(const EmbedWeight&, Stream);
  void (*positions_forward)(const PositionsForward&, Stream);
  void (*positions_weight)(const PositionsWeight&, Stream);
  void (*norm_forward)(const NormForward&, Stream);
  void (*norm_input)(const NormInput&, Stream);
  void (*norm_weight)(const NormWeight&, Stream);
  void (*head_norm_forward)(const HeadNormForward&, Stream);
  void (*head_norm_input)(const HeadNormInput&, Stream);
  void (*head_norm_weight)(const HeadNormWeight&, Stream);
  void (*linear_forward)(const LinearForward&, Stream);  ///< the three in canonical order (own fixed-order product)
  void (*linear_input)(const LinearInput&, Stream);
  void (*linear_weight)(const LinearWeight&, Stream);
  void (*rope)(const Rope&, Stream);
  void (*latent_heads)(const LatentHeads&, Stream);
  void (*attention_forward)(const AttentionForward&, Stream);
  void (*attention_input)(const AttentionInput&, Stream);
  void (*split_heads)(const SplitHeads&, Stream);
  void (*attention_block_forward)(const AttentionBlockForward&, Stream);
  void (*attention_block_input)(const AttentionBlockInput&, Stream);
  void (*attention_merge_forward)(const AttentionMergeForward&, Stream);
  void (*attention_merge_input)(const AttentionMergeInput&, Stream);
  void (*regroup)(const Regroup&, Stream);
  void (*activation_forward)(const ActivationForward&, Stream);
  void (*activation_input)(const ActivationInput&, Stream);
  void (*route_forward)(const RouteForward&, Stream);
  void (*route_input)(const RouteInput&, Stream);
  void (*expert_load)(const ExpertLoad&, Stream);
  void (*update_router_bias)(const UpdateRouterBias&, Stream);
  void (*fit_rows)(const FitRows&, Stream);
  void (*dispatch)(const Dispatch&, Stream);
  void (*combine_forward)(const CombineForward&, Stream);
  void (*combine_input)(const CombineInput&, Stream);
  void (*gate_forward)(const GateForward&, Stream);
  void (*gate_input)(const GateInput&, Stream);
  void (*grouped_linear)(const GroupedLinear&, Stream);
  void (*grouped_linear_weight)(const GroupedLinearWeight&, Stream);
  void (*grouped_activation)(const GroupedActivation&, Stream);
  void (*residual_forward)(const ResidualForward&, Stream);
  void (*bias_weight)(const BiasWeight&, Stream);
  void (*dropout)(const Dropout&, Stream);
  void (*add)(const Add&, Stream);
  void (*fill)(const Fill&, Stream);
  void (*cast)(const Cast&, Stream);
  void (*cross_entropy_fused)(const CrossEntropy&, Stream);
  void (*cross_entropy_loss_only)(const CrossEntropy&, Stream);
  void (*cross_entropy_max)(const CrossEntropy&, Stream);
  void (*cross_entropy_sum)(const CrossEntropy&, Stream);
  void (*cross_entropy_grad)(const CrossEntropy&, Stream);
  void (*sum_scalars)(const SumScalars&, Stream);
  void (*squared_norm)(const SquaredNorm&, Stream);
  void (*combine)(const Combine&, Stream);
  void (*sgd)(const Sgd&, Stream);
  void (*adamw)(const AdamW&, Stream);
  void (*lion)(const Lion&, Stream);
  void (*adamw8bit)(const AdamW8bit&, Stream);
  void (*numbers)(const Numbers&, Stream);
  void (*amax)(const Amax&, Stream);
  void (*multiply)(const Multiply&, Stream);
  void (*subtract)(const Subtract&, Stream);
  void (*quantise)(const Quantise&, Stream);
  void (*dequantise)(const Dequantise&, Stream);
  void (*dequantise_sum)(const DequantiseSum&, Stream);
  void (*sum_rows)(const SumRows&, Stream);
  void (*swap_leading)(const SwapLeading&, Stream);
  void (*select)(const Select&, Stream);
  void (*scatter)(const Scatter&, Stream);
  void (*zero_selected)(const ZeroSelected&, Stream);
  void (*orthogonalise)(const Orthogonalise&, Stream);
  void (*start_basis)(const StartBasis&, Stream);
  void (*fold_momentum)(const FoldMomentum&, Stream);
  void (*frozen_adam)(const FrozenAdam&, Stream);
  void (*outer_step)(const OuterStep&, Stream);

  /// Opens the library's matmul on the current device; null when that fails, which `check` has then been told.
  std::unique_ptr<Matmul> (*matmul)(const MatmulOptions&, LaunchCheck& check);
};

/// The table for CUDA: in target shardlab_kernels_cuda, which exists where the toolkit does (SHARDLAB_WITH_CUDA is then defined).
const Kernels& cuda_kernels();
/// The table of the same sources on the host: in target shardlab_kernels_emulated, which always exists. For tests.
const Kernels& emulated_kernels();

}  // namespace shardlab::gpu
