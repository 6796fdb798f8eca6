// Puts an estimate together: legality, the remembered cost of a layer, time, memory.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "plan/base/hash.h"
#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

uint64_t bits(double v) { return std::bit_cast<uint64_t>(v); }

uint64_t hash_of(const LayerKey& k) {
  uint64_t h = mix(static_cast<uint64_t>(k.tp) | static_cast<uint64_t>(k.cp) << 21 | static_cast<uint64_t>(k.ep) << 42);
  h = mix(h ^ (static_cast<uint64_t>(k.micro_batch) | static_cast<uint64_t>(k.expert_tp) << 32));
  h = mix(h ^ static_cast<uint64_t>(k.seq_len) ^ bits(k.expert_skew));
  h = mix(h ^ static_cast<uint64_t>(k.devices));
  const uint64_t flags = static_cast<uint64_t>(k.precision) | static_cast<uint64_t>(k.recompute.modules) << 8 |
                         static_cast<uint64_t>(k.cp_kind) << 32 | static_cast<uint64_t>(k.sequence_parallel) << 40 |
                         static_cast<uint64_t>(k.tensor_overlap) << 41 | static_cast<uint64_t>(k.algorithm) << 42;
  return mix(h ^ flags);
}

/// Open addressing over blocks that never move, so that a frame may hold a reference while others are added.
class BlockMemo {
 public:
  template <class Make>
  const Block& get(const LayerKey& key, const Make& make) {
    if (last_ != nullptr && last_->key == key) return last_->block;
    if (2 * (entries_.size() + 1) > slots_.size()) grow();
    for (size_t i = hash_of(key) & (slots_.size() - 1);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i] == nullptr) {
        entries_.push_back(std::make_unique<Entry>(Entry{key, make()}));
        slots_[i] = entries_.back().get();
      }
      if (slots_[i]->key == key) return (last_ = slots_[i])->block;
    }
  }

 private:
  struct Entry {
    LayerKey key;
    Block block;
  };
  void grow() {
    slots_.assign(std::max<size_t>(64, 2 * slots_.size()), nullptr);
    for (const auto& e : entries_) {
      size_t i = hash_of(e->key) & (slots_.size() - 1);
      while (slots_[i] != nullptr) i = (i + 1) & (slots_.size() - 1);
      slots_[i] = e.get();
    }
  }
  std::vector<Entry*> slots_;
  std::vector<std::unique_ptr<Entry>> entries_;
  Entry* last_ = nullptr;
};

bool chosen(int8_t wish, bool otherwise) { return wish < 0 ? otherwise : wish != 0; }

Frame frame_of(const Prepared::Inside& in, const Point& point, const Block& block, CollectiveMemo& collectives, StepMemo& steps) {
  const FrameworkProfile& p = in.profile;
  const bool gathers = point.zero == 3;
  const bool keeps = gathers && (!chosen(point.reshard, p.overlap.reshard) || (point.pp > 1 && p.overlap.keeps_gathered));
  return {.in = in,
          .point = point,
          .block = block,
          .collectives = collectives,
          .steps = steps,
          .groups = StageGroups(in.shape, point, p.model.balanced_stages),
          .bytes = StateBytes(p, point, in.shape.trained),
          .replicas = Replicas(point),
          .style = {p.model.own_collectives, point.algorithm},
          .bucket_bytes = point.bucket_bytes < 0 ? p.overlap.bucket_bytes : static_cast<double>(point.bucket_bytes),
          .overlap_gradients = chosen(point.overlap, p.overlap.gradients && (point.zero == 0 || gathers || p.overlap.zero)),
          .overlap_weights = chosen(point.overlap, p.overlap.weights),
          .gathers = gathers,
          .keeps_gathered = keeps};
}

}  // namespace

CollectiveMemo::Entry& CollectiveMemo::find(uint64_t key) {
  for (size_t i = mix(key) & (entries_.size() - 1);; i = (i + 1) & (entries_.size() - 1))
    if (entries_[i].key == 0 || entries_[i].key == key) return entries_[i];
}

CollectiveMemo::Entry& CollectiveMemo::prepared(CollectiveUse kind, const Group& group, const CollectiveStyle& style) {
  const uint64_t key = 1 + static_cast<uint64_t>(kind) + (static_cast<uint64_t>(style.choice) << 60) +
                       8 * (static_cast<uint64_t>(group.ranks_per_node) + (static_cast<uint64_t>(group.groups_per_node) << 14) +
                            (static_cast<uint64_t>(group.nodes) << 28));
  Entry* entry = &find(key);
  if (entry->key == 0) {
    if (2 * ++used_ > entries_.size()) {
      std::vector<Entry> old(2 * entries_.size());
      old.swap(entries_);
      for (const Entry& e : old)
        if (e.key != 0) find(e.key) = e;
      entry = &find(key);
    }
    *entry = {key, fabric_->prepare(kind, group, style), fabric_->contention(kind, group)};
  }
  return *entry;
}

double CollectiveMemo::seconds(CollectiveUse kind, double bytes, const Group& group, const CollectiveStyle& style) {
  return group.ranks() <= 1 || bytes <= 0 ? 0 : prepared(kind, group, style).cost.seconds(bytes);
}

const Contention& CollectiveMemo::contention(const Group& group, const CollectiveStyle& style) {
  return prepared(CollectiveUse::kAllGather, group, style).contention;
}

StateBytes::StateBytes(const FrameworkProfile& p, const Point& point, const Trained& trained)
    // Where the master is cut and no rank holds all weights, stages below 3 keep what was gathered.
    : parameter(p.state.parameter > 0 || point.zero == 3 ? p.state.parameter : p.state.weight_wire),
      gradient(p.state.gradient),
      fresh(p.state.gradient_fresh),
      ends(std::max(p.state.gradient_ends, p.state.gradient_fresh)),
      master(p.state.master),
      moments(p.state.moments),
      gradient_wire(p.state.gradient_wire),
      weight_wire(p.state.weight_wire),
      expert_weight_wire(p.state.weight_wire),
      ends_wire(p.state.weight_wire),
      frozen(trained.frozen_bytes()),
      frozen_ends(2) {
  if (point.precision == Precision::kFp32) {
    if (trained.frozen_bits == 16) frozen = 4;
    frozen_ends = 4;
    parameter = p.state.parameter > 0 ? 4 : 0, master = p.state.parameter > 0 ? 0 : 4;
    gradient = gradient_wire = weight_wire = expert_weight_wire = ends_wire = 4;
    if (fresh > 0) fresh = 4;
    if (ends > 0) ends = 4;
  }
  const bool low = point.precision == Precision::kFp8 || point.precision == Precision::kFp4;
  if (low && p.state.fp8_gather) weight_wire = expert_weight_wire = 1;
  if (low && p.state.fp8_alone)
    parameter = 1, master = std::max(master, 2.0);
  else if (low)
    parameter += p.state.fp8_weight;
  switch (point.compression) {
    case Compression::kNone:
    case Compression::kPowerSgd:
    case Compression::kTopK: break;
    case Compression::kOneBit: gradient_wire = 1.0 / 8; break;
    case Compression::kInt8: gradient_wire = 1; break;
  }
  if (point.compression != Compression::kNone && point.compression != Compression::kInt8) gradient += 4;  // the error fed back
}

int64_t Frame::end_parameters(const StageGroup& g) const {
  const bool shared = g.holds_embedding && g.holds_head && in.shape.tied_embeddings;
  return (g.holds_embedding ? block.embedding.parameters() : 0) + (g.holds_head ? block.head.parameters() : 0) -
         (shared ? block.embedding.matrix : 0);
}

int64_t Frame::dense_parameters(const StageGroup& g) const {
  return parameter_copies(point.schedule) * (g.dense * block.dense.dense_held() + g.moe * block.moe.dense_held()) +
         end_parameters(g);
}

int64_t Frame::expert_parameters(const StageGroup& g) const {
  return parameter_copies(point.schedule) * g.moe * block.moe.expert_held();
}

int64_t Frame::trained_ends(const StageGroup& g) const {
  const bool shared = g.holds_embedding && g.holds_head && in.shape.tied_embeddings;
  return (g.holds_embedding ? block.embedding.trained() : 0) + (g.holds_head ? block.head.trained() : 0) -
         (shared && !block.embedding.frozen ? block.embedding.matrix : 0);
}

int64_t Frame::trained_dense(const StageGroup& g) const {
  const auto own = [](const LayerCost& c) { return c.dense_held() - c.frozen; };
  return parameter_copies(point.schedule) * (g.dense * own(block.dense) + g.moe * own(block.moe)) + trained_ends(g);
}

int64_t Frame::trained_experts(const StageGroup& g) const {
  return parameter_copies(point.schedule) * g.moe * (block.moe.expert_held() - block.moe.frozen_expert);
}

StageLayers::StageLayers(const ModelShape& shape, const Point& point) : stages(point.pp) {
  first_less = point.embedding_as_layer ? 1 : 0, last_less = point.head_as_layer ? 1 : 0;
  int64_t shared = shape.layers + first_less + last_less;
  int32_t among = stages;
  if (stages > 1 && point.first_layers > 0) shared -= first_own = point.first_layers, --among, shared -= first_less, first_less = 0;
  if (stages > 1 && point.last_layers > 0) shared -= last_own = point.last_layers, --among, shared -= last_less, last_less = 0;
  least = among > 0 ? shared / among : 0;
  uneven = among > 0 ? static_cast<int32_t>(shared % among) + (first_own > 0 ? 1 : 0) : 0;
  sound = among > 0 ? shared >= 0 : shared == 0;
}

int64_t StageLayers::layers(int32_t stage) const {
  if (stages == 1) return least - first_less - last_less;
  if (stage == 0 && first_own > 0) return first_own;
  if (stage == stages - 1 && last_own > 0) return last_own;
  return least + (stage < uneven ? 1 : 0) - (stage == 0 ? first_less : 0) - (stage == stages - 1 ? last_less : 0);
}

int64_t StageLayers::before(int32_t stage) const {
  if (stage == 0) return 0;
  const int64_t own = first_own > 0 ? 1 : 0;  // stages among which nothing is shared
  const int64_t counted = stage - own, more = std::max<int64_t>(0, std::min<int64_t>(stage, uneven) - own);
  return (own > 0 ? first_own : -first_less) + counted * least + more;
}

int32_t StageLayers::holder(int64_t layer) const {
  int32_t low = 0, high = stages - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    (before(middle) <= layer ? low : high) = before(middle) <= layer ? middle : middle - 1;
  }
  return low;
}

StageGroups::StageGroups(const ModelShape& shape, const Point& point, bool balanced) {
  const int32_t stages = point.pp;
  const bool once = point.schedule == Schedule::kAfab || point.schedule == Schedule::k1F1B;  // a stage is one run of blocks
  if (balanced && stages > 1 && once && !shape.moe()) {
    balance(shape, point);
    return;
  }
  const StageLayers split(shape, point);
  // Corners: after the first stage, where stages have one layer less, around the end of the dense layers, before the last stage.
  std::array<int32_t, 6> corners{0, 1, split.uneven, stages - 1, stages, stages};
  if (shape.moe() && shape.dense_layers > 0) {
    corners[4] = std::min(split.holder(shape.dense_layers), stages);
    corners[5] = std::min(corners[4] + 1, stages);
  }
  std::sort(corners.begin(), corners.end());
  for (size_t i = 0; i < corners.size(); ++i) {
    const int32_t next = i + 1 < corners.size() ? corners[i + 1] : stages;
    if (next > corners[i] && corners[i] < stages) add(corners[i], next - corners[i], shape, point);
  }
}

void StageGroups::add(int32_t first, int32_t count, const ModelShape& shape, const Point& point) {
  const StageLayers split(shape, point);
  const int64_t layers = split.layers(first), before = split.before(first);
  const int64_t dense_limit = shape.moe() ? shape.dense_layers : shape.layers;
  const int64_t dense = std::clamp<int64_t>(dense_limit - before, 0, layers);
  StageGroup g{.first = first, .count = count, .dense = dense, .moe = layers - dense};
  const bool at_first = first == 0, at_last = first + count == point.pp;
  if (point.schedule == Schedule::kDualPipe) {
    g.holds_embedding = g.holds_head = g.holds_loss = at_first || at_last;
    g.embedding = g.head = g.loss = g.holds_head ? 0.5 : 0;
  } else {
    g.holds_embedding = at_first, g.holds_head = g.holds_loss = is_folded(point.schedule) ? at_first : at_last;
    g.embedding = g.holds_embedding ? 1 : 0, g.head = g.loss = g.holds_head ? 1 : 0;
  }
  groups_[static_cast<size_t>(count_++)] = g;
}

/// Blocks in their order: embedding, layers, head, cast, loss; only layers and head cost. A stage ends with the block that brings
/// all up to it above the stage's share of the total.
void StageGroups::balance(const ModelShape& shape, const Point& point) {
  const auto of = [](int64_t v) { return static_cast<double>(v); };
  const double layer = 4 * of(shape.heads) * of(shape.head_dim) * of(shape.hidden) + 3 * of(shape.ffn) * of(shape.hidden);
  const double layers = of(shape.layers) * layer, total = layers + of(shape.vocab) * of(shape.hidden);
  int64_t done = 0;
  bool head = false, cast = false, loss = false;
  for (int32_t stage = 0; stage < point.pp; ++stage) {
    StageGroup g{.first = stage, .count = 1};
    const double share = total * (of(stage + 1) / of(point.pp));
    const bool last = stage + 1 == point.pp;
    const int64_t reaches = last ? shape.layers : std::min(shape.layers, static_cast<int64_t>(share / layer) + 1);
    g.dense = std::max<int64_t>(0, reaches - done);
    done += g.dense;
    g.holds_embedding = stage == 0, g.embedding = stage == 0 ? 1 : 0;
    const bool room = last || of(done) * layer <= share;  // the stage did not end with a layer
    if (done == shape.layers && room && !loss) {
      const bool here = !head;
      if (here) g.holds_head = head = true, g.head = 1;
      // What follows the head is the next stage's, then the stage's after that.
      if (last)
        loss = true;
      else if (!here)
        (cast ? loss : cast) = true;
      g.holds_loss = loss, g.loss = loss ? 1 : 0;
      if (!here) ++logit_hops_;
    }
    int kind = 0;
    while (kind < count_ && !groups_[static_cast<size_t>(kind)].same_work(g)) ++kind;
    if (kind < count_)
      ++groups_[static_cast<size_t>(kind)].count;
    else
      groups_[static_cast<size_t>(count_++)] = g;
    kinds_.push_back(static_cast<uint8_t>(kind));
  }
}

const StageGroup& StageGroups::of(int32_t stage) const {
  if (!kinds_.empty()) return groups_[kinds_[static_cast<size_t>(stage)]];
  for (const StageGroup& g : all())
    if (stage >= g.first && stage < g.first + g.count) return g;
  return groups_[0];
}

const ModelShape& Prepared::shape() const { return inside_->shape; }
const Machine& Prepared::machine() const { return inside_->machine; }
const FrameworkProfile& Prepared::profile() const { return inside_->profile; }

namespace {

/// The profile's host seconds on a host of the given speed.
FrameworkProfile::Host on_host(FrameworkProfile::Host host, double speed) {
  using H = FrameworkProfile::Host;
  for (double H::*seconds : {&H::forward_s, &H::backward_s, &H::layer_s, &H::collective_s, &H::exchange_s, &H::step_s,
                             &H::micro_batch_s, &H::send_s, &H::view_s})
    host.*seconds /= speed;
  return host;
}

}  // namespace

Result<Prepared> prepare(const ModelShape& shape, const Machine& machine, const FrameworkProfile& profile,
                         const MeasuredFabric& measured, std::shared_ptr<const Case> rest) {
  SHARDLAB_TRY(check(shape));
  if (machine.nodes < 1 || machine.devices_per_node < 1 || int64_t{machine.nodes} * machine.devices_per_node > (1 << 24))
    return Error{
        .message = "machine: nodes and devices_per_node are at least 1, and their product at most 2^24", .hint = {}, .where = {}};
  if (machine.is_mixed())
    return Error{.message = fmt::format("{} is of several kinds of devices, and estimates know one", machine.id),
                 .hint =
                     "its cases are predicted by their plans: `shardlab run` of a sweep with profile: shardlab (its --resolution "
                     "analytic too), or `shardlab memory --profile shardlab`",
                 .where = {}};
  Result<DeviceModel> device = DeviceModel::of(machine.device);
  if (!device) return device.error();
  Result<Fabric> fabric = Fabric::of(machine, measured);
  if (!fabric) return fabric.error();
  bool transferred = machine.devices() > 1 && fabric->provenance(machine.nodes > 1) == Provenance::kTransferred;
  for (const std::string_view what : {"matmul", "attention", "memory"})
    transferred = transferred || device->provenance(what) == Provenance::kTransferred;
  // A table that is not padded makes rows that do not begin at 16 bytes.
  const bool unaligned = shape.vocab % 8 != 0 && static_cast<int64_t>(profile.model.vocab_multiple) % 8 != 0;
  transferred = transferred || (unaligned && device->provenance("unaligned") == Provenance::kTransferred);
  const FrameworkProfile::Host host = on_host(profile.host, device->constants().host_speed);
  return Prepared(std::make_shared<const Prepared::Inside>(
      Prepared::Inside{shape, machine, profile, host, std::move(*device), std::move(*fabric), transferred, std::move(rest),
                       machine.device.peak_flops.contains("fp8"), machine.device.peak_flops.contains("fp4"),
                       machine.device.architecture == "hopper" || machine.device.architecture == "blackwell"}));
}

struct Estimator::State {
  explicit State(Prepared p) : prepared(std::move(p)), collectives(prepared.inside().fabric), executor(prepared.inside()) {}

  Frame frame(const Point& point) {
    const Prepared::Inside& in = prepared.inside();
    const LayerKey key = layer_key(point, in.profile);
    const Block& block = blocks.get(key, [&] { return block_cost(in.layers(), key); });
    return frame_of(in, point, block, collectives, steps);
  }

  Prepared prepared;
  CollectiveMemo collectives;
  StepMemo steps;
  BlockMemo blocks;
  ExecutorCases executor;
};

Estimator::Estimator(Prepared prepared) : state_(std::make_unique<State>(std::move(prepared))) {}
Estimator::~Estimator() = default;
Estimator::Estimator(Estimator&&) noexcept = default;
Estimator& Estimator::operator=(Estimator&&) noexcept = default;

Estimate Estimator::operator()(const Point& point) {
  const Prepared::Inside& in = state_->prepared.inside();
  Estimate estimate;
  estimate.refusal = refusal_of(in, point);
  if (!estimate.legal()) return estimate;
  estimate.transferred = in.transferred;
  if (state_->executor.refuses(point)) {
    estimate.refusal = Refusal::kAbility;
    return estimate;
  }
  Frame frame = state_->frame(point);
  estimate_time(frame, estimate);
  estimate_memory(frame, estimate);
  return estimate;
}

MemoryBytes Estimator::stage_memory(const Point& point, int32_t stage) {
  if (refusal_of(state_->prepared.inside(), point) != Refusal::kNone || stage < 0 || stage >= point.pp) return {};
  const Frame frame = state_->frame(point);
  return memory_of(frame, frame.groups.of(stage), stage, nullptr, nullptr);
}

StagePeak Estimator::stage_peak(const Point& point, int32_t stage) {
  const Prepared::Inside& in = state_->prepared.inside();
  if (refusal_of(in, point) != Refusal::kNone || stage < 0 || stage >= point.pp) return {};
  const Frame frame = state_->frame(point);
  return stage_peak_of(frame, frame.groups.of(stage), stage, layer_key(point, in.profile));
}

const Case* Estimator::executed(const Point& point) {
  return refusal_of(state_->prepared.inside(), point) == Refusal::kNone ? state_->executor.of(point) : nullptr;
}

double Estimator::least_step_s(const Point& point) { return analytic::least_step_s(state_->frame(point)); }

double Estimator::least_device_bytes(const Point& point) { return analytic::least_device_bytes(state_->frame(point)); }

Refusal refusal_of(const Prepared& prepared, const Point& point) { return refusal_of(prepared.inside(), point); }

std::vector<AllocationEvent> allocation_events(const Prepared& prepared, const Point& point, int32_t stage) {
  const Prepared::Inside& in = prepared.inside();
  if (refusal_of(in, point) != Refusal::kNone || stage < 0 || stage >= point.pp) return {};
  const LayerKey key = layer_key(point, in.profile);
  const Block block = block_cost(in.layers(), key);
  CollectiveMemo collectives(in.fabric);
  StepMemo steps;
  const Frame frame = frame_of(in, point, block, collectives, steps);
  return events_of(frame, frame.groups.of(stage), stage, key);
}

HeldBytes held_bytes(const Prepared& prepared, const Point& point) {
  const FrameworkProfile& p = prepared.profile();
  if (point.tp == 1 || p.memory.held_most <= 0) return {};
  const double tensor = (point.precision == Precision::kFp32 ? 4.0 : 2.0) * of(point.micro_batch) * of(point.seq_len) / point.cp *
                        of(prepared.shape().hidden);
  return {whole(tensor * (point.pp > 1 ? p.memory.held_pipeline : p.memory.held)), whole(tensor * p.memory.held_most)};
}

std::vector<ActivationItem> activations_by_kind(const Prepared& prepared, const Point& point) {
  const Prepared::Inside& in = prepared.inside();
  if (refusal_of(in, point) != Refusal::kNone) return {};
  const LayerKey key = layer_key(point, in.profile);
  const Block block = block_cost(in.layers(), key);
  CollectiveMemo collectives(in.fabric);
  StepMemo steps;
  return items_of(frame_of(in, point, block, collectives, steps), key);
}

Estimate estimate(const Prepared& prepared, const Point& point) { return Estimator(prepared)(point); }

RunBill bill(const Prepared& prepared, const Point& point, const Estimate& e, double tokens, const RunPrice& price) {
  return bill(prepared.machine().device.power_w, point, e, tokens, price);
}

RunBill bill(double device_power_w, const Point& point, const Estimate& e, double tokens, const RunPrice& price) {
  RunBill b;
  if (!e.legal() || e.step_s <= 0) return b;
  const double hours = tokens / e.tokens_per_s(point) / 3600;
  const auto devices = static_cast<double>(point.world_size());
  const double power = price.power_w > 0 ? price.power_w : device_power_w;
  b.days = hours / 24;
  b.device_hours = hours * devices;
  b.usd = b.device_hours * price.device_hour_usd;
  b.kwh = b.device_hours * power * price.overhead / 1000;
  b.kg_co2 = b.kwh * price.kg_co2_per_kwh;
  return b;
}

}  // namespace shardlab::simulator::analytic
