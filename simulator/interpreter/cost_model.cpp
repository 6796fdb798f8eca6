#include "simulator/interpreter/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <set>

#include "plan/base/documents.h"
#include "plan/collective_steps.h"
#include "plan/op_fields.h"
#include "plan/row_levels.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "simulator/interpreter/device_constants.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"
#include "simulator/interpreter/mixed_costs.h"
#include "simulator/interpreter/own_collectives.h"
#include "simulator/interpreter/peers.h"

namespace shardlab::simulator {
namespace {

const Slot& slot(const Segment& segment, SlotId id) { return segment.slots[id.index()]; }

/// A product of 8-bit factors.
bool multiplies_narrow(const Segment& segment, const Op& op) {
  if (!std::holds_alternative<Linear>(op.work) && !std::holds_alternative<GroupedLinear>(op.work)) return false;
  const DType factor = slot(segment, op.reads[0]).type.dtype;
  return factor == DType::f8e4m3 || factor == DType::f8e5m2;
}

std::vector<int64_t> rows_and_width(const Shape& shape) {
  const int64_t width = std::max<int64_t>(shape.last(), 1);
  return {shape.elements() / width, width};
}

/// The slot whose rows and width set the cost of a row-wise op; none for every other op.
SlotId rows_slot(const Op& op) {
  return std::visit(Overload{
                        [&](const Norm&) { return op.reads[0]; },
                        [&](const Rope&) { return op.reads[0]; },
                        [&](const LatentHeads& l) { return l.phase == Phase::kF ? op.writes[0] : op.reads[0]; },
                        [&](const Regroup& r) { return r.join ? op.writes[0] : op.reads[0]; },
                        [&](const Residual&) { return op.reads[0]; },
                        [&](const Dropout&) { return op.reads[0]; },
                        [&](const Positions&) { return op.reads[0]; },
                        [&](const Activation& a) { return a.phase == Phase::kF ? op.writes[0] : op.reads[0]; },
                        [&](const Embed& e) { return e.phase == Phase::kF ? op.writes[0] : op.reads[1]; },
                        [&](const HeadNorm&) { return op.reads[0]; },
                        [&](const Gate&) { return op.reads[0]; },
                        [&](const Route& r) { return r.phase == Phase::kF ? op.reads[0] : op.reads[1]; },
                        [&](const auto&) { return SlotId{}; },
                    },
                    op.work);
}

/// The buffer of a collective in its full, gathered extent.
const Type& full_type(const Segment& segment, const Op& op, const Collective& c) {
  const Type &from = slot(segment, op.reads[0]).type, &to = slot(segment, op.writes[0]).type;
  if (moves_packed_rows(op)) return from.bytes() < to.bytes() ? from : to;  // as many rows as the rank's tokens make are expected
  return slot(segment, c.kind == CollectiveKind::kAllGather ? op.writes[0] : op.reads[0]).type;
}

/// Is it priced by the steps that follow one another, at each step's own links? The others are by what a rank sends, over the slowest.
bool in_turn(Algorithm a) { return a == Algorithm::kTree || a == Algorithm::kHierarchical; }

/// The algorithm whose measured steps stand for those of `a`: a ring's for what is made of the same exchanges in another order.
Algorithm measured_as(Algorithm a) { return in_turn(a) ? Algorithm::kRing : a; }

std::string_view name_of(Algorithm a) { return kAlgorithms[static_cast<size_t>(measured_as(a))]; }

std::string_view name_of(CrossEntropy::Part part) {
  switch (part) {
    case CrossEntropy::Part::kFused: return "fused";
    case CrossEntropy::Part::kLossOnly: return "loss-only";
    case CrossEntropy::Part::kMax: return "max";
    case CrossEntropy::Part::kSum: return "sum";
    case CrossEntropy::Part::kGrad: return "grad";
  }
  return "?";
}

bool is_collective_kernel(const std::string& kernel) {
  return kernel.starts_with("all_") || kernel.starts_with("reduce_scatter") || kernel.starts_with("broadcast");
}

/// Steps of a collective's algorithm in a group of `size`.
double steps_of(const Collective& c, int size) {
  return static_cast<double>(collective_steps(c.kind, c.algorithm, size, 0, c.root % size, c.per_node).size());
}

/// Of the whole buffer, what a member sends in a step: the most that one of them does, over the steps.
double sent_a_step(const Collective& c, int size) {
  if (in_turn(c.algorithm))
    return static_cast<double>(steps_in_turn(c.kind, c.algorithm, size, size, c.per_node).elements) / size / steps_of(c, size);
  int64_t most = 0;  // parts
  for (int member = 0; member < size; ++member) most = std::max(most, sent_elements(c.kind, c.algorithm, size, size, member));
  return static_cast<double>(most) / size / steps_of(c, size);
}

/// An attention's cost is proportional to heads over all sequences: one extent, not two.
std::vector<int64_t> folded(const std::string& kernel, const std::vector<int64_t>& shape) {
  if (kernel.starts_with("attention") && shape.size() == 4) return {shape[0] * shape[1], shape[2], shape[3]};
  return shape;
}

/// Where an op works: on the device, on host memory, or copying between the device, the host and files.
enum class Where : uint8_t { kDevice, kToDevice, kToHost, kHost, kFromFile, kToFile };

Where place_of(const Segment& segment, const Op& op) {
  const auto any = [&](const std::vector<SlotId>& slots, Space space) {
    return std::any_of(slots.begin(), slots.end(), [&](SlotId s) { return slot(segment, s).space == space; });
  };
  if (any(op.writes, Space::kNvme)) return Where::kToFile;
  if (any(op.reads, Space::kNvme)) return Where::kFromFile;
  const bool host = any(op.reads, Space::kHost) || any(op.writes, Space::kHost);
  if (!host) return Where::kDevice;
  if (!any(op.reads, Space::kDevice) && !any(op.writes, Space::kDevice)) return Where::kHost;
  return any(op.writes, Space::kHost) ? Where::kToHost : Where::kToDevice;
}

bool is_narrow(DType type) { return type == DType::bf16 || type == DType::f16; }

/// Whether a collective adds up what it moves.
bool sums(const Work& work) {
  const auto* c = std::get_if<Collective>(&work);
  return c != nullptr && (c->kind == CollectiveKind::kAllReduce || c->kind == CollectiveKind::kReduceScatter);
}

/// The 16-bit float that the op reads, if it reads one. What is only moved has no type.
std::optional<DType> narrow_of(const Segment& segment, const Op& op) {
  if (communicates(op) && !sums(op.work)) return std::nullopt;
  for (const SlotId s : op.reads)
    if (const DType type = slot(segment, s).type.dtype; is_narrow(type)) return type;
  return std::nullopt;
}

/// What follows the name of a kernel that does more than the plain one: where heads of keys are shared, or a copy changes the type.
std::string_view variant_of(const Segment& segment, const Op& op) {
  if (std::holds_alternative<Copy>(op.work))
    return slot(segment, op.reads[0]).type.dtype == slot(segment, op.writes[0]).type.dtype ? "" : ".convert";
  const auto shared = [](const auto& a) { return a.kv_heads < a.heads; };
  if (const auto* a = std::get_if<Attention>(&op.work)) return shared(*a) ? ".grouped" : "";
  if (const auto* a = std::get_if<AttentionBlock>(&op.work)) return shared(*a) ? ".grouped" : "";
  return "";
}

/// What follows the name of a kernel on operands narrower than fp32: ".bf16". Of a product the factors decide.
std::string type_of_kernel(const Segment& segment, const Op& op) {
  std::optional<DType> narrow = narrow_of(segment, op);
  if (std::holds_alternative<Linear>(op.work)) {
    narrow = slot(segment, op.reads[0]).type.dtype;
    if (narrow == DType::f32) narrow.reset();
  }
  return narrow ? fmt::format(".{}", shardlab::name_of(*narrow)) : "";
}

/// A constant of the device, or its default.
double constant(const Device& device, double DeviceConstants::*field) {
  for (const DeviceConstant& c : device_constants())
    if (c.value == field)
      if (const auto found = device.constants.find(std::string(c.name)); found != device.constants.end()) return found->second;
  return DeviceConstants{}.*field;
}

/// Seconds of a transfer between host memory and a drive that `sharing` ranks use; nothing for every other op.
std::optional<double> drive_seconds(const Device& device, const Segment& segment, const Op& op, double sharing) {
  if (!uses_drive(segment, op)) return std::nullopt;
  using C = DeviceConstants;
  const bool reads = place_of(segment, op) == Where::kFromFile;
  const double bytes = static_cast<double>(slot(segment, op.writes[0]).type.bytes());
  return constant(device, &C::nvme_start_s) +
         bytes * sharing / constant(device, reads ? &C::nvme_read_bytes_per_s : &C::nvme_write_bytes_per_s);
}

}  // namespace

bool uses_drive(const Segment& segment, const Op& op) {
  const Where where = place_of(segment, op);
  return where == Where::kFromFile || where == Where::kToFile;
}

std::string kernel_of(const Op& op) {
  std::string name(kind_of(op.work));
  if (std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work)) return "p2p";
  constexpr std::string_view kSuffix[] = {"", ".F", ".I", ".W"};
  name += kSuffix[static_cast<size_t>(phase_of(op.work))];
  std::visit(Overload{
                 [&](const Linear& l) { name += l.bias ? ".bias" : ""; },
                 [&](const Norm& n) { name += n.rms ? ".rms" : ""; },
                 [&](const Activation& a) { name += a.swiglu ? ".swiglu" : ".gelu"; },
                 [&](const Regroup& r) { name += r.join ? ".join" : ".split"; },
                 [&](const Strips& s) { name += s.sum ? ".sum" : ".join"; },
                 [&](const CrossEntropy& c) { name += fmt::format(".{}", name_of(c.part)); },
                 [&](const Collective& c) { name += fmt::format(".{}", name_of(c.algorithm)); },
                 [&](const Kernel& k) { name += "." + k.name; },
                 [](const auto&) {},
             },
             op.work);
  return name;
}

std::string kernel_of(const Segment& segment, const Op& op) {
  return fmt::format("{}{}{}", kernel_of(op), variant_of(segment, op), type_of_kernel(segment, op));
}

namespace {

/// The head_dim of an attention whose values are as wide that does as much: the mean of both.
template <class W>
int64_t depth_of(const W& w) {
  return (int64_t{w.head_dim} + value_dim_of(w) + 1) / 2;
}

}  // namespace

std::vector<int64_t> cost_shape_of(const Plan& plan, const Segment& segment, const Op& op) {
  if (std::holds_alternative<Linear>(op.work)) return matmul_extents(segment, op);
  if (const auto* a = std::get_if<Attention>(&op.work)) {
    const Shape& s = slot(segment, op.reads[0]).type.shape;
    if (a->document == 0 && (a->window == 0 || a->window >= s[1])) return {s[0], a->heads, s[1], depth_of(*a)};
    // Packed documents, and a band, cost what sequences of one length do that have as many tokens and pairs: n of t tokens have
    // n t (t + 1) / 2.
    const double pairs = a->document > 0 ? expected_pairs({}, s[1], a->document, 0, s[1], 0, s[1], a->window)
                                         : static_cast<double>(seen_pairs({}, s[1], 0, s[1], 0, s[1], a->window));
    const double seen = pairs / static_cast<double>(s[1]);
    const int64_t length = std::max<int64_t>(1, std::llround(2 * seen - 1));
    return {std::max<int64_t>(1, s[0] * s[1] / length), a->heads, length, depth_of(*a)};
  }
  if (const auto* a = std::get_if<AttentionBlock>(&op.work)) {
    // The side of the causal attention of a whole sequence that has as many pairs.
    const double pairs = static_cast<double>(pairs_of_block(segment, op, plan.mesh, plan.token_order));
    const Shape& q = slot(segment, op.reads[a->phase == Phase::kF ? 0 : 3]).type.shape;
    return {q[0], a->heads, std::max<int64_t>(1, std::llround(std::sqrt(2 * pairs + 0.25) - 0.5)), depth_of(*a)};
  }
  if (const auto* c = std::get_if<Collective>(&op.work))
    return {full_type(segment, op, *c).bytes(), group_size(plan.mesh, comm_of(plan, op))};
  if (std::holds_alternative<Send>(op.work)) return {slot(segment, op.reads[0]).type.bytes()};
  if (std::holds_alternative<Recv>(op.work)) return {slot(segment, op.writes[0]).type.bytes()};
  if (std::holds_alternative<CrossEntropy>(op.work)) {
    // A part of the vocabulary is summed over the leaves of the whole: it costs what as many whole rows of as many leaves do.
    const Type& logits = slot(segment, op.reads[0]).type;
    const int64_t vocabulary = logical_shape(logits, plan.mesh).last();
    return {std::max<int64_t>(1, logits.shape.elements() / vocabulary), vocabulary};
  }
  if (const auto* g = std::get_if<GroupedLinear>(&op.work)) {
    const Shape& w = slot(segment, g->phase == Phase::kW ? op.writes[0] : op.reads[1]).type.shape;
    return {w[0], std::max<int64_t>(1, g->rows / std::max<int64_t>(1, w[0])), w[1], w[2]};
  }
  if (const SlotId rows = rows_slot(op)) {
    std::vector<int64_t> shape = rows_and_width(slot(segment, rows).type.shape);
    if (const auto* a = std::get_if<Activation>(&op.work); a != nullptr && a->counted) shape[0] = std::max<int64_t>(1, a->rows);
    return shape;
  }
  if (const auto* k = std::get_if<Kernel>(&op.work); k != nullptr && k->counted)
    return {work_of(segment, op, plan.mesh, plan.token_order).memory.value};
  int64_t bytes = 0;
  for (const SlotId s : op.reads) bytes += slot(segment, s).type.bytes();
  for (const SlotId s : op.writes) bytes += slot(segment, s).type.bytes();
  return {bytes};
}

Seconds PlacedCostModel::communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int>,
                                           int busy_cores) const {
  return communicate(plan, instruction, busy_cores);
}

Seconds PlacedCostModel::step_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks) const {
  const auto* c = std::get_if<Collective>(&instruction.op->work);
  const double steps = c == nullptr ? 1 : steps_of(*c, static_cast<int>(ranks.size()));
  return Seconds(communicate_among(plan, instruction, ranks, 1).value / std::max(1.0, steps));
}

PlacedCostModel::Slowest PlacedCostModel::slowest_of(const Plan& plan, const Instruction& instruction,
                                                     const Communication& communication) const {
  Slowest worst;
  for (const std::vector<int>& ranks : communication.groups)
    if (const Seconds seconds = communicate_among(plan, instruction, ranks, 1); seconds > worst.seconds)
      worst.ranks = ranks, worst.seconds = seconds;
  if (!worst.ranks.empty()) worst.demand = demand(plan, instruction, worst.ranks, worst.seconds);
  return worst;
}

Demand PlacedCostModel::demand(const Plan&, const Instruction& instruction, std::span<const int>, Seconds alone) const {
  Demand d;
  const Work& work = instruction.op->work;
  if (std::holds_alternative<Collective>(work)) {
    d.of(Resource::kLinkOut) = d.of(Resource::kLinkIn) = alone.value;
  } else if (std::holds_alternative<Send>(work)) {
    d.of(Resource::kLinkOut) = alone.value;
  } else if (std::holds_alternative<Recv>(work)) {
    d.of(Resource::kLinkIn) = alone.value;
  } else {
    switch (place_of(*instruction.segment, *instruction.op)) {
      case Where::kDevice: d.of(Resource::kUnits) = alone.value; break;
      case Where::kToDevice: d.of(Resource::kToDevice) = alone.value; break;
      case Where::kToHost: d.of(Resource::kToHost) = alone.value; break;
      case Where::kHost:
      case Where::kFromFile:
      case Where::kToFile: break;
    }
  }
  return d;
}

// --- calibrated ------------------------------------------------------------------------------------------------------

CalibratedCostModel::CalibratedCostModel(const Machine& machine, bool canonical)
    : canonical_(canonical), cores_(std::max(1, machine.cores)) {
  SHARDLAB_CHECK(machine.calibration != nullptr, "machine `{}` has no calibration", machine.id);
  const bool cores_are_shared = machine.runs_on_cores();
  calibration_ = machine.calibration;
  device_.constants = machine.device.constants;
  device_.peak_flops = machine.device.peak_flops;
  if (const auto peak = machine.device.peak_flops.find("fp32"); peak != machine.device.peak_flops.end()) peak_flops_ = peak->second;
  memory_bytes_per_s_ = machine.device.memory_bytes_per_s;

  struct Points {
    std::vector<std::vector<int64_t>> shapes;
    std::vector<double> seconds;
  };
  std::map<std::string, std::map<int, Points>> by_kernel;
  // The executor goes through a collective in the same steps however many cores there are: groups that outnumber the cores say
  // nothing that smaller ones do not, and older machine files measured them under another scheduler.
  std::set<std::string> measured_with_cores;
  const auto ranks_of = [](const RatePoint& p) {
    return is_collective_kernel(p.kernel) && p.shape.size() == 2 ? static_cast<int>(p.shape[1]) : 1;
  };
  for (const RatePoint& p : calibration_->points)
    if (ranks_of(p) > 1 && ranks_of(p) <= cores_) measured_with_cores.insert(p.kernel);
  for (const RatePoint& p : calibration_->points) {
    const int ranks = ranks_of(p);
    if (cores_are_shared && ranks > cores_ && measured_with_cores.contains(p.kernel)) continue;
    Points& points = by_kernel[p.kernel][p.concurrency];
    points.shapes.push_back(folded(p.kernel, p.shape));
    // A group that outnumbers the cores shared them while it was measured: keep the core time, and let the timeline share again.
    points.seconds.push_back(p.seconds * (cores_are_shared ? std::min(1.0, static_cast<double>(cores_) / ranks) : 1.0));
    if (ranks == 1) continue;
    Groups& groups = groups_[p.kernel];
    groups.largest = std::max(groups.largest, ranks);
    groups.least_bytes = std::min(groups.least_bytes, p.shape[0]);
  }
  for (const auto& [kernel, levels] : by_kernel)
    for (const auto& [concurrency, points] : levels)
      kernels_[kernel].emplace(concurrency,
                               RateTable(points.shapes, points.seconds, kernel.starts_with("attention") ? 2.25 : 1.25));
}

RateTable::Answer CalibratedCostModel::at(const std::string& kernel, const Levels& levels, const std::vector<int64_t>& shape,
                                          int busy_cores) const {
  const std::vector<int64_t> extents = folded(kernel, shape);
  auto above = levels.lower_bound(busy_cores);
  if (above == levels.begin()) return above->second.at(extents);
  const auto below = std::prev(above);
  const RateTable::Answer low = below->second.at(extents);
  if (above == levels.end()) return low;
  const RateTable::Answer high = above->second.at(extents);
  const double part = static_cast<double>(busy_cores - below->first) / (above->first - below->first);
  return {low.seconds + part * (high.seconds - low.seconds), low.extrapolated || high.extrapolated};
}

/// The measured kernel that is nearest to the op's: of its order before all, then of its element type, then with its bias or shared heads.
CalibratedCostModel::Nearest CalibratedCostModel::nearest(const Instruction& instruction) const {
  const Segment& segment = *instruction.segment;
  const Op& op = *instruction.op;
  const bool product = std::holds_alternative<Linear>(op.work);
  // Factors of 8 bits are widened, and multiplied as fp32.
  const std::string type = multiplies_narrow(segment, op) ? "" : type_of_kernel(segment, op);
  // What a GPU sums on its way goes at the wire's speed, whatever its type.
  const bool any_type = sums(op.work) && calibration_->launch_ahead;
  std::vector<std::string> names{kernel_of(op)};
  // A block of attention does for its pairs what attention does for as many of a whole sequence.
  if (const auto* block = std::get_if<AttentionBlock>(&op.work))
    names.push_back(block->phase == Phase::kF ? "attention.F" : "attention.I");
  if (product && std::get<Linear>(op.work).bias)
    names.push_back(names[0].substr(0, names[0].size() - std::string_view(".bias").size()));
  for (const bool canonical : {true, false}) {
    if (canonical && !canonical_) continue;
    std::vector<std::string_view> types{type};
    // Rates of another type say nothing about products, but in fixed order, which has no units for 16 bits.
    if (type == ".f16" && !product) types.push_back(".bf16");
    if (!type.empty() && (!product || canonical)) types.push_back("");
    for (const std::string_view measured : types)
      for (size_t n = 0; n < names.size(); ++n)
        for (const bool variant : {true, false}) {
          const std::string_view more = variant_of(segment, op);
          if (variant && more.empty()) continue;
          const auto found =
              kernels_.find(fmt::format("{}{}{}{}", names[n], variant ? more : "", measured, canonical ? kCanonicalKernel : ""));
          if (found != kernels_.end())
            return {&found->first, &found->second, (measured == type || any_type) && !(product && n > 0)};
        }
  }
  return {};
}

namespace {

/// Attention within packed documents of which nothing is known is priced as if each sequence were one.
bool attends_unknown(const Op& op) {
  if (const auto* a = std::get_if<Attention>(&op.work)) return a->packed && a->document == 0;
  const auto* block = std::get_if<AttentionBlock>(&op.work);
  return block != nullptr && block->packed && block->document == 0;
}

}  // namespace

RateTable::Answer CalibratedCostModel::cost_of(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  if (const auto drive = drive_seconds(device_, *instruction.segment, *instruction.op, 1)) return {*drive, true};
  if (const auto [kernel, levels, same_work] = nearest(instruction); levels != nullptr) {
    std::vector<int64_t> shape = cost_shape_of(plan, *instruction.segment, *instruction.op);
    double times = 1;
    bool more_cores = false;
    if (const auto* c = std::get_if<Collective>(&instruction.op->work)) {
      const int64_t ranks = shape[1];
      if (const auto by_node = row_levels(*instruction.segment, *instruction.op); by_node && by_node->once)
        shape[0] = std::llround(static_cast<double>(shape[0]) * static_cast<double>(by_node->even_bytes()) /
                                static_cast<double>(by_node->one_by_one().even_bytes()));
      times = to_largest_group(*c, *kernel, shape);
      more_cores = shape[1] < std::min<int64_t>(ranks, cores_);  // at work at once than when it was measured
    }
    RateTable::Answer answer = at(*kernel, *levels, shape, busy_cores);
    answer.seconds *= times;
    answer.extrapolated |= more_cores;
    if (multiplies_narrow(*instruction.segment, *instruction.op) || !same_work || attends_unknown(*instruction.op))
      answer.extrapolated = true;
    return answer;
  }
  const WorkAmount work = work_of(*instruction.segment, *instruction.op, plan.mesh, plan.token_order);
  const double bytes = static_cast<double>(std::max(work.memory.value, work.payload.value));
  return {std::max(time_at(static_cast<double>(work.flops.value), peak_flops_), time_at(bytes, memory_bytes_per_s_)), true};
}

/// Where a group is larger than any measured, or its steps are not those that were, puts in place of its shape that of the largest,
/// with as much to move in a step.
/// Returns how many times the steps of that it has.
double CalibratedCostModel::to_largest_group(const Collective& c, const std::string& kernel, std::vector<int64_t>& shape) const {
  const int ranks = static_cast<int>(shape[1]);
  const auto groups = groups_.find(kernel);
  if (groups == groups_.end() || (ranks <= groups->second.largest && !in_turn(c.algorithm))) return 1;
  const auto [largest, least_bytes] = groups->second;
  Collective measured = c;
  measured.algorithm = measured_as(c.algorithm);
  const double bytes = static_cast<double>(shape[0]) * sent_a_step(c, ranks) / sent_a_step(measured, largest);
  // Fewer bytes than the fewest measured cost no less: a step of nothing is still a step.
  shape = {std::max(std::llround(bytes), std::min<long long>(least_bytes, shape[0])), largest};
  return steps_of(c, ranks) / steps_of(measured, largest);
}

Seconds CalibratedCostModel::compute(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return Seconds(restores(*instruction.op) ? 0 : cost_of(plan, instruction, busy_cores).seconds);
}

Seconds CalibratedCostModel::communicate(const Plan& plan, const Instruction& instruction, int) const {
  return Seconds(cost_of(plan, instruction, 1).seconds);
}

Demand CalibratedCostModel::demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                   Seconds alone) const {
  Demand d = PlacedCostModel::demand(plan, instruction, ranks, alone);
  if (!calibration_->launch_ahead || d.of(Resource::kUnits) == 0) return d;
  const WorkAmount work = work_of(*instruction.segment, *instruction.op, plan.mesh, plan.token_order);
  const std::string type = type_of_kernel(*instruction.segment, *instruction.op);
  const auto peak = device_.peak_flops.find(type == ".bf16" ? "bf16" : type == ".f16" ? "fp16" : "fp32");
  const double flops_per_s = peak == device_.peak_flops.end() ? peak_flops_ : peak->second;
  d.of(Resource::kUnits) = std::min(alone.value, time_at(static_cast<double>(work.flops.value), flops_per_s));
  d.of(Resource::kMemory) = std::min(alone.value, time_at(static_cast<double>(work.memory.value), memory_bytes_per_s_));
  return d;
}

bool CalibratedCostModel::extrapolates(const Plan& plan, const Instruction& instruction) const {
  return cost_of(plan, instruction, 1).extrapolated;
}

// --- data sheet --------------------------------------------------------------------------------------------------------

namespace {

/// What a kernel of the device does.
DatasheetRates::Kernel kernel_work(const Segment& segment, const Op& op, const WorkAmount& work) {
  const bool product = std::holds_alternative<Linear>(op.work) || std::holds_alternative<GroupedLinear>(op.work) ||
                       std::holds_alternative<Attention>(op.work) || std::holds_alternative<AttentionBlock>(op.work);
  return {static_cast<double>(work.flops.value), static_cast<double>(work.memory.value), product, multiplies_narrow(segment, op)};
}

}  // namespace

DatasheetCostModel::DatasheetCostModel(const Machine& machine, Precision precision, const Efficiency& efficiency)
    : rates_(machine, precision, efficiency) {}

Seconds DatasheetCostModel::compute(const Plan& plan, const Instruction& instruction, int) const {
  const Segment& segment = *instruction.segment;
  const Op& op = *instruction.op;
  if (restores(op)) return Seconds(0);
  const WorkAmount work = work_of(segment, op, plan.mesh, plan.token_order);
  const double bytes = static_cast<double>(work.memory.value);
  switch (place_of(segment, op)) {
    case Where::kDevice: break;
    // A copy reads and writes its bytes once each, and passes them once.
    case Where::kToDevice: return Seconds(rates_.host_copy_seconds(bytes / 2, true));
    case Where::kToHost: return Seconds(rates_.host_copy_seconds(bytes / 2, false));
    case Where::kHost: return Seconds(rates_.host_copy_seconds(bytes, false));
    case Where::kFromFile: return Seconds(rates_.nvme_seconds(bytes / 2, false));
    case Where::kToFile: return Seconds(rates_.nvme_seconds(bytes / 2, true));
  }
  return Seconds(rates_.kernel_seconds(kernel_work(segment, op, work)));
}

namespace {

/// Bytes that a rank of a group sends in a collective.
double sent_in(const Segment& segment, const Op& op, int ranks) { return static_cast<double>(sent_bytes(segment, op, ranks, 0)); }

/// Of a collective that is priced step by step. Packed rows take the steps of both levels, and counts travel before them.
StepsTaken in_turn_of(const Segment& segment, const Op& op, const Collective& c, int ranks) {
  if (const auto levels = row_levels(segment, op)) {
    return {static_cast<double>(levels->steps()), static_cast<double>(levels->even_bytes()),
            static_cast<double>(levels->steps_across()), static_cast<double>(levels->even_bytes_across()), true};
  }
  const Type& full = full_type(segment, op, c);
  const StepsInTurn turn = steps_in_turn(c.kind, c.algorithm, full.shape.elements(), ranks, c.per_node);
  return {static_cast<double>(turn.steps), static_cast<double>(bytes_of(full.dtype, turn.elements)),
          static_cast<double>(turn.steps_across), static_cast<double>(bytes_of(full.dtype, turn.elements_across)),
          c.algorithm == Algorithm::kHierarchical};
}

/// Is it priced over nodes by each step's own links, which depend on where the ranks are? The nodes of kHierarchical are its own.
bool depends_on_way(Algorithm a) { return a == Algorithm::kDirect || a == Algorithm::kTree || a == Algorithm::kHalvingDoubling; }

/// Neighbours of a group on each node; where they lie unevenly every rank counts as alone on its own.
int neighbours(const DatasheetRates::Way& way, int ranks) {
  return way.nodes * way.fewest_on_a_node == ranks ? way.fewest_on_a_node : 1;
}

/// What goes to peers of the node and what goes to other nodes, each at its own links.
OwnSteps own_steps_of(const Segment& segment, const Op& op, const Collective& c, int ranks, const DatasheetRates::Way& way) {
  return own_steps(c.kind, c.algorithm, full_type(segment, op, c).shape.elements(), ranks,
                   way.network() ? neighbours(way, ranks) : ranks, c.root % ranks);
}

StepsTaken taken_by(const OwnSteps& own, const Type& full) {
  const double bytes = static_cast<double>(bits_of(full.dtype)) / 8;
  return {own.steps, own.elements * bytes, own.steps_across, own.elements_across * bytes, own.leveled};
}

/// Of an algorithm that depends on the way.
double seconds_on(const DatasheetRates& rates, const Segment& segment, const Op& op, const Collective& c, int ranks,
                  const DatasheetRates::Way& way) {
  const OwnSteps own = own_steps_of(segment, op, c, ranks, way);
  return rates.in_turn_seconds(taken_by(own, full_type(segment, op, c)), way) + own.messages * kMessage_s;
}

Demand demand_on(const DatasheetRates& rates, const Segment& segment, const Op& op, const Collective& c, int ranks,
                 const DatasheetRates::Way& way) {
  return rates.in_turn_demand(use_of(c.kind), taken_by(own_steps_of(segment, op, c, ranks, way), full_type(segment, op, c)), way);
}

double message_bytes(const Plan& plan, const Instruction& instruction) {
  return static_cast<double>(cost_shape_of(plan, *instruction.segment, *instruction.op)[0]);
}

}  // namespace

Communication communication_of(const Plan& plan, const Instruction& instruction, std::vector<std::vector<int>> groups) {
  Communication c;
  c.groups = std::move(groups);
  const auto* collective = std::get_if<Collective>(&instruction.op->work);
  if (collective == nullptr) {
    c.sent_bytes = message_bytes(plan, instruction);
  } else if (!c.groups.empty() && c.groups[0].size() > 1) {
    const int size = static_cast<int>(c.groups[0].size());
    if (collective->algorithm == Algorithm::kHierarchical)
      c.turn = in_turn_of(*instruction.segment, *instruction.op, *collective, size);
    c.sent_bytes = sent_in(*instruction.segment, *instruction.op, size);
    c.steps = steps_of(*collective, size);
  }
  return c;
}

Demand DatasheetCostModel::demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                  Seconds alone) const {
  const Op& op = *instruction.op;
  if (restores(op)) return {};
  if (const auto* c = std::get_if<Collective>(&op.work)) {
    const int size = static_cast<int>(ranks.size());
    if (size == 1) return {};
    if (depends_on_way(c->algorithm)) return demand_on(rates_, *instruction.segment, op, *c, size, rates_.way_between(ranks));
    if (in_turn(c->algorithm))
      return rates_.in_turn_demand(use_of(c->kind), in_turn_of(*instruction.segment, op, *c, size), rates_.way_between(ranks));
    return rates_.collective_demand(use_of(c->kind), sent_in(*instruction.segment, op, size), rates_.way_between(ranks));
  }
  if (std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work))
    return rates_.message_demand(message_bytes(plan, instruction), rates_.way_between(ranks),
                                 std::holds_alternative<Send>(op.work));
  const WorkAmount work = work_of(*instruction.segment, op, plan.mesh, plan.token_order);
  Demand d = PlacedCostModel::demand(plan, instruction, ranks, alone);
  switch (place_of(*instruction.segment, op)) {
    case Where::kDevice: return rates_.kernel_demand(kernel_work(*instruction.segment, op, work));
    case Where::kToDevice:
    case Where::kToHost: d.of(Resource::kMemory) = rates_.memory_seconds(static_cast<double>(work.memory.value)) / 2; break;
    case Where::kHost:
    case Where::kFromFile:
    case Where::kToFile: break;
  }
  return d;
}

Seconds DatasheetCostModel::communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  const Op& op = *instruction.op;
  const std::vector<int> group = group_of(plan.mesh, comm_of(plan, op), 0);
  if (std::holds_alternative<Collective>(op.work)) return communicate_among(plan, instruction, group, busy_cores);
  Seconds slowest(0);
  for (size_t i = 0; i < group.size(); ++i)
    if (const auto hop = hop_of(op, group, i)) slowest = std::max(slowest, communicate_among(plan, instruction, *hop, busy_cores));
  return slowest;
}

Seconds DatasheetCostModel::communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                              int) const {
  const Op& op = *instruction.op;
  const DatasheetRates::Way way = rates_.way_between(ranks);
  const auto* c = std::get_if<Collective>(&op.work);
  if (c == nullptr) return Seconds(rates_.message_seconds(message_bytes(plan, instruction), way));
  const int size = static_cast<int>(ranks.size());
  if (size == 1) return Seconds(0);
  if (depends_on_way(c->algorithm)) return Seconds(seconds_on(rates_, *instruction.segment, op, *c, size, way));
  if (in_turn(c->algorithm)) return Seconds(rates_.in_turn_seconds(in_turn_of(*instruction.segment, op, *c, size), way));
  const auto steps = collective_steps(c->kind, c->algorithm, size, 0, c->root).size();
  return Seconds(rates_.collective_seconds(static_cast<double>(steps), sent_in(*instruction.segment, op, size), way));
}

/// As the above; groups that lie alike are asked once.
PlacedCostModel::Slowest DatasheetCostModel::slowest_of(const Plan&, const Instruction& instruction,
                                                        const Communication& communication) const {
  Slowest worst;
  const auto* c = std::get_if<Collective>(&instruction.op->work);
  const double bytes = communication.sent_bytes;
  const Segment* const segment = instruction.segment;
  const bool by_way = c != nullptr && depends_on_way(c->algorithm);
  std::optional<DatasheetRates::Way> before;
  DatasheetRates::Way slowest;
  for (const std::vector<int>& ranks : communication.groups) {
    if (ranks.size() == 1) continue;
    const DatasheetRates::Way way = rates_.way_between(ranks);
    if (before == way) continue;
    before = way;
    const int size = static_cast<int>(ranks.size());
    const Seconds seconds(by_way                  ? seconds_on(rates_, *segment, *instruction.op, *c, size, way)
                          : c == nullptr          ? rates_.message_seconds(bytes, way)
                          : in_turn(c->algorithm) ? rates_.in_turn_seconds(communication.turn, way)
                                                  : rates_.collective_seconds(communication.steps, bytes, way));
    if (seconds > worst.seconds) worst.ranks = ranks, worst.seconds = seconds, slowest = way;
  }
  if (worst.ranks.empty()) return worst;
  const int size = static_cast<int>(worst.ranks.size());
  worst.demand = by_way                  ? demand_on(rates_, *segment, *instruction.op, *c, size, slowest)
                 : c == nullptr          ? rates_.message_demand(bytes, slowest, std::holds_alternative<Send>(instruction.op->work))
                 : in_turn(c->algorithm) ? rates_.in_turn_demand(use_of(c->kind), communication.turn, slowest)
                                         : rates_.collective_demand(use_of(c->kind), bytes, slowest);
  return worst;
}

// --- fixed -------------------------------------------------------------------------------------------------------------

Seconds FixedCostModel::compute(const Plan&, const Instruction& instruction, int busy_cores) const {
  const auto found = seconds.find(instruction.op->label);
  return Seconds((found == seconds.end() ? otherwise : found->second) * (1 + contention * (busy_cores - 1)));
}

Seconds FixedCostModel::communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return compute(plan, instruction, busy_cores);
}

// --- choice ------------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<PlacedCostModel>> cost_model_for(const Case& config) {
  return cost_model_for(config.machine, config.train.precision, config.canonical);
}

Result<std::unique_ptr<PlacedCostModel>> cost_model_for(const Machine& machine, Precision precision, bool canonical) {
  if (machine.is_mixed()) return mixed_costs(machine, precision);
  if (machine.calibration) return std::unique_ptr<PlacedCostModel>(std::make_unique<CalibratedCostModel>(machine, canonical));
  if (machine.local)
    return Error{ExitCode::kEnvironment, fmt::format("machine `{}` is this machine, and it was never measured", machine.id),
                 "run `shardlab calibrate` first"};
  if (machine.device.memory_bytes_per_s <= 0 || machine.device.peak_flops.empty())
    return Error{ExitCode::kUsage, fmt::format("machine `{}` states no memory bandwidth or no peak flops", machine.id),
                 "give device.memory_bandwidth and device.peak_flops in its machine file"};
  if (const auto device = DeviceModel::of(machine.device); !device.ok()) return device.error();
  if (const auto fabric = Fabric::of(machine); !fabric.ok()) return fabric.error();
  if (dense_peak(machine.device, precision) > 0)
    return std::unique_ptr<PlacedCostModel>(std::make_unique<DatasheetCostModel>(machine, precision));
  return Error{ExitCode::kUsage,
               fmt::format("machine `{}` states no peak for precision {} nor a wider one", machine.id, name_of(precision)),
               "add it to device.peak_flops in its machine file"};
}

}  // namespace shardlab::simulator
