// Launches that are lent scratch, and what binding them needs of the back end.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "kernels/mixed.h"
#include "runtime/backend.h"
#include "runtime/operands.h"

namespace shardlab::runtime {

/// A launch with the scratch that it wants, in bytes, aligned to 64; null is good where it wants none.
struct ScratchLaunch {
  int64_t scratch_bytes = 0;
  std::function<void(const StepState&, void* scratch)> run;
};

/// The kernels and options of a back end, for the code that binds its ops.
struct BindTools {
  const kernels::Kernels& kernels;
  const CpuOptions& options;
};

/// `run(kernels, args, scratch)` as a launch; called once with a scratch that counts. `update(args, state)` is called
/// before each run.
template <class Args, class Run, class Update>
ScratchLaunch counted_launch(const kernels::Kernels& kernels, const Args& args, Run run, Update update) {
  const kernels::MixedKernels mixed(kernels);
  auto counter = kernels::Scratch::counter();
  run(mixed, args, counter);
  return {counter.used(), [mixed, args = Args(args), run, update](const StepState& state, void* lent) mutable {
            update(args, state);
            kernels::Scratch scratch(lent);
            run(mixed, std::as_const(args), scratch);
          }};
}
template <class Args, class Run>
ScratchLaunch counted_launch(const kernels::Kernels& kernels, const Args& args, Run run) {
  return counted_launch(kernels, args, run, [](Args&, const StepState&) {});
}

inline kernels::Stored stored(const Tensor& t) { return {t.data, t.type->dtype, {}}; }

/// The tensor number of a dropout's random key: four sites a layer; the embedding's, of layer -1, come first.
inline uint32_t dropout_tensor(const BoundOp& op, const Dropout& w) {
  return static_cast<uint32_t>((op.instruction->layer + 1) * 4 + w.site);
}

}  // namespace shardlab::runtime
