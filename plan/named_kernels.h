// Kernels that a plan calls by name: one row each says its operands, how far `verify` follows it, its work and its scratch.
//
// A strategy and a plan text give the name; everything else is the row's. A name that no row has can still be said in a plan written
// by hand, with a rule and flops of its own: `verify` counts it as the rule says, and no strategy may lower one (strategies/lower.cpp).
// The kernels themselves are bound by runtime/named_kernels.h and runtime/cuda/named.h.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "plan/buffer.h"
#include "plan/op.h"
#include "plan/plan.h"

namespace shardlab {

/// What `verify` knows of a kernel's result beside its type.
enum class KernelMeaning : uint8_t {
  kNone,
  kLargest,     ///< a maximum of absolute values: repeated elements change nothing, and it may continue another tensor's
  kOverflow,    ///< a flag, whether some element is not finite: combined by a maximum
  kScale,       ///< a scale made from a kLargest result, with the placement of that result
  kRounding,    ///< the first read in fewer bits: same shape, scale and micro-batch
  kClipFactor,  ///< the clipping factor, made from the squared norm of all gradients
  kFollowLoad,  ///< a router's bias (the second read) after its update by the load of its layer's experts in the step (the first read)
  kFit,  ///< counts of rows (the second read) cut off where the rows (the first read) end, and a flag whether any was: a maximum
};

/// Scratch on a CPU (plan/work.cpp).
enum class KernelScratch : uint8_t {
  kBlocks,      ///< a block in fp32 for every operand in 16 or 8 bits
  kNarrowCopy,  ///< one block in fp32 if both operands have 16 or 8 bits
  kTree,        ///< a block for every part that is added up
  kBasis,       ///< 8 bytes an element
  kProjection,  ///< a block of a product
  kDraws,       ///< a block of draws
  kScattered,   ///< as kTree, and a position in each part
  kTwoPasses,   ///< as kBlocks, with two blocks for the first read: for the scales, and for the elements
  kOneBlock,    ///< one block for all operands
};

/// Scratch on a GPU (plan/device_scratch.cpp).
enum class KernelDeviceScratch : uint8_t {
  kNone,
  kSearch,     ///< 4 bytes a span of elements, and 8
  kSelection,  ///< 16 counts a span
  kBasis,      ///< 8 bytes an element
  kCounter,    ///< 4 bytes
};

/// One kernel.
struct NamedKernel {
  std::string_view name;
  std::string_view operands;  ///< as the documentation gives them: "(x, factor f32[1]) -> y"
  std::string_view what;      ///< one line of kernels/README.md
  int reads = 1, writes = 1;  ///< at least
  Kernel::Rule rule = Kernel::Rule::kOpaque;
  uint32_t summands = 0;  ///< reads, by bit, that may be one rank's summand, although the kernel is opaque
  KernelMeaning meaning = KernelMeaning::kNone;
  double (*flops)(const Segment& segment, const Op& op) = nullptr;  ///< per launch; none: it moves or tests bits, or a few numbers
  KernelScratch scratch = KernelScratch::kBlocks;
  KernelDeviceScratch device_scratch = KernelDeviceScratch::kNone;
  bool on_gpu = false;  ///< the CUDA back end binds it
  bool rows = false;  ///< it may be `counted`: its operands are rows, each by itself, and the counts of rows of experts follow them
};

/// Every row, in the order of the documentation.
std::span<const NamedKernel> named_kernels();

/// The row of a name; null: the table has none.
const NamedKernel* find_kernel(std::string_view name);

/// The row's rule, or the rule that a plan states for a name without a row.
Kernel::Rule rule_of(const Kernel& kernel);
/// Reads, as a bit mask, that may be partial although the type of the result is taken on trust.
uint32_t summands_of(const Kernel& kernel);
KernelMeaning meaning_of(const Kernel& kernel);
/// Whether the declared types of results are taken on trust: the rule is opaque or trusted.
bool is_believed(const Kernel& kernel);
/// Whether a kernel takes a maximum: reading an element twice then changes nothing.
bool takes_maximum(const Kernel& kernel);
/// Flops of one launch. The operands of `op` must be those of the kernel (`kernel_fault` finds nothing).
double kernel_flops(const Segment& segment, const Op& op, const Kernel& kernel);

/// How `op` contradicts the table's row of its kernel, or which operands it lacks, as a message; empty: it agrees with the row.
std::string kernel_fault(const Op& op, const Kernel& kernel);

/// The kernel of that name, for strategies. A bug if the table does not have it.
Kernel named(std::string_view name, Phase phase = Phase::kNone);

}  // namespace shardlab
