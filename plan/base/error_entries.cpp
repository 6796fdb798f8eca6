#include "plan/base/error_entries.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace shardlab {
namespace {

constexpr auto kEntries = std::to_array<ErrorEntry>({
    {ErrorKind::kMissing, "E101", "a value that this version does not implement",
     "The key is known, and no pass or kernel of this version does what its value asks for, by itself or beside the other setting "
     "of the message. It is refused before anything runs: a plan without it would be another training run.",
     "Take a value that the hint names. docs/limits.md lists what is not executed, and docs/compatibility.md which settings do not "
     "meet. What a framework has can be estimated as the framework runs it: shardlab memory or search with --profile megatron."},
    {ErrorKind::kApart, "E102", "two settings that do not go together",
     "Each of the two is implemented by itself. Together one takes away what the other needs, as the message says.",
     "Change one of the two, as the hint says. shardlab strategies --pairs prints every pair with its reason, and "
     "docs/compatibility.md has the same table. In a sweep `exclude` leaves such points out."},
    {ErrorKind::kOnlyEstimated, "E103", "a model that is estimated and not executed",
     "The model has a part that no op of a plan computes. Its parameters, memory and time are known to the estimator of "
     "frameworks, which needs no plan.",
     "Ask how a framework runs it: shardlab memory or search with --profile megatron, or in a sweep `profile: megatron` and "
     "`resolution: analytic`. shardlab model list says which models are executed."},
    {ErrorKind::kTooManyRanks, "E104", "more ranks than the machine has devices",
     "A layout has dp * tp * pp * cp ranks, one a device. Experts (ep) and shards (zero) are spread over those ranks and need no "
     "more.",
     "Lower dp, tp, pp or cp, or raise machine.nodes. A dp that is left out is the number of devices that tp, pp and cp leave."},
    {ErrorKind::kBatch, "E105", "a batch that the ranks cannot share out",
     "A step takes seq_len * micro_batch * grad_accumulation * dp tokens, whole sequences and as many on each rank. The "
     "global_batch_tokens of the case are another number.",
     "Set global_batch_tokens to a multiple of seq_len * micro_batch * dp, or leave grad_accumulation or global_batch_tokens out: "
     "the one follows from the other."},
    {ErrorKind::kDoesNotFit, "E106", "a rank that needs more memory than it may use",
     "What a rank needs follows from the plan alone: every buffer has an offset in an arena, of the device, of its host or of "
     "NVMe. So it is known to the byte, and nothing was run.",
     "shardlab memory with the case's settings says what takes the bytes, and --what-if key=value what another setting would "
     "leave. zero and more tp or pp cut the state of training; recompute, offload and a smaller micro_batch cut activations, each "
     "at a price in time."},
    {ErrorKind::kNotMeasured, "E107", "layers to be dealt out by a measurement that is not there",
     "`stage_layers: measured` reads the time of each layer from the run whose checkpoint is resumed: from plan.txt and the "
     "measured trace in the case folder which the folder of the checkpoints is in. One of the three is missing, or they are not of "
     "one run.",
     "Set checkpoint.resume to DIR/CASE/checkpoints of a run that was measured with --traces measured or all. Checkpoints of a run "
     "with its own checkpoint.folder have no case folder above them: copy them to where it is. Or set `stage_layers: balanced`, "
     "which deals out by predicted time."},
    {ErrorKind::kNotCounted, "E108", "experts to be placed by rows that nobody has counted",
     "`expert_placement: measured` reads how many rows each expert had from the run whose checkpoint is resumed: from loads.txt, "
     "beside it plan.txt with the present placement, in the case folder which the folder of the checkpoints is in. The case "
     "resumes no run, one of the files is missing or of another model, or the question is asked where no run is read.",
     "Set checkpoint.resume to DIR/CASE/checkpoints of a run that was measured on processors. Checkpoints of a run with its own "
     "checkpoint.folder have no case folder above them: copy them to where it is. Or set `expert_placement: balanced` and "
     "data.routes to the loads.txt or routes.txt of any measured case of the model."},
});

constexpr bool is_in_order() {
  for (size_t i = 0; i < kEntries.size(); ++i)
    if (static_cast<size_t>(kEntries[i].kind) != i + 1) return false;
  return kEntries.size() == static_cast<size_t>(ErrorKind::kLast);
}
static_assert(is_in_order());

/// Words laid in lines of at most 100 characters.
std::string in_lines(std::string_view text) {
  constexpr size_t kWidth = 100;
  std::string lines;
  while (text.size() > kWidth) {
    const size_t end = text.rfind(' ', kWidth);
    lines += std::string(text.substr(0, end)) + '\n';
    text.remove_prefix(end + 1);
  }
  return lines + std::string(text);
}

}  // namespace

std::span<const ErrorEntry> error_entries() { return kEntries; }

const ErrorEntry* entry_of(ErrorKind kind) {
  return kind == ErrorKind::kPlain ? nullptr : &kEntries[static_cast<size_t>(kind) - 1];
}

Result<ErrorEntry> entry_named(std::string_view code) {
  const auto found = std::ranges::find(kEntries, code, &ErrorEntry::code);
  if (found != kEntries.end()) return *found;
  std::string codes;
  for (const ErrorEntry& e : kEntries) codes += fmt::format("\n  {}  {}", e.code, e.title);
  return refusal(fmt::format("no refusal has the code `{}`", code), "codes:" + codes);
}

std::string to_string(const ErrorEntry& entry) {
  return fmt::format("{}: {}\n\n{}\n\n{}\n", entry.code, entry.title, in_lines(entry.why), in_lines(entry.next));
}

}  // namespace shardlab
