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
  kLargest,     ///< of sizes: more of the same changes nothing, and it goes on from the result of other tensors
  kOverflow,    ///< whether some element is not finite: a maximum of flags
  kScale,       ///< made of a largest size, and placed as it is
  kRounding,    ///< the first read in fewer bits: same shape, scale and micro-batch
  kClipFactor,  ///< made of the squared norm of all gradients
  kFollowLoad,  ///< the second read, a router's bias, moved by the first, the load of its layer's experts in the step
  kFit,  ///< the second read, counts of rows, cut off where the first, the rows, end; and whether some are: a maximum of flags
};

/// Scratch on a CPU (plan/work.cpp).
enum class KernelScratch : uint8_t {
  kBlocks,      ///< a block in fp32 of every narrow operand
  kNarrowCopy,  ///< a block where both sides are narrow
  kTree,        ///< a block of every part that is added up
  kBasis,       ///< 8 bytes an element
  kProjection,  ///< a block of a product
  kDraws,       ///< a block of draws
  kScattered,   ///< as a tree, and how far each part has come
  kTwoPasses,   ///< narrow reads come twice: for the scales, for the elements
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
/// Reads, by bit, that may be partial although the result's type is taken on trust.
uint32_t summands_of(const Kernel& kernel);
KernelMeaning meaning_of(const Kernel& kernel);
/// Whether the declared types of results are taken on trust: the rule is opaque or trusted.
bool is_believed(const Kernel& kernel);
/// A kernel that takes a maximum, so that more of the same changes nothing.
bool takes_maximum(const Kernel& kernel);
/// Per launch. Operands must be those of the kernel (`kernel_fault`).
double kernel_flops(const Segment& segment, const Op& op, const Kernel& kernel);

/// What an op says of a kernel by name that the table says otherwise, or operands that are missing; empty: nothing.
std::string kernel_fault(const Op& op, const Kernel& kernel);

/// The kernel of that name, for strategies. A bug if the table does not have it.
Kernel named(std::string_view name, Phase phase = Phase::kNone);

}  // namespace shardlab
