// Every compute op of the plan on operands of any floating-point storage (kernels/storage.h), each operand its own.
//
// The contract: an output is round(fp32 kernel(widened inputs)), one rounding to nearest even at the very end, bit for bit. Inputs
// (times their scales, in fp32: exact where those are powers of two, as kernels/fp8.h makes them) are widened, exactly, a block of
// rows or columns at a time, the fp32 kernel works on the block, and its results are narrowed; an operand that is f32 is used where
// it is. Blocks are cut only where the fp32 kernel's results do not depend on it, so the order of sums is that of
// docs/canonical-order.md, and statistics (norms', the softmax's, the loss's) are those of fp32. With `accumulate` the result is
// round(old + new). The one exception is Linear in fast mode, whose order is the library's, as in fp32.
//
// Shapes and meanings are those of the fp32 argument structs. In place means the same operand with the same type. Integer operands,
// `lse`, `stats`, `max`, `sums` and `nll` have the types that the plan gives them: i32 and f32.
#pragma once

#include <memory>

#include "kernels/experts.h"
#include "kernels/head_norm.h"
#include "kernels/kernels.h"
#include "kernels/latent_heads.h"
#include "kernels/storage.h"

namespace shardlab::kernels {

/// Factors of the blocks of a row-major matrix of `columns`: element (r, c) stands for its stored value times
/// values[(r / block_rows) * ceil(columns / block_columns) + c / block_columns]. `values` null: none.
struct BlockScales {
  const float* values = nullptr;
  int64_t columns = 0, block_rows = 1, block_columns = 1;
};

/// Place and storage type of an operand. `data` null: the operand is absent. Operands with scales are only read.
struct Stored {
  void* data = nullptr;
  DType dtype = DType::f32;
  BlockScales scales;
};

/// Memory lent for one call, taken piece by piece; or a counter of the memory that a kernel would take.
class Scratch {
 public:
  explicit Scratch(void* base) : base_(static_cast<char*>(base)) {}
  static Scratch counter() {
    Scratch scratch(nullptr);
    scratch.counting_ = true;
    return scratch;
  }
  bool counting() const { return counting_; }
  int64_t used() const { return used_; }
  /// n elements, 64-byte aligned; null while counting.
  template <class T>
  T* take(int64_t n) {
    return static_cast<T*>(take_bytes(n * static_cast<int64_t>(sizeof(T))));
  }
  void* take_bytes(int64_t bytes) {
    char* taken = counting_ ? nullptr : base_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return taken;
  }

 private:
  char* base_;
  int64_t used_ = 0;
  bool counting_ = false;
};

struct MixedNormForward {
  Stored x, gamma, beta, y;
  float* stats = nullptr;
  int64_t rows = 0, width = 0;
  float epsilon = 1e-5f;
  bool rms = false;
};
struct MixedNormInput {
  Stored dy, x, gamma, residual, dx;
  const float* stats = nullptr;
  int64_t rows = 0, width = 0;
  bool rms = false;
};
struct MixedNormWeight {
  Stored dy, x, dgamma, dbeta;
  const float* stats = nullptr;
  Tokens tokens;
  int64_t width = 0;
  bool rms = false, accumulate = false;
};

class LibraryProduct;

/// `product`: in fast mode the library's own product of the narrow operands, made for these shapes; null: blocks of
/// the fp32 kernel.
struct MixedLinearForward {
  Stored x, w, bias, y;
  int64_t rows = 0, in = 0, out = 0;
  Part in_part;
  bool canonical = false;
  const LibraryProduct* product = nullptr;
};
struct MixedLinearInput {
  Stored dy, w, dx;
  int64_t rows = 0, in = 0, out = 0;
  Part out_part;
  bool canonical = false;
  const LibraryProduct* product = nullptr;
};
struct MixedLinearWeight {
  Stored x, dy, dw, dbias;
  Tokens tokens;
  int64_t in = 0, out = 0;
  bool accumulate = false, canonical = false;
  const LibraryProduct* product = nullptr;
};

struct MixedRope {
  Stored qkv;
  Rope rope;  ///< all but qkv; with its table
};
/// Rows of latent attention put together, or, with `back`, their gradients taken apart.
struct MixedLatentHeads {
  Stored q, kv, k_rope, qkv;
  LatentHeads heads;  ///< of one sequence, whose tokens are its rows
  int64_t sequences = 1;
  int64_t positions_stride = 0;  ///< from the positions of one sequence to the next's
  bool back = false;
};
struct MixedHeadNormForward {
  Stored qkv, gamma_q, gamma_k, y;
  HeadNormForward norm;  ///< all but these
};
struct MixedHeadNormInput {
  Stored dy, qkv, gamma_q, gamma_k, dqkv;
  HeadNormInput norm;  ///< all but these
};
struct MixedHeadNormWeight {
  Stored dy, qkv, dgamma_q, dgamma_k;
  HeadNormWeight norm;  ///< all but these and scratch
};
struct MixedAttentionForward {
  AttentionShape shape;
  Stored qkv, o;
  float* lse = nullptr;
};
struct MixedAttentionInput {
  AttentionShape shape;
  Stored dout, o, qkv, dqkv;
  const float* lse = nullptr;
};
/// Takes rows of qkv apart into q and kv, or, with `back`, puts them together.
struct MixedSplitHeads {
  Stored qkv, q, kv;
  int64_t rows = 0;
  int heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  bool back = false;
};
/// Running results and partial ones are f32.
struct MixedAttentionBlockForward {
  AttentionBlockShape shape;
  Stored q, kv;
  float* o = nullptr;
  float* lse = nullptr;
  float* sums = nullptr;
  bool carry = false;
};
struct MixedAttentionBlockInput {
  AttentionBlockShape shape;
  Stored dout, o, q, kv, dq, dkv;
  const float* lse = nullptr;
  bool carry = false, carry_kv = false, by_head = false;
};
struct MixedAttentionMergeForward {
  AttentionMergeForward merge;  ///< all but o
  Stored o;
};
struct MixedAttentionMergeInput {
  AttentionMergeInput merge;  ///< all but y
  Stored y;
};
struct MixedActivationForward {
  Stored u, a;
  int64_t n = 0;
  bool swiglu = false;
};
struct MixedActivationInput {
  Stored da, u, du;
  int64_t n = 0;
  bool swiglu = false;
};
struct MixedResidualForward {
  Stored x, z, bias, y;
  int64_t rows = 0, width = 0;
};
struct MixedBiasWeight {
  Stored dy, dbias;
  Tokens tokens;
  int64_t width = 0;
  bool accumulate = false;
};
struct MixedDropout {
  Stored z;
  Dropout dropout;  ///< all but z
};
struct MixedEmbedForward {
  const int32_t* ids = nullptr;
  Stored table, x;
  int64_t rows = 0, width = 0, row_begin = 0, table_rows = 0;
};
struct MixedEmbedWeight {
  const int32_t* ids = nullptr;
  Stored dx, dtable;
  int64_t sequences = 1, tokens = 0, width = 0, row_begin = 0, table_rows = 0;
  bool accumulate = false;
  Part part{};
};
struct MixedPositionsForward {
  Stored x, table, y;
  int64_t sequences = 1, tokens = 0, width = 0;
};
struct MixedPositionsWeight {
  Stored dx, dtable;
  int64_t sequences = 1, tokens = 0, width = 0;
  bool accumulate = false;
  int64_t stride = 0;
};
struct MixedCrossEntropy {
  enum class Form : uint8_t { kFused, kLossOnly, kMax, kSum, kGrad } form = Form::kFused;
  Stored logits;
  CrossEntropy loss;  ///< all but logits
};
/// Operands of mixtures of experts (kernels/experts.h). Logits, weights and choices of a router are those of fp32.
struct MixedDispatch {
  Stored from, to;
  Dispatch dispatch;  ///< all but from, to, scratch
};
struct MixedCombineForward {
  Stored rows, y;
  CombineForward combine;  ///< all but rows, y, scratch
};
struct MixedCombineInput {
  Stored dy, rows, drows;
  CombineInput combine;  ///< all but dy, rows, drows, scratch
};
struct MixedGateForward {
  Stored x, gate, y;
  int64_t tokens = 0, width = 0;
};
struct MixedGateInput {
  Stored dy, x, gate, dx, dgate;
  int64_t tokens = 0, width = 0;
};
/// x may have scales each 128 of a row, w, [experts,out,in], scales of each expert's matrix, those of one expert behind another's.
struct MixedGroupedLinear {
  Stored x, w, y;
  GroupedLinear product;  ///< all but x, w, y, scratch
};
struct MixedGroupedLinearWeight {
  Stored x, dy, dw;
  GroupedLinearWeight product;  ///< all but x, dy, dw, scratch
};
/// Of the rows that are counted. `da` absent: forward.
struct MixedGroupedActivation {
  Stored u, da, to;
  RowCounts rows;
  int64_t width = 0;
  bool swiglu = false;
};
struct MixedAdd {
  Stored a, b, c;
  int64_t n = 0;
};
struct MixedCopy {
  Stored from, to;
  int64_t n = 0;
};
struct MixedFill {
  Stored x;
  int64_t n = 0;
  float value = 0;
};
struct MixedSquaredNorm {
  Stored x;
  int64_t n = 0;
  double* total = nullptr;  ///< overwritten; lanes as in Kernels::squared_norm
};
/// grad, param and the moments each in its own storage. The gradient is multiplied by `factor` first (fp32, rounded; not where it
/// is 1), which is where a clip factor or an inverse loss scale goes. `copy`, where there, gets the new parameter, narrowed: with a
/// master copy as `param` it is the parameter that computes.
struct MixedSgd {
  Stored grad, param, copy;
  float factor = 1;
  Sgd sgd;  ///< n, learning_rate, weight_decay
};
struct MixedAdamW {
  Stored grad, param, m, v, copy;
  float factor = 1;
  AdamW adamw;  ///< n, step, learning_rate, betas, epsilon, weight_decay
};
struct MixedLion {
  Stored grad, param, m, copy;
  float factor = 1;
  Lion lion;  ///< n, learning_rate, betas, weight_decay
};
struct MixedAdamW8bit {
  Stored grad, param;
  uint8_t* m = nullptr;
  uint8_t* v = nullptr;
  float* m_scale = nullptr;
  float* v_scale = nullptr;
  float factor = 1;
  AdamW8bit adamw;  ///< n, step, learning_rate, betas, epsilon, weight_decay
};

/// The kernels of one variant on mixed operands. Each takes scratch as it goes; called with a counting Scratch it only counts. A
/// narrow operand needs about 16 KiB of scratch, or one row if that is more. Other needs are blocks, each with the scratch of the
/// fp32 kernel on such a block. Linear F, I: 128 rows of the activation and 64 rows (columns) of the weight. Linear W: 192 columns
/// of the micro-batch's tokens. Products with experts: those of Linear on the rows of one; phase W on all rows that fit in canonical
/// mode, on 1,024 at a time in fast mode. Dispatch and Combine: the rows of one token. Attention: one sequence of one kv head's group, in and out. CrossEntropy: one row. Embed W: 64
/// columns of the micro-batch's tokens and three integers a token.
class MixedKernels {
 public:
  explicit MixedKernels(const Kernels& kernels) : k_(kernels), s_(storage_kernels(kernels)) {}

  void norm_forward(const MixedNormForward& a, Scratch& scratch) const;
  void norm_input(const MixedNormInput& a, Scratch& scratch) const;
  void norm_weight(const MixedNormWeight& a, Scratch& scratch) const;
  void linear_forward(const MixedLinearForward& a, Scratch& scratch) const;
  void linear_input(const MixedLinearInput& a, Scratch& scratch) const;
  void linear_weight(const MixedLinearWeight& a, Scratch& scratch) const;
  void rope(const MixedRope& a, Scratch& scratch) const;
  void latent_heads(const MixedLatentHeads& a, Scratch& scratch) const;
  void head_norm_forward(const MixedHeadNormForward& a, Scratch& scratch) const;
  void head_norm_input(const MixedHeadNormInput& a, Scratch& scratch) const;
  void head_norm_weight(const MixedHeadNormWeight& a, Scratch& scratch) const;
  void attention_forward(const MixedAttentionForward& a, Scratch& scratch) const;
  void attention_input(const MixedAttentionInput& a, Scratch& scratch) const;
  void split_heads(const MixedSplitHeads& a, Scratch& scratch) const;
  void attention_block_forward(const MixedAttentionBlockForward& a, Scratch& scratch) const;
  void attention_block_input(const MixedAttentionBlockInput& a, Scratch& scratch) const;
  void attention_merge_forward(const MixedAttentionMergeForward& a, Scratch& scratch) const;
  void attention_merge_input(const MixedAttentionMergeInput& a, Scratch& scratch) const;
  void activation_forward(const MixedActivationForward& a, Scratch& scratch) const;
  void activation_input(const MixedActivationInput& a, Scratch& scratch) const;
  void residual_forward(const MixedResidualForward& a, Scratch& scratch) const;
  void bias_weight(const MixedBiasWeight& a, Scratch& scratch) const;
  void dropout(const MixedDropout& a, Scratch& scratch) const;
  void embed_forward(const MixedEmbedForward& a, Scratch& scratch) const;
  void embed_weight(const MixedEmbedWeight& a, Scratch& scratch) const;
  void positions_forward(const MixedPositionsForward& a, Scratch& scratch) const;
  void positions_weight(const MixedPositionsWeight& a, Scratch& scratch) const;
  void cross_entropy(const MixedCrossEntropy& a, Scratch& scratch) const;
  void dispatch(const MixedDispatch& a, Scratch& scratch) const;
  void combine_forward(const MixedCombineForward& a, Scratch& scratch) const;
  void combine_input(const MixedCombineInput& a, Scratch& scratch) const;
  void gate_forward(const MixedGateForward& a, Scratch& scratch) const;
  void gate_input(const MixedGateInput& a, Scratch& scratch) const;
  void grouped_linear(const MixedGroupedLinear& a, Scratch& scratch) const;
  void grouped_linear_weight(const MixedGroupedLinearWeight& a, Scratch& scratch) const;
  void grouped_activation(const MixedGroupedActivation& a, Scratch& scratch) const;
  void add(const MixedAdd& a, Scratch& scratch) const;
  void copy(const MixedCopy& a, Scratch& scratch) const;
  void fill(const MixedFill& a, Scratch& scratch) const;
  void squared_norm(const MixedSquaredNorm& a, Scratch& scratch) const;
  void sgd(const MixedSgd& a, Scratch& scratch) const;
  void adamw(const MixedAdamW& a, Scratch& scratch) const;
  void lion(const MixedLion& a, Scratch& scratch) const;
  void adamw8bit(const MixedAdamW8bit& a, Scratch& scratch) const;

  const Kernels& fp32() const { return k_; }
  const StorageKernels& storage() const { return s_; }

 private:
  const Kernels& k_;
  const StorageKernels& s_;
};

}  // namespace shardlab::kernels
