#include "plan/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "plan/op_fields.h"
#include "plan/text_names.h"
#include "plan/text_places.h"

namespace shardlab {

std::string name_text(std::string_view name) {
  const bool bare = !name.empty() && std::all_of(name.begin(), name.end(), is_bare) && name[0] != '@' && name[0] != '/';
  if (bare) return std::string(name);
  std::string text = "\"";
  for (const char c : name) {
    if (c == '"' || c == '\\') text += '\\';
    if (c == '\n')
      text += "\\n";
    else
      text += c;
  }
  return text + '"';
}

std::string op_name(const Segment& segment, const Op& op) {
  constexpr std::string_view kPhases[] = {"", ".F", ".I", ".W"};
  return fmt::format("{} {} {}{}", segment.name, op.label, kind_of(op.work), kPhases[static_cast<size_t>(phase_of(op.work))]);
}

namespace {

constexpr size_t kWidth = 132;  ///< calls wrap at this column

template <class... T>
void put(std::string& out, fmt::format_string<T...> format, T&&... values) {
  fmt::format_to(std::back_inserter(out), format, std::forward<T>(values)...);
}

/// Shortest decimal that reads back to the same bits; the bits themselves for a NaN, which no decimal tells apart.
std::string number_text(float v) {
  return std::isnan(v) ? fmt::format("0x{:08x}", std::bit_cast<uint32_t>(v)) : fmt::format("{}", v);
}
std::string number_text(int64_t v) { return fmt::format("{}", v); }
std::string number_text(int v) { return fmt::format("{}", v); }
std::string number_text(Rational v) { return v.den == 1 ? fmt::format("{}", v.num) : fmt::format("{}/{}", v.num, v.den); }

bool same(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }
template <class T>
bool same(const T& a, const T& b) {
  return a == b;
}

std::string operand_name(std::string_view name) { return fmt::format("%{}", name_text(name)); }

/// "%name" of entry `index` of a table whose entries have names; "%?7" for an index it lacks, so that faulty plans print too.
template <class Table>
std::string operand_text(const Table& table, int32_t index) {
  const bool exists = index >= 0 && static_cast<size_t>(index) < table.size();
  return exists ? operand_name(table[static_cast<size_t>(index)].name) : fmt::format("%?{}", index);
}

template <class Table>
std::string entry_name(const Table& table, int32_t index) {
  const bool exists = index >= 0 && static_cast<size_t>(index) < table.size();
  return exists ? name_text(table[static_cast<size_t>(index)].name) : fmt::format("?{}", index);
}

std::string axes_text(AxisSet axes, const Mesh& mesh) {
  std::string out;
  for (size_t a = 0; a < mesh.axes.size(); ++a)
    if (axes.contains(static_cast<int>(a))) put(out, "{}{}", out.empty() ? "" : ",", name_text(mesh.axes[a].name));
  return out.empty() ? "none" : out;
}

std::string groups_text(const Comm& comm, const Mesh& mesh) {
  if (comm.groups.empty()) return "";
  if (comm.groups == mirror_pairs(mesh.size(comm.axes))) return " ends";
  std::string out = " groups";
  for (const std::vector<int>& group : comm.groups) put(out, " {}", fmt::join(group, ","));
  return out;
}

/// Writes the attributes that differ from their defaults, and those without which an op cannot be understood.
struct FieldPrinter {
  std::string& out;
  const Plan& plan;

  void flag(std::string_view name, bool& value) {
    if (value) put(out, " {}", name);
  }
  template <class T>
  void number(std::string_view name, T& value, T standard) {
    if (!same(value, standard)) put(out, " {}={}", name, number_text(value));
  }
  template <class E, size_t N>
  void choice(std::string_view name, E& value, const std::array<std::string_view, N>& names, E standard) {
    if (value != standard) put(out, " {}={}", name, names[static_cast<size_t>(value)]);
  }
  void text(std::string_view name, std::string& value) { put(out, " {}={}", name, name_text(value)); }
  void comm(std::string_view name, CommId& value) { put(out, " {}={}", name, entry_name(plan.comms, value.value)); }
};

std::string view_text(const View& view, const std::string& base, const Mesh& mesh) {
  std::string out = " view " + base;
  if (view.offset != 0) put(out, " offset {}", view.offset);
  if (!view.shard_axes.empty()) put(out, " shard {}", axes_text(view.shard_axes, mesh));
  return out;
}

std::string slot_line(const Plan& plan, const Segment& segment, const Slot& slot, size_t name_width) {
  std::string out = fmt::format("  {} {:<{}} {:<10} {}", slot.kind == SlotKind::kBound ? "bound" : "local", operand_name(slot.name),
                                name_width, name_of(slot.cls), print(slot.type, plan.mesh));
  if (slot.space != Space::kDevice) put(out, " {}", name_of(slot.space));
  if (slot.view) out += view_text(*slot.view, operand_text(segment.slots, slot.view->base), plan.mesh);
  if (slot.count) put(out, " count {}", operand_text(segment.slots, slot.count.value));
  return out;
}

std::string buffer_line(const Plan& plan, const Role& role, const Buffer& buffer, size_t name_width) {
  std::string out =
      fmt::format("  {:<{}} {:<10} {}", operand_name(buffer.name), name_width, name_of(buffer.kind), print(buffer.type, plan.mesh));
  if (buffer.space != Space::kDevice) put(out, " {}", name_of(buffer.space));
  if (buffer.persistent) out += " persistent";
  if (buffer.view) out += view_text(*buffer.view, operand_text(role.buffers, buffer.view->base), plan.mesh);
  if (buffer.parameter != -1) put(out, " of {}", entry_name(plan.parameters, buffer.parameter));
  if (buffer.count != -1) put(out, " count {}", operand_text(role.buffers, buffer.count));
  if (buffer.packed_as != -1) put(out, " packed {}", operand_text(role.buffers, buffer.packed_as));
  return out;
}

std::string parameter_line(const Plan& plan, const Parameter& p, size_t name_width) {
  static constexpr float kDeviation = 0.02f;
  std::string out = fmt::format("parameter {:<{}} {}", name_text(p.name), name_width, print(p.type, plan.mesh));
  put(out, " {} {}", p.stages.size() == 1 ? "stage" : "stages", fmt::join(p.stages, " "));
  put(out, " {}", kInitialNames[static_cast<size_t>(p.initial)]);
  if (p.initial == Initial::kNormal || !same(p.deviation, kDeviation)) put(out, " deviation {}", number_text(p.deviation));
  if (p.decay) out += " decay";
  put(out, " tensor {}", p.tensor);
  return out;
}

/// "call layer.F l=0 m=1 (x=%x0, ...)", wrapped between bindings.
std::string call_line(const Plan& plan, const Role& role, const Call& call) {
  std::string out = "  call " + entry_name(plan.segments, call.segment.value);
  if (call.layer != -1) put(out, " l={}", call.layer);
  if (call.micro_batch != -1) put(out, " m={}", call.micro_batch);
  out += " (";
  const bool known = call.segment && call.segment.index() < plan.segments.size();
  size_t line_begin = 0;
  bool first = true;
  for (size_t i = 0; i < call.binding.size(); ++i) {
    if (!call.binding[i]) continue;
    const std::string slot =
        known ? entry_name(plan.segments[call.segment.index()].slots, static_cast<int32_t>(i)) : fmt::format("?{}", i);
    const std::string binding = slot + "=" + operand_text(role.buffers, call.binding[i].value);
    if (!first) out += ",";
    if (out.size() - line_begin + binding.size() + 2 > kWidth && !first) {
      out += "\n     ";
      line_begin = out.size() - 5;
    }
    if (!first) out += " ";
    out += binding;
    first = false;
  }
  return out + ")";
}

std::string item_line(const Plan& plan, const Role& role, const Item& item) {
  return std::visit(Overload{
                        [&](const Call& call) { return call_line(plan, role, call); },
                        [&](const Alloc& a) { return "  alloc " + operand_text(role.buffers, a.buffer.value); },
                        [&](const Free& f) { return "  free " + operand_text(role.buffers, f.buffer.value); },
                    },
                    item);
}

/// Width of a column that holds every name of the table, up to a limit beyond which names push the rest of their line along.
template <class Table>
size_t column_width(const Table& table, size_t limit) {
  size_t width = 1;
  for (const auto& entry : table) width = std::max(width, std::min(limit, name_text(entry.name).size() + 1));
  return width;
}

void put_head(std::string& out, const Plan& plan) {
  put(out, "{} {}\nname {}\nmesh", kPlanMagic, kPlanVersion, name_text(plan.name));
  for (const MeshAxis& a : plan.mesh.axes) put(out, " {}={}", name_text(a.name), a.size);
  put(out, "\nmicro_batches {}\nsequences_per_micro_batch {}\nperiod {}\nstreams", plan.micro_batches,
      plan.sequences_per_micro_batch, plan.period);
  for (const std::string& s : plan.streams) put(out, " {}", name_text(s));
  if (!plan.together.empty()) put(out, "\ntogether {}", axes_text(plan.together, plan.mesh));
  if (plan.token_order.kind != TokenOrder::Kind::kContiguous)
    put(out, "\ntoken_order {} {}", kTokenOrders[static_cast<size_t>(plan.token_order.kind)], plan.token_order.parts);
  for (const ExpertPlacement& p : plan.expert_placement) put(out, "\nexpert_placement {} {}", p.layer, fmt::join(p.experts, " "));
  out += "\nstrategies";
  for (const std::string& s : plan.strategies) put(out, " {}", name_text(s));
  out += "\n";
  for (const Comm& c : plan.comms)
    put(out, "comm {} axes {}{}\n", name_text(c.name), axes_text(c.axes, plan.mesh), groups_text(c, plan.mesh));
  if (!plan.parameters.empty()) out += "\n";
  const size_t width = column_width(plan.parameters, 32);
  for (const Parameter& p : plan.parameters) out += parameter_line(plan, p, width) + "\n";
}

}  // namespace

std::string print(const Type& type, const Mesh& mesh) {
  std::string out = fmt::format("{}[{}]", name_of(type.dtype),
                                fmt::join(type.shape.extent.begin(), type.shape.extent.begin() + type.shape.rank, ","));
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const Placement place = type.place[a];
    if (place.kind == Place::kReplicate) continue;
    put(out, " {}:", name_text(mesh.axes[a].name));
    if (place.is_shard())
      put(out, "S{}", place.dim);
    else
      out += place.is_partial() ? "P" : "L";
  }
  if (!(type.scale == Scale{})) put(out, " scale {}", number_text(type.scale.factor));
  if (!type.scale.denominator.empty()) put(out, " per {}", name_text(type.scale.denominator));
  if (type.micro != Micro::kNone) put(out, " micro:{}", type.micro == Micro::kSlice ? "slice" : "sum");
  return out;
}

std::string print(const Plan& plan, const Segment& segment, const Op& op) {
  std::string out(kind_of(op.work));
  if (const Phase phase = phase_of(op.work); phase != Phase::kNone) put(out, ".{}", "-FIW"[static_cast<size_t>(phase)]);
  put(out, " {} (", name_text(op.label));
  const auto put_operands = [&](const std::vector<SlotId>& slots) {
    for (size_t i = 0; i < slots.size(); ++i) put(out, "{}{}", i == 0 ? "" : ", ", operand_text(segment.slots, slots[i].value));
  };
  put_operands(op.reads);
  out += ") -> (";
  put_operands(op.writes);
  out += ")";
  Work work = op.work;
  FieldPrinter fields{out, plan};
  std::visit([&](auto& w) { op_fields(fields, w); }, work);
  if (op.when) put(out, " when {}", operand_text(segment.slots, op.when.value));
  if (op.stream.value != 0) {
    const bool known = op.stream && op.stream.index() < plan.streams.size();
    put(out, " @{}", known ? name_text(plan.streams[op.stream.index()]) : fmt::format("?{}", op.stream.value));
  }
  if (!op.strategy.empty()) put(out, " #{}", name_text(op.strategy));
  return out;
}

std::string print(const Plan& plan, const Segment& segment) {
  std::string out = "segment " + name_text(segment.name) + "\n";
  const size_t width = column_width(segment.slots, 20);
  for (const Slot& slot : segment.slots) out += slot_line(plan, segment, slot, width) + "\n";
  if (!segment.slots.empty() && !segment.steps.empty()) out += "\n";
  for (const Step& step : segment.steps) {
    out += "  ";
    out += std::visit(Overload{
                          [&](const Op& op) { return print(plan, segment, op); },
                          [&](const AllocSlot& a) { return "alloc " + operand_text(segment.slots, a.slot.value); },
                          [&](const FreeSlot& f) { return "free " + operand_text(segment.slots, f.slot.value); },
                      },
                      step);
    out += "\n";
  }
  return out;
}

std::string print(const Plan& plan) {
  std::string out;
  put_head(out, plan);
  for (const Segment& segment : plan.segments) put(out, "\n{}", print(plan, segment));
  for (const Role& role : plan.roles) {
    put(out, "\nrole {}\n", role.stage);
    const size_t width = column_width(role.buffers, 32);
    for (const Buffer& buffer : role.buffers) out += buffer_line(plan, role, buffer, width) + "\n";
    if (!role.buffers.empty() && !role.program.empty()) out += "\n";
    for (const Item& item : role.program) out += item_line(plan, role, item) + "\n";
  }
  return out;
}

}  // namespace shardlab
