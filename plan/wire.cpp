// Messages are counted once a segment and multiplied by its calls; nothing is expanded.

#include "plan/wire.h"

#include <algorithm>
#include <compare>
#include <limits>

#include "plan/collective_steps.h"
#include "plan/row_levels.h"

namespace shardlab {
namespace {

/// Messages of one kind on one communicator, as often as a role sends them in a step.
struct Message {
  int32_t comm = -1;
  bool point_to_point = false;
  CollectiveKind kind = CollectiveKind::kAllReduce;
  Algorithm algorithm = Algorithm::kRing;
  int root = 0;
  int per_node = 1;
  int hop = 0;
  bool cyclic = false;
  DType dtype = DType::f32;
  int64_t elements = 0;
  int64_t more_bytes = 0;  ///< of rows that go by node: all
  friend auto operator<=>(const Message&, const Message&) = default;
};

using Counts = std::map<Message, int64_t>;

/// The buffer of a collective in its full, gathered extent. Of packed rows as many are expected as the rank's tokens make, to all ranks alike.
const Type& sent_whole(const Segment& segment, const Op& op) {
  const Type &from = segment.slots[op.reads.at(0).index()].type, &to = segment.slots[op.writes.at(0).index()].type;
  if (moves_packed_rows(op)) return from.bytes() < to.bytes() ? from : to;
  return std::get<Collective>(op.work).kind == CollectiveKind::kAllGather ? to : from;
}

/// The messages of one run of a segment.
Counts messages_of(const Segment& segment, PackedRows rows) {
  Counts counts;
  const auto type_of = [&](SlotId s) -> const Type& { return segment.slots[s.index()].type; };
  for (const Step& step : segment.steps) {
    const Op* op = std::get_if<Op>(&step);
    if (!op || (rows == PackedRows::kLeftOut && moves_packed_rows(*op))) continue;
    if (const auto* c = std::get_if<Collective>(&op->work)) {
      const Type& whole = sent_whole(segment, *op);
      const auto levels = row_levels(segment, *op);
      ++counts[{c->comm.value, false, c->kind, c->algorithm, c->root, c->per_node, 0, false, whole.dtype,
                levels ? 0 : whole.shape.elements(), levels ? levels->even_bytes() : 0}];
    } else if (const auto* s = std::get_if<Send>(&op->work)) {
      const Type& t = type_of(op->reads.at(0));
      ++counts[{.comm = s->comm.value,
                .point_to_point = true,
                .hop = s->hop,
                .cyclic = s->cyclic,
                .dtype = t.dtype,
                .elements = t.shape.elements()}];
    }
  }
  return counts;
}

Counts messages_of(const std::vector<Counts>& by_segment, const Role& role) {
  std::vector<int64_t> calls(by_segment.size());
  for (const Item& item : role.program)
    if (const Call* call = std::get_if<Call>(&item)) ++calls[call->segment.index()];
  Counts counts;
  for (size_t s = 0; s < by_segment.size(); ++s)
    for (const auto& [message, n] : by_segment[s])
      if (calls[s] != 0) counts[message] += n * calls[s];
  return counts;
}

std::vector<Counts> messages_by_segment(const Plan& plan, PackedRows rows = PackedRows::kEven) {
  std::vector<Counts> counts;
  for (const Segment& segment : plan.segments) counts.push_back(messages_of(segment, rows));
  return counts;
}

const Role& role_of(const Plan& plan, const Coordinates& c) {
  const auto index = static_cast<size_t>(plan.mesh.role_of(c));
  SHARDLAB_CHECK(index < plan.roles.size(), "the plan has {} roles and a rank at stage {}", plan.roles.size(), index);
  return plan.roles[index];
}

/// A seat is all that decides how much a rank sends.
int64_t bytes_sent(const Message& m, const Seat& seat) {
  if (m.point_to_point) {
    const int to = seat.index + m.hop;
    const bool leaves = m.cyclic ? m.hop % seat.size != 0 : to >= 0 && to < seat.size;
    return leaves ? bytes_of(m.dtype, m.elements) : 0;
  }
  return bytes_of(m.dtype, sent_elements(m.kind, m.algorithm, m.elements, seat.size, seat.index, seat.size == 1 ? 0 : m.root,
                                         seat.size == 1 ? 1 : m.per_node)) +
         m.more_bytes;
}

/// total += times * bytes; what has more than 63 bits stays at the largest number.
void add(int64_t& total, int64_t times, int64_t bytes) {
  int64_t more = 0;
  if (__builtin_mul_overflow(times, bytes, &more) || __builtin_add_overflow(total, more, &total))
    total = std::numeric_limits<int64_t>::max();
}

}  // namespace

int64_t sent_bytes(const Segment& segment, const Op& op, int size, int index) {
  if (size == 1) return 0;
  if (const auto levels = row_levels(segment, op)) return levels->even_bytes();
  const auto& c = std::get<Collective>(op.work);
  const Type& whole = sent_whole(segment, op);
  return bytes_of(whole.dtype, sent_elements(c.kind, c.algorithm, whole.shape.elements(), size, index, c.root, c.per_node));
}

std::map<std::string, int64_t> wire_bytes(const Plan& plan, const Coordinates& c) {
  std::map<std::string, int64_t> bytes;
  for (const auto& [message, n] : messages_of(messages_by_segment(plan), role_of(plan, c))) {
    const Comm& comm = plan.comms[static_cast<size_t>(message.comm)];
    add(bytes[comm.name], n, bytes_sent(message, seat_of(plan.mesh, comm, c)));
  }
  return bytes;
}

std::map<std::string, int64_t> total_wire_bytes(const Plan& plan, PackedRows rows) {
  // Ranks of one role that sit alike send alike: count the ranks of each seat, then the bytes of each seat once.
  std::vector<std::vector<std::map<Seat, int64_t>>> seats(plan.roles.size());  // by role and communicator
  for (auto& of_role : seats) of_role.resize(plan.comms.size());
  for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
    const Coordinates c = plan.mesh.coordinates(rank);
    const size_t role = static_cast<size_t>(&role_of(plan, c) - plan.roles.data());
    for (size_t i = 0; i < plan.comms.size(); ++i) ++seats[role][i][seat_of(plan.mesh, plan.comms[i], c)];
  }
  const std::vector<Counts> by_segment = messages_by_segment(plan, rows);
  std::map<std::string, int64_t> bytes;
  std::map<std::pair<Message, Seat>, int64_t> once;
  for (size_t role = 0; role < plan.roles.size(); ++role)
    for (const auto& [message, n] : messages_of(by_segment, plan.roles[role])) {
      const auto comm = static_cast<size_t>(message.comm);
      for (const auto& [seat, ranks] : seats[role][comm]) {
        const auto [sent, is_new] = once.try_emplace({message, seat}, 0);
        if (is_new) sent->second = bytes_sent(message, seat);
        add(bytes[plan.comms[comm].name], n * ranks, sent->second);
      }
    }
  return bytes;
}

}  // namespace shardlab
