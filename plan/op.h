// Operations: what the runtime launches with one call and times as one. Plain structs in one variant.
//
// Operands are slots of the segment, in the order stated beside each op: reads -> writes. Shapes: b sequences of a
// micro-batch on this rank, s tokens each, h hidden, V vocabulary rows held, f feed-forward. A write "(in place)"
// must be a view of the named read. Every backward op that takes part in a sum over tokens (phase W) overwrites its
// result unless `accumulate` is set, when it reads the old value as its last operand.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "plan/base/units.h"
#include "plan/buffer.h"

namespace shardlab {

/// F: forward. I: gradient of the input. W: gradient of the weights. None: neither.
enum class Phase : uint8_t { kNone, kF, kI, kW };

/// Reads the next sequences of the data set. -> tokens i32[b,s], or targets i32[b,s] (the tokens shifted by one).
/// `packed`: a sequence is several documents, and a token's target is the next token of its own document. With `positions`
/// -> positions i32[b,S]: the place of each of the S tokens of the whole sequence in its document, from 0, on every rank alike.
struct LoadBatch {
  bool targets = false;
  bool packed = false;
  bool positions = false;
};

/// Token embedding. F: tokens, table[V,h] -> x[b,s,h]; rows outside this rank's part of a sharded table give 0.
/// W: tokens, dx -> dtable.
struct Embed {
  Phase phase = Phase::kF;
  bool accumulate = false;
};

/// Learned positions. F: x, table[p,h], p >= s, (positions) -> y (in place of x): a token takes the row of its position
/// (`Plan::token_order`). W: dx, (positions) -> dtable[p,h]; rows of positions that are not here get 0.
/// `packed`, here and below: `positions` i32[b,S] of LoadBatch is an operand, and a token's position is the one in its document.
struct Positions {
  Phase phase = Phase::kF;
  bool packed = false;
  bool accumulate = false;
};

/// What an op of phase W adds up. Where ranks have parts of the tokens of each sequence, each adds up its own tokens, sequence by
/// sequence; the ranks add up these sums; and then the sequences are added up. So the order is that of the one sum on one rank.
enum class SumOver : uint8_t {
  kAll,        ///< tokens, then sequences: a sum over micro-batches
  kTokens,     ///< the tokens of each sequence apart: values of one micro-batch
  kSequences,  ///< what kTokens left: a sum over micro-batches
};

/// LayerNorm (with bias) or RMSNorm (without), over h.
/// F: x, gamma[h], (beta[h]) -> y, stats[b,s,2] (mean, 1/std) or [b,s,1] (1/rms).
/// I: dy, x, gamma, stats, (residual) -> dx; with `residual` the operand is added to the result.
/// W: dy, x, stats -> dgamma, (dbeta). kTokens: the results are f32[b,1,h]. kSequences: sums of gamma, (of beta) f32[b,1,h] ->
/// dgamma, (dbeta).
struct Norm {
  Phase phase = Phase::kF;
  bool rms = false;
  float epsilon = 1e-5f;
  bool residual = false;
  bool accumulate = false;
  SumOver over = SumOver::kAll;  ///< of W
};

/// y = x w^T (+ bias). Weights are [out, in] row-major. F: x[..,in], w, (bias[out]) -> y[..,out].
/// I: dy, w -> dx. W: x, dy -> dw, (dbias). Factors of 8 bits are followed by their scales (plan/README.md, "Factors of 8 bits").
/// `chunks` above 1: the rank's tokens of a sequence are cut into `chunks` equal parts, and the op works on one part. Its sums have the leaves
/// of that part (docs/canonical-order.md). F reads the part as a view of all tokens.
/// `strips` above 1, for F and I: each of `strips` ranks along an axis has a strip of every sequence, one behind the other. The op multiplies
/// the strip of the rank `turn` further along. There are two forms. Read 0 is the strip, and the result has all tokens, of which the op
/// writes the strip; with `carry` the last read holds the strips before it, and the op writes in place. Or read 0 has all tokens, and the
/// result is this rank's summand of the strip. The op Strips puts strips together.
struct Linear {
  Phase phase = Phase::kF;
  bool bias = false;
  bool accumulate = false;
  int chunks = 1;
  int strips = 1;
  int turn = 0;
  bool carry = false;
};

/// Strips of n ranks along an axis, put together: operand i is from the rank `step` * i further along, i = 0 ... n-1.
/// x[b,s/n,h], x ... -> y[b,s,h], each rank's strip of every sequence in its place. With `sum` the operands are summands of this rank's
/// strip: x, x ... -> y[b,s/n,h], their canonical tree in the order of the ranks, in fp32, rounded once.
struct Strips {
  int step = 1;
  bool sum = false;
};

/// Rotary positions on the q and k rows of qkv[b,s,groups*(q_per_kv+2)*d] (in place). qkv, (positions) -> qkv. I rotates back.
/// Rows are grouped by kv head: q_per_kv query heads, one key, one value, each of d = head_dim.
/// Rotation pairs element i with i + d/2 (as Llama's Hugging Face weights).
struct Rope {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float theta = 10000.0f;
  bool packed = false;
};

/// RMSNorm over each head of q and of k in qkv[b,s,groups*(q_per_kv+2)*d]; v passes unchanged. Stats are 1/rms, ordered by kv head: first its
/// query heads, then its key.
/// F: qkv, gamma_q[d], gamma_k[d] -> y[b,s,..], stats[b,s,heads+kv_heads]. I: dy, qkv, gamma_q, gamma_k, stats -> dqkv.
/// W: dy, qkv, stats -> dgamma_q, dgamma_k. kTokens: dy, qkv, stats -> two f32[b,n,d]: sums over the heads of the rank, for each of n leaves of
/// a sequence. n is the number of leaves that the rank has tokens of in canonical mode, else 1. kSequences: f32[b,n,d], f32[b,n,d] -> dgamma_q,
/// dgamma_k.
struct HeadNorm {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float epsilon = 1e-5f;
  bool accumulate = false;
  SumOver over = SumOver::kAll;  ///< of W
};

/// Rows of q, k and v of latent attention (plan/model.h, `LatentAttention`). d = nope + rope elements of a head of q and of k, v of a value.
/// F: q[b,s,heads*d], kv[b,s,heads*(nope+v)] (by head a key's nope elements and a value), k_rope[b,s,rope], (positions) ->
/// qkv[b,s,heads*(2d+v)], by head q, k, v: the last `rope` elements of each q, and k_rope, rotated as by Rope; k ends with k_rope in every
/// head. I: dqkv, (positions) -> dq, dkv, dk_rope: rotated back, and dk_rope summed over the heads of this rank.
struct LatentHeads {
  Phase phase = Phase::kF;
  int heads = 0;
  int nope = 0;
  int rope = 0;
  int v_dim = 0;
  float theta = 10000.0f;
  bool packed = false;
};

/// Causal attention core. With `window` w > 0, here and in AttentionBlock, a query at position i of the text sees only keys behind position
/// i - w: w of them, itself among them. F: qkv, (positions) -> o[b,s,heads*d], lse[b,heads,s]. I: do, o, lse, qkv, (positions) -> dqkv. `heads` and
/// `kv_heads` count the heads of this rank. `packed`: a token attends to the tokens of its own document. `document` tokens are expected
/// of one, for the work alone; 0: nothing is known, and the work is that of sequences of one document.
/// `v_dim`, here and below: elements of a head of v, and of o, where these are not head_dim; then qkv[b,s,heads*d+kv_heads*(d+v_dim)],
/// o[b,s,heads*v_dim], kv[..,kv_heads*(d+v_dim)].
struct Attention {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  bool packed = false;
  int64_t document = 0;
  int v_dim = 0;       ///< 0: head_dim
  int64_t window = 0;  ///< 0: all keys before
};

/// Takes the rows of qkv apart, for attention in blocks. F: qkv -> q[b,s,heads*d], kv[b,s,kv_heads*2*d] (by kv head a key and a value).
/// I: dq, dkv -> dqkv.
struct SplitHeads {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int v_dim = 0;  ///< 0: head_dim
};

/// Attention of the queries of one part of a sequence to the keys of a part, which may be another rank's: a query sees the keys whose
/// position is not after its own (plan/base/token_order.h). q[b,sq,heads*d]; kv[b,sk,kv_heads*2*d], by kv head a key and a value.
/// Along the axis that cuts the sequence q is a shard, and kv is this rank's own shard (`turn` 0), the block of the rank `turn`
/// further along, which is local, or the whole. Several blocks of one layer make one attention: `o` and `lse` below are those of all.
/// F: q, kv -> o f32[b,sq,heads*d], lse f32[b,heads,sq]. With `carry`: q, kv, o, lse -> o, lse (in place) of the blocks so far.
///   With `partial`: q, kv -> o, sums f32[b,heads,sq,2]: o is not divided yet, and sums are m and l of docs/canonical-order.md.
/// I: do, o, lse, q, kv, (dq), (dkv) -> dq, dkv. With `carry` dq is added to in place, with `carry_kv` dkv is. With `partial`
///   dkv is f32[b,sk,heads*2*d], by query head: AttentionMerge adds up a group's.
/// `packed` and `document` as of Attention; `positions` is the last read.
struct AttentionBlock {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int turn = 0;
  bool carry = false;
  bool carry_kv = false;
  bool partial = false;
  bool packed = false;
  int64_t document = 0;
  int v_dim = 0;       ///< 0: head_dim
  int64_t window = 0;  ///< as of Attention: one and the same for all blocks of a layer
};

/// What partial AttentionBlocks of the n ranks along an axis made, combined by the canonical tree in the order of the ranks. Operand
/// i is of the rank `step` * i further along, i = 0 ... n-1; one operand is of the whole.
/// F: o, sums, o, sums ... -> o, lse. I: dq, dq ... -> dq; with `keys` dkv by query head, dkv ... -> dkv[b,sk,kv_heads*2*d].
struct AttentionMerge {
  Phase phase = Phase::kF;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int step = 0;
  bool keys = false;
  int v_dim = 0;  ///< 0: head_dim
};

/// Elements of a head of v, of an op of attention.
template <class W>
constexpr int value_dim_of(const W& w) {
  return w.v_dim == 0 ? w.head_dim : w.v_dim;
}

/// F: u -> a. I: da, u -> du. gelu is the tanh form, u and a [b,s,f]. swiglu takes u[b,s,2f] of alternating gate and up
/// elements: a_i = silu(u_2i) * u_(2i+1).
/// `counted`: u[1,r,..] holds rows of experts, and the last read is their counts, as a GroupedLinear's; the other rows hold nothing.
/// `rows` of them are expected.
struct Activation {
  Phase phase = Phase::kF;
  bool swiglu = false;
  bool counted = false;
  int64_t rows = 0;
};

/// The router of a mixture of experts: chooses k of E experts for each token.
/// n ranks share the experts: rank i has the experts [i E/n, (i+1) E/n). A rank that shares them with no other has n = 1.
///
/// F: logits[b,s,E] (, bias f32[E]) (, chosen i32[b,sequence,k]) -> weights[b,s,k], choice i32[b,s,k], counts i32[n,l,E/n].
/// - choice: the experts with the k largest scores, by ascending number. Of two equal scores the expert with the lower number wins. With
///   `groups` above 1 the experts are in that many groups of neighbours, and a token chooses within its `groups_chosen` best groups. The
///   score of a group is its largest score; with `sigmoid` it is the largest sum of two scores.
/// - weights: the scores of the chosen experts. A score is the softmax over the logits of all experts; with `sigmoid` it is the sigmoid of
///   the expert's own logit. `normalise` divides the weights of a token by their sum; `factor` multiplies them.
/// - counts[i,j,e]: the number of rows that go to expert e of rank i from part j of the rank's tokens. l is 1, or the same number of parts
///   for each sequence (the leaves of docs/canonical-order.md).
///
/// I: dweights, logits, choice (, load f32[b,E]) -> dlogits. I also adds the gradients of two losses of the step, which no op computes:
/// - `balance` times the mean over sequences of the sum over experts e of (E / (k s) tokens that go to e) * (mean score of e);
/// - `z_loss` times the mean over tokens of the squared log-sum-exp of the logits.
/// `tokens` is the number of tokens of the step, which both means need.
///
/// `biased`: F reads a bias for each expert. Experts and groups are chosen by score plus bias; weights are of scores alone. I reads no bias.
///
/// `capacity`: an expert takes at most that many rows of each sequence. The rows of the first tokens of the text are taken, whatever their
/// weights; the others are dropped. A dropped row has ~e (a negative number) in choice in the place of its expert e, and counts leave the
/// row out. Its weight stays as it is, and its dweights must be 0. Both losses count dropped rows.
///
/// `sequence`: the rank has a part of each sequence, and this is the length of a whole one. With `balance`, I reads `load`: the tokens of
/// whole sequences that go to each expert (ExpertLoad, summed over the parts). With `capacity`, F reads `chosen`: what the tokens of all
/// parts chose (ChooseExperts, gathered); F then drops rows, and chooses nothing.
///
/// `Plan::expert_placement` gives each expert of a layer a place. Choice then holds places, in the order of the token's experts, and counts are by
/// place. Logits, biases and losses are by expert. Dispatch, GroupedLinear and Combine read the choice, so their "expert" means place.
///
/// Source: Shazeer et al. 2017; losses: DeepSeek-V3 (2024), section 2.1.2, and ST-MoE (Zoph et al. 2022); biases: Wang et al. 2024;
/// capacity: Lepikhin et al., "GShard" (2020), section 2.2.
struct Route {
  Phase phase = Phase::kF;
  bool sigmoid = false;
  bool normalise = false;
  float factor = 1;
  float balance = 0;
  float z_loss = 0;
  int groups = 1;
  int groups_chosen = 1;
  int64_t tokens = 1;
  int64_t sequence = 0;  ///< 0: sequences are whole
  bool biased = false;
  int64_t capacity = 0;  ///< 0: an expert takes all rows

  bool is_of_part() const { return sequence != 0; }
  bool reads_load() const { return phase == Phase::kI && is_of_part() && balance != 0; }
  bool reads_chosen() const { return phase == Phase::kF && is_of_part() && capacity != 0; }
};

/// The experts of each token before rows are dropped: logits[b,s,E] (, bias f32[E]) -> chosen i32[b,s,k]. Attributes and order are those of
/// Route. Ranks that have parts of a sequence gather it, so that each knows which rows of the other parts come before its own.
struct ChooseExperts {
  Phase phase = Phase::kF;
  bool sigmoid = false;
  int groups = 1;
  int groups_chosen = 1;
  bool biased = false;
};

/// choice i32[b,s,k] -> load f32[b,E]: the number of tokens of each sequence that go to each of E experts, by expert whatever their places.
/// `accumulate`: choice, load f32[E] -> load: the tokens of all sequences are added, in place.
struct ExpertLoad {
  bool accumulate = false;
};

/// Copies each token into one row for each of its experts.
/// F: x[b,s,h], choice i32[b,s,k] -> rows[n,r,h]. Rows are sorted by expert, then by token, and follow one another from the first row on.
/// I: drows[n,r,h], choice -> dx[b,s,h]: the sum of a token's rows, in the order of its experts; 0 for a token whose rows are all dropped.
/// Dropped rows (Route, `capacity`) have no row. Room: n r >= b s k, or with a capacity of C rows n r >= b min(s k, E C).
/// `experts`: E. `capacity`: C, as the router's; 0: none.
struct Dispatch {
  Phase phase = Phase::kF;
  int experts = 1;
  int64_t capacity = 0;
};

/// Multiplies each row by the weight matrix of its expert.
/// F: rows[1,r,in], w[e,out,in], counts i32[1,l,e] -> y[1,r,out]. I: dy, w, counts -> drows. W: rows, dy, counts -> dw; with `accumulate`
/// W adds to dw.
/// - e: the experts of this rank.
/// - rows: those of `sources` ranks, one rank's after another's; the rows of a rank are sorted by expert, then by token.
/// - counts[0,j,i]: rows of expert i in part j. l parts: l / sources for each source rank, in their order. Rows behind the counted ones hold nothing.
/// - `rows`: the number of rows that the plan expects; r is room for the most that can come.
/// With factors of 8 bits, scales are read behind the counts, one for each block of 128: of rows f32[1,r,ceil(width/128)], of w
/// f32[e,ceil(out/128),ceil(in/128)]. No block has elements of two experts.
struct GroupedLinear {
  Phase phase = Phase::kF;
  int sources = 1;
  int64_t rows = 0;
  bool accumulate = false;
};

/// Sums the rows of each token, each multiplied by its weight.
/// F: rows[n,r,h], weights[b,s,k], choice i32[b,s,k] -> y[b,s,h]. Rows lie as Dispatch lays them; a token's are added in the order of its experts.
/// I: dy[b,s,h], rows, weights, choice -> drows[n,r,h], dweights[b,s,k].
/// A dropped row adds nothing to y, and its dweights are 0. `experts`, `capacity`: as of Dispatch.
struct Combine {
  Phase phase = Phase::kF;
  int experts = 1;
  int64_t capacity = 0;
};

/// Every token times the sigmoid of a number of its own. F: x[b,s,h], gate[b,s,1] -> y. I: dy, x, gate -> dx, dgate.
struct Gate {
  Phase phase = Phase::kF;
};

/// F: x, z, (bias[h]) -> y = x + (z + bias). W: dy -> dbias. Its input gradients are dy itself. kTokens: dy -> f32[b,1,h].
/// kSequences: f32[b,1,h] -> dbias.
struct Residual {
  Phase phase = Phase::kF;
  bool bias = false;
  bool accumulate = false;
  SumOver over = SumOver::kAll;  ///< of W
};

/// F and I: z -> z (in place): kept elements are scaled by 1/(1-p); the mask is drawn from the seed, the step, `site`
/// (with the call's layer) and the logical element, so nothing is saved.
struct Dropout {
  Phase phase = Phase::kF;
  float p = 0;
  int site = 0;
};

/// Rows cut in parts that ranks exchange, and rows put together of parts (Ulysses): x[b,s,w] and y[n,s,b,w/n], part i of every row
/// in y[i]. x -> y, or, with `join`, y -> x. `parts` counts the parts of a row over all ranks. With `copies` of k each kv head
/// of a row of q, k and v goes to k parts: a part has 1/k of the head's queries, its key and its value. `join` adds the copies of a
/// key and of a value (of their gradients) by the canonical tree. `kv_heads` and `head_dim` are those of x, where there are copies.
struct Regroup {
  bool join = false;
  int parts = 1;
  int copies = 1;
  int kv_heads = 0;
  int head_dim = 0;
};

/// The named denominator of gradients that a loss scale has multiplied.
inline constexpr std::string_view kLossScale = "loss_scale";

/// Mean next-token cross-entropy over the step's `tokens` targets, on logits[b,s,V]. nll[b] is per sequence, unscaled.
/// kFused: logits, targets, (scale) -> nll, dlogits (in place of logits).   kLossOnly: logits, targets -> nll.
/// Vocabulary-parallel: kMax: logits -> max[b,s].   kSum: logits, targets, max -> sums[b,s,2] (sum of exp(x - max), target's
/// logit or 0).   kGrad: logits, targets, max, sums, (scale) -> nll, dlogits (in place).
/// scale f32[1]: dlogits are multiplied by it before they are rounded; the denominator of their type is `kLossScale`.
/// `chunks`: as in the Linear that made the logits; nll then covers the tokens of this part only. `words` above 0: columns of the whole
/// vocabulary from `words` on are padding. Padding takes no part in maximum and sums, and its dlogits are +0.
struct CrossEntropy {
  enum class Part : uint8_t { kFused, kLossOnly, kMax, kSum, kGrad } part = Part::kFused;
  int64_t tokens = 1;  ///< dlogits are divided by this
  int chunks = 1;
  int64_t words = 0;
};

/// a, b -> c = a + b, elementwise; c may be in place of a. Joins gradient contributions.
struct Add {};

/// -> x = value everywhere.
struct Fill {
  float value = 0;
};

/// losses... -> total: canonical tree sum of all elements of all reads, in operand order, times `factor`.
struct SumScalars {
  Rational factor;
};

/// gradients... -> squared norm f64[1]: the sum of squares of every element.
struct SquaredNorm {};

/// grad, param, (factor f32[1]) -> param (in place). A factor whose type has a named denominator divides it out of the gradient.
/// param -= lr * (factor * grad + decay * param). The learning rate is the step's.
struct Sgd {
  float weight_decay = 0;
};

/// grad, param, m, v, (factor f32[1], of grad) -> param, m, v (in place). Decoupled decay; bias-corrected. Loshchilov
/// & Hutter 2019.
struct AdamW {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0;
};

/// grad, param, m, (factor f32[1], of grad) -> param, m (in place). param -= lr * (sign(beta1 m + (1 - beta1) factor grad) + decay param),
/// then m = beta2 m + (1 - beta2) factor grad. Chen et al. 2023, algorithm 2.
struct Lion {
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float weight_decay = 0;
};

/// grad, param, m u8, v u8, m_scale f32, v_scale f32, (factor f32[1], of grad) -> param, m, v, m_scale, v_scale (in place). As AdamW,
/// on moments in 8 bits (plan/base/moment_codes.h): the rank's elements are cut in blocks from the first on, with a scale each.
/// Dettmers et al. 2022.
struct AdamW8bit {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0;
};

/// a -> b: the same elements in another buffer, space or dtype. If a is whole along an axis, b a shard along it, and both belong to one
/// micro-batch, b gets the rank's part of the elements.
struct Copy {
  /// The op restores the value that b had when the period began, if its predicate is set: after a step that must not stand, which is
  /// rare. A prediction assumes that the op does not run.
  bool restores = false;
};

/// A kernel by name: quantising, orthogonalising, loss scales. plan/named_kernels.h says what its name means. Of a name that is not
/// there `rule` says how types pass through it, and `flops` its work; of a known name both are left as they are here.
/// `counted`, of names whose row says so: x[n,r,..] holds rows of experts, packed from the first on, and the last read is their counts
/// i32[n,l,e]. The kernel goes through as many rows as they add up to; the other rows hold nothing, and neither do their results. `rows` of
/// them are expected.
struct Kernel {
  enum class Rule : uint8_t {
    kElementwise,  ///< all operands placed alike; partial operands are refused
    kLinear,       ///< elementwise and linear: partial passes through, all operands alike
    kContract,     ///< first two reads are contracted over their leading dims: a dim sharded in both gives partial
    kOpaque,       ///< writes' declared types are trusted; partial reads are refused
    kTrusted,      ///< as opaque, and partial reads are allowed: the kernel knows that it holds one summand (error feedback)
  } rule = Rule::kElementwise;
  std::string name;
  Phase phase = Phase::kNone;
  int64_t flops = 0;  ///< per launch
  bool counted = false;
  int64_t rows = 0;
};

enum class CollectiveKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll };
enum class ReduceOp : uint8_t { kSum, kMax };

/// The steps that a collective takes; every one has a generator in plan/collective_steps.h.
enum class Algorithm : uint8_t {
  kRing,
  kHalvingDoubling,  ///< recursive; groups of a power of two
  kDirect,           ///< every rank sends each peer its part, which sums in canonical tree order
  kTree,             ///< a binomial tree to and from rank 0: few steps, the whole buffer in each
  kHierarchical,     ///< rings within nodes, and rings across them between ranks of equal place (`Collective::per_node`)
};

/// Moves data among the n ranks of a group: src -> dst.
///
/// | kind           | src            | dst                                                            |
/// |----------------|----------------|----------------------------------------------------------------|
/// | all_reduce     | a summand      | the sum (`kSum`) or maximum (`kMax`), in the storage of src     |
/// | reduce_scatter | a summand      | this rank's 1/n of the sum: a view of src, or apart             |
/// | all_gather     | this rank's 1/n| the whole                                                      |
/// | broadcast      | the whole, at group index `root` | the same on every rank                        |
/// | all_to_all     | n equal, contiguous parts; part i is for rank i | the parts for this rank, by sender |
///
/// reduce_scatter and all_gather may cut any dim. If a dim before the cut one is larger than 1, a part consists of several strips
/// (`strips_of`), and src and dst do not share storage. Sums are not scaled: a scale belongs to the type of a buffer.
///
/// all_to_all with counts sends rows of experts: src, sent i32[n,l,e] (, received i32[1,n l,e]) -> dst.
/// - Rank i gets as many rows as sent[i,..] add up to. The rows for a rank lie behind the rows for the ranks before it, without gaps.
/// - `received` counts the rows that come, in the same way. A plan without it can be predicted, and not run.
/// - Rows that came go back with `sent` and `received` exchanged.
/// - `room`: the most rows that one rank sends to one other rank, by the capacity of experts; 0: all rows of src.
///
/// all_to_all with counts and choice, under kHierarchical: src, sent, received, choice i32[b,s,k] -> dst. The rows of src are copies of tokens, which
/// `choice` lays out (Dispatch). A token crosses to a node once, and is copied there for each of its experts (plan/row_levels.h).
/// - `across`: rows that a rank is expected to send to other nodes, where routes are even.
/// - With weights and tokens behind choice (weights f32[b,s,k], tokens [b,s,h]) the rows of src are tokens times their weights (Combine, phase I). A
///   token and its weights cross, and their products are made behind the exchange as they were made for src.
struct Collective {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  ReduceOp reduce = ReduceOp::kSum;
  CommId comm;
  Algorithm algorithm = Algorithm::kRing;
  int root = 0;
  int per_node = 1;    ///< of kHierarchical: ranks of the group on one node, neighbours in it
  int64_t room = 0;    ///< of an all_to_all with counts
  int64_t across = 0;  ///< of an all_to_all with counts and choice
};

/// x -> : to the rank `hop` further along the communicator's axis, which must have the matching Recv. `cyclic` wraps around.
struct Send {
  CommId comm;
  int hop = 1;
  bool cyclic = false;
};
/// -> x : from the rank `hop` further along (negative: from the one before).
struct Recv {
  CommId comm;
  int hop = -1;
  bool cyclic = false;
};

using Work = std::variant<LoadBatch, Embed, Positions, Norm, Linear, Rope, Attention, SplitHeads, AttentionBlock, AttentionMerge,
                          Activation, Residual, Dropout, CrossEntropy, Add, Fill, SumScalars, SquaredNorm, Sgd, AdamW, Lion,
                          AdamW8bit, Copy, Kernel, Collective, Send, Recv, Regroup, Route, Dispatch, GroupedLinear, Combine,
                          HeadNorm, Strips, ExpertLoad, Gate, LatentHeads, ChooseExperts>;

/// Whether an op of packed sequences goes by documents: LoadBatch, Positions, Rope, LatentHeads, Attention, AttentionBlock. No value for others.
inline std::optional<bool> packed_of(const Work& work) {
  return std::visit(
      []<class W>(const W& w) -> std::optional<bool> {
        if constexpr (requires { w.packed; })
          return w.packed;
        else
          return std::nullopt;
      },
      work);
}

/// Equal parts of a rank's tokens of a sequence, of which the op has one.
inline int chunks_of(const Work& work) {
  if (const auto* linear = std::get_if<Linear>(&work)) return linear->chunks;
  if (const auto* loss = std::get_if<CrossEntropy>(&work)) return loss->chunks;
  return 1;
}

/// One operation of a segment.
struct Op {
  Work work;
  std::vector<SlotId> reads;
  std::vector<SlotId> writes;
  StreamId stream{0};
  SlotId when;  ///< predicate i32[1], replicated on every axis: the op runs where it is not 0; none = always
  /// "attn.qkv": unique in its segment with the phase. F, I and W of one use of a parameter share it (a recomputed F adds
  /// ".again", a sum over tokens alone ".tokens"), and so do a send and its receive, less a leading "send" or "receive": `verify`
  /// matches by it.
  std::string label;
  std::string strategy;  ///< the pass that put it there
};

/// Whether an op runs only to take a step back.
inline bool restores(const Op& op) {
  const auto* copy = std::get_if<Copy>(&op.work);
  return copy != nullptr && copy->restores;
}

/// The read that holds the positions of tokens in their documents, or none: the last, or of Positions the second last before an old sum.
inline std::optional<size_t> positions_read(const Op& op) {
  if (!packed_of(op.work).value_or(false) || std::holds_alternative<LoadBatch>(op.work)) return std::nullopt;
  const auto* learned = std::get_if<Positions>(&op.work);
  return op.reads.size() - (learned != nullptr && learned->accumulate ? 2 : 1);
}

/// The read that counts the rows of experts which the op goes through, or none.
inline std::optional<size_t> counts_read(const Op& op) {
  if (std::holds_alternative<GroupedLinear>(op.work)) return 2;
  if (const auto* act = std::get_if<Activation>(&op.work); act != nullptr && act->counted) return act->phase == Phase::kI ? 2 : 1;
  if (const auto* kernel = std::get_if<Kernel>(&op.work); kernel != nullptr && kernel->counted) return op.reads.size() - 1;
  return std::nullopt;
}

/// An all_to_all of packed rows, by the counts of those that are sent and of those that are received.
inline bool moves_packed_rows(const Op& op) {
  const auto* c = std::get_if<Collective>(&op.work);
  return c != nullptr && c->kind == CollectiveKind::kAllToAll && op.reads.size() >= 3;
}

/// An all_to_all of packed rows in which a token crosses to a node once in the place of its rows.
inline bool crosses_once(const Op& op) { return moves_packed_rows(op) && op.reads.size() >= 4; }
/// One of them in which these rows are the token times weights.
inline bool crosses_weighed(const Op& op) { return moves_packed_rows(op) && op.reads.size() >= 6; }

/// Stable lower-case name of an op's kind: "linear", "all_reduce", "send".
std::string_view kind_of(const Work& work);
Phase phase_of(const Work& work);

/// Overload set for std::visit.
template <class... F>
struct Overload : F... {
  using F::operator()...;
};
template <class... F>
Overload(F...) -> Overload<F...>;

}  // namespace shardlab
