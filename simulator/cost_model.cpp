#include "simulator/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "plan/collective_steps.h"
#include "plan/work.h"
#include "simulator/device_constants.h"

namespace shardlab {
namespace {

const Slot& slot(const Segment& segment, SlotId id) { return segment.slots[id.index()]; }

std::vector<int64_t> rows_and_width(const Shape& shape) {
  const int64_t width = std::max<int64_t>(shape.last(), 1);
  return {shape.elements() / width, width};
}

/// The slot whose rows and width set the cost of a row-wise op; none for every other op.
SlotId rows_slot(const Op& op) {
  return std::visit(Overload{
                        [&](const Norm&) { return op.reads[0]; },
                        [&](const Rope&) { return op.reads[0]; },
                        [&](const Residual&) { return op.reads[0]; },
                        [&](const Dropout&) { return op.reads[0]; },
                        [&](const Positions&) { return op.reads[0]; },
                        [&](const Activation& a) { return a.phase == Phase::kF ? op.writes[0] : op.reads[0]; },
                        [&](const Embed& e) { return e.phase == Phase::kF ? op.writes[0] : op.reads[1]; },
                        [&](const auto&) { return SlotId{}; },
                    },
                    op.work);
}

/// The buffer of a collective in its full, gathered extent.
const Type& full_type(const Segment& segment, const Op& op, const Collective& c) {
  return slot(segment, c.kind == CollectiveKind::kAllGather ? op.writes[0] : op.reads[0]).type;
}

std::string_view name_of(Algorithm a) {
  return a == Algorithm::kRing ? "ring" : a == Algorithm::kHalvingDoubling ? "halving-doubling" : "direct";
}

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

const Comm& comm_of(const Plan& plan, const Op& op) {
  const CommId id = std::visit(Overload{
                                   [](const Collective& c) { return c.comm; },
                                   [](const Send& s) { return s.comm; },
                                   [](const Recv& r) { return r.comm; },
                                   [](const auto&) { return CommId{}; },
                               },
                               op.work);
  SHARDLAB_CHECK(id && id.index() < plan.comms.size(), "op `{}` has no communicator", op.label);
  return plan.comms[id.index()];
}

bool is_collective_kernel(const std::string& kernel) {
  return kernel.starts_with("all_") || kernel.starts_with("reduce_scatter") || kernel.starts_with("broadcast");
}

/// An attention's cost is proportional to heads over all sequences: one extent, not two.
std::vector<int64_t> folded(const std::string& kernel, const std::vector<int64_t>& shape) {
  if (kernel.starts_with("attention") && shape.size() == 4) return {shape[0] * shape[1], shape[2], shape[3]};
  return shape;
}

double time_at(double total, double rate) { return rate > 0 ? total / rate : 0; }

/// A constant of the device, or its default.
double constant(const Device& device, double DeviceConstants::*field) {
  for (const DeviceConstant& c : device_constants())
    if (c.value == field)
      if (const auto found = device.constants.find(std::string(c.name)); found != device.constants.end()) return found->second;
  return DeviceConstants{}.*field;
}

bool touches(const Segment& segment, const Op& op, Space space) {
  const auto there = [&](SlotId id) { return slot(segment, id).space == space; };
  return std::ranges::any_of(op.reads, there) || std::ranges::any_of(op.writes, there);
}

/// Seconds of a transfer between host memory and a drive that `sharing` ranks use; nothing for every other op.
std::optional<double> drive_seconds(const Device& device, const Segment& segment, const Op& op, double sharing) {
  if (!touches(segment, op, Space::kNvme)) return std::nullopt;
  using C = DeviceConstants;
  const bool reads = slot(segment, op.reads[0]).space == Space::kNvme;
  const double bytes = static_cast<double>(slot(segment, op.writes[0]).type.bytes());
  return constant(device, &C::nvme_start_s) +
         bytes * sharing / constant(device, reads ? &C::nvme_read_bytes_per_s : &C::nvme_write_bytes_per_s);
}

/// Seconds of what happens outside a device: copies over its link to the host, transfers to drives, and what the host computes.
std::optional<double> outside_seconds(const Machine& machine, const Segment& segment, const Op& op, double memory_bytes) {
  const Device& device = machine.device;
  if (const auto drive = drive_seconds(device, segment, op, std::max(1, machine.devices_per_node))) return drive;
  if (!touches(segment, op, Space::kHost)) return std::nullopt;
  using C = DeviceConstants;
  if (!touches(segment, op, Space::kDevice)) return memory_bytes / constant(device, &C::device_to_host_bytes_per_s);
  const bool leaves = slot(segment, op.writes[0]).space == Space::kHost;
  return constant(device, &C::host_copy_start_s) +
         static_cast<double>(slot(segment, op.reads[0]).type.bytes()) /
             constant(device, leaves ? &C::device_to_host_bytes_per_s : &C::host_to_device_bytes_per_s);
}

}  // namespace

std::string kernel_of(const Op& op) {
  std::string name(kind_of(op.work));
  if (std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work)) return "p2p";
  constexpr std::string_view kSuffix[] = {"", ".F", ".I", ".W"};
  name += kSuffix[static_cast<size_t>(phase_of(op.work))];
  std::visit(Overload{
                 [&](const Linear& l) { name += l.bias ? ".bias" : ""; },
                 [&](const Norm& n) { name += n.rms ? ".rms" : ""; },
                 [&](const Activation& a) { name += a.swiglu ? ".swiglu" : ".gelu"; },
                 [&](const CrossEntropy& c) { name += fmt::format(".{}", name_of(c.part)); },
                 [&](const Collective& c) { name += fmt::format(".{}", name_of(c.algorithm)); },
                 [&](const Kernel& k) { name += "." + k.name; },
                 [](const auto&) {},
             },
             op.work);
  return name;
}

std::string kernel_of(const Segment& segment, const Op& op) {
  const std::string name = kernel_of(op);
  if (!std::holds_alternative<Linear>(op.work)) return name;
  const DType dtype = slot(segment, op.reads[0]).type.dtype;
  return dtype == DType::f32 ? name : fmt::format("{}.{}", name, shardlab::name_of(dtype));
}

std::vector<int64_t> cost_shape_of(const Plan& plan, const Segment& segment, const Op& op) {
  if (std::holds_alternative<Linear>(op.work)) return matmul_extents(segment, op);
  if (const auto* a = std::get_if<Attention>(&op.work)) {
    const Shape& s = slot(segment, op.reads[0]).type.shape;
    return {s[0], a->heads, s[1], a->head_dim};
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
  if (const SlotId rows = rows_slot(op)) return rows_and_width(slot(segment, rows).type.shape);
  int64_t bytes = 0;
  for (const SlotId s : op.reads) bytes += slot(segment, s).type.bytes();
  for (const SlotId s : op.writes) bytes += slot(segment, s).type.bytes();
  return {bytes};
}

// --- calibrated ------------------------------------------------------------------------------------------------------

CalibratedCostModel::CalibratedCostModel(const Machine& machine) : cores_(std::max(1, machine.cores)) {
  SHARDLAB_CHECK(machine.calibration != nullptr, "machine `{}` has no calibration", machine.id);
  calibration_ = machine.calibration;
  device_.constants = machine.device.constants;
  if (const auto peak = machine.device.peak_flops.find("fp32"); peak != machine.device.peak_flops.end()) peak_flops_ = peak->second;
  memory_bytes_per_s_ = machine.device.memory_bytes_per_s;

  struct Points {
    std::vector<std::vector<int64_t>> shapes;
    std::vector<double> seconds;
  };
  std::map<std::string, std::map<int, Points>> by_kernel;
  for (const RatePoint& p : calibration_->points) {
    Points& points = by_kernel[p.kernel][p.concurrency];
    points.shapes.push_back(folded(p.kernel, p.shape));
    // A group that outnumbers the cores shared them while it was measured: keep the core time, and let the timeline share again.
    const double ranks = is_collective_kernel(p.kernel) && p.shape.size() == 2 ? static_cast<double>(p.shape[1]) : 1;
    points.seconds.push_back(p.seconds * std::min(1.0, cores_ / ranks));
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

RateTable::Answer CalibratedCostModel::cost_of(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  const std::string kernel = kernel_of(*instruction.segment, *instruction.op);
  if (const auto drive = drive_seconds(device_, *instruction.segment, *instruction.op, 1)) return {*drive, true};
  if (const auto levels = kernels_.find(kernel); levels != kernels_.end())
    return at(kernel, levels->second, cost_shape_of(plan, *instruction.segment, *instruction.op), busy_cores);
  const WorkAmount work = work_of(*instruction.segment, *instruction.op, plan.mesh);
  const double bytes = static_cast<double>(std::max(work.memory.value, work.payload.value));
  return {std::max(time_at(static_cast<double>(work.flops.value), peak_flops_), time_at(bytes, memory_bytes_per_s_)), true};
}

Seconds CalibratedCostModel::compute(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return Seconds(cost_of(plan, instruction, busy_cores).seconds);
}

Seconds CalibratedCostModel::communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return Seconds(cost_of(plan, instruction, busy_cores).seconds);
}

bool CalibratedCostModel::extrapolates(const Plan& plan, const Instruction& instruction) const {
  return cost_of(plan, instruction, 1).extrapolated;
}

// --- data sheet --------------------------------------------------------------------------------------------------------

namespace {

/// Dense peak of the precision, or of the next wider one that the machine computes in; 0 for none.
double peak_flops_of(const Device& device, const std::string& precision) {
  bool wide_enough = false;
  for (const char* name : {"fp4", "fp8", "bf16", "fp16", "tf32", "fp32"}) {
    wide_enough = wide_enough || precision == name;
    const auto peak = device.peak_flops.find(name);
    if (wide_enough && peak != device.peak_flops.end()) return peak->second;
  }
  return 0;
}

}  // namespace

DatasheetCostModel::DatasheetCostModel(const Machine& machine, const std::string& precision, const Efficiency& efficiency)
    : machine_(machine), efficiency_(efficiency), peak_flops_(peak_flops_of(machine.device, precision)) {
  SHARDLAB_CHECK(peak_flops_ > 0 && machine.device.memory_bytes_per_s > 0, "machine `{}` has no peak or bandwidth for {}",
                 machine.id, precision);
}

Seconds DatasheetCostModel::compute(const Plan& plan, const Instruction& instruction, int) const {
  const WorkAmount work = work_of(*instruction.segment, *instruction.op, plan.mesh);
  if (const auto outside = outside_seconds(machine_, *instruction.segment, *instruction.op, static_cast<double>(work.memory.value)))
    return Seconds(*outside);
  const double flops = static_cast<double>(work.flops.value);
  const bool matmul =
      std::holds_alternative<Linear>(instruction.op->work) || std::holds_alternative<Attention>(instruction.op->work);
  const double reached = efficiency_.matmul * (matmul ? flops / (flops + efficiency_.ramp_flops) : 1.0);
  return Seconds(std::max(time_at(flops, peak_flops_ * reached), time_at(static_cast<double>(work.memory.value),
                                                                         machine_.device.memory_bytes_per_s * efficiency_.memory)));
}

namespace {

/// How the ranks of a communicator lie on nodes, seen from rank 0: groups of one communicator lie alike.
struct Spread {
  int nodes = 1;
  int most_on_a_node = 1;
};

Spread spread_of(const std::vector<int>& group, int devices_per_node) {
  std::map<int, int> members;
  Spread spread{0, 0};
  for (const int rank : group) spread.most_on_a_node = std::max(spread.most_on_a_node, ++members[rank / devices_per_node]);
  spread.nodes = static_cast<int>(members.size());
  return spread;
}

}  // namespace

Seconds DatasheetCostModel::communicate(const Plan& plan, const Instruction& instruction, int) const {
  const Op& op = *instruction.op;
  const std::vector<int> group = group_of(plan.mesh, comm_of(plan, op), 0);
  const Spread spread = spread_of(group, std::max(1, machine_.devices_per_node));
  const bool network = spread.nodes > 1;
  const double link = machine_.device.link_bytes_per_s * efficiency_.link;
  const double inter = machine_.inter_bytes_per_s * efficiency_.network;
  const double latency = network ? efficiency_.network_latency_s : efficiency_.step_latency_s;

  const auto* c = std::get_if<Collective>(&op.work);
  if (c == nullptr) {
    const int64_t bytes = cost_shape_of(plan, *instruction.segment, op)[0];
    return Seconds(latency + time_at(static_cast<double>(bytes), network ? inter : link));
  }
  const int size = static_cast<int>(group.size());
  if (size == 1) return Seconds(0);
  const Type& full = full_type(*instruction.segment, op, *c);
  const auto steps = collective_steps(c->kind, c->algorithm, size, 0, c->root).size();
  const int64_t sent = bytes_of(full.dtype, sent_elements(c->kind, c->algorithm, full.shape.elements(), size, 0, c->root));
  const double bandwidth = network ? (link > 0 ? std::min(link, inter * spread.most_on_a_node) : inter) : link;
  return Seconds(static_cast<double>(steps) * latency + time_at(static_cast<double>(sent), bandwidth));
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

Result<std::unique_ptr<CostModel>> cost_model_for(const Machine& machine, const std::string& precision) {
  if (machine.calibration) return std::unique_ptr<CostModel>(std::make_unique<CalibratedCostModel>(machine));
  if (machine.local)
    return Error{ExitCode::kEnvironment, fmt::format("machine `{}` is this machine, and it was never measured", machine.id),
                 "run `shardlab calibrate` first"};
  if (machine.device.memory_bytes_per_s <= 0 || machine.device.peak_flops.empty())
    return Error{ExitCode::kUsage, fmt::format("machine `{}` states no memory bandwidth or no peak flops", machine.id),
                 "give device.memory_bandwidth and device.peak_flops in its machine file"};
  if (peak_flops_of(machine.device, precision) > 0)
    return std::unique_ptr<CostModel>(std::make_unique<DatasheetCostModel>(machine, precision));
  return Error{ExitCode::kUsage, fmt::format("machine `{}` states no peak for precision {} nor a wider one", machine.id, precision),
               "add it to device.peak_flops in its machine file"};
}

}  // namespace shardlab
