// How many steps, how many bytes. A group has g ranks, a buffer n bytes in g parts of n/g.
//
// RING. Rank r talks to r+1 and listens to r-1 (modulo g).
//   reduce_scatter  g-1 steps. In step k rank r sends part r-k-1 and adds what it receives to part r-k-2. A part starts at the
//                   rank after its owner and is complete after g-1 hops: in the last step, k = g-2, rank r receives part r.
//                   Bytes sent by each rank: n (g-1)/g.
//   all_gather      g-1 steps. In step k rank r sends part r-k and receives part r-k-1. Bytes: n (g-1)/g.
//   all_reduce      the one after the other: 2 (g-1) steps, 2n (g-1)/g bytes.
//   broadcast       a chain from the root, cut in g parts so that all links work at once: the rank at distance d receives part p
//                   in step p+d-1 and passes it on in step p+d. g parts and g-1 hops: 2g-2 steps, n bytes, 0 from the last.
//   all_to_all      g-1 steps. In step k (from 1) rank r sends part r+k to rank r+k and receives from rank r-k. n (g-1)/g bytes.
//
// HALVING-DOUBLING. g is a power of two; rank r talks to r xor d.
//   reduce_scatter  log2 g steps, d = g/2, g/4 ... 1. A rank holds 2d parts, aligned; it sends the d parts of its partner's half
//                   and adds the d parts it receives to its own half. Bytes: n/2 + n/4 + ... = n (g-1)/g.
//   all_gather      log2 g steps, d = 1, 2 ... g/2: the same in reverse.
//   broadcast       scatter from the root by halving (its tree is that of ranks numbered r xor root), then all_gather:
//                   2 log2 g steps, at most 2n (g-1)/g bytes, from the root.
//   all_to_all      log2 g steps, d = 1, 2 ... g/2. The part that goes from s to t is first in place t of rank s, at last in
//                   place s of rank t. A step moves the parts whose place differs from the rank in bit d: half of them, and they
//                   come to lie in the place with that bit turned over. Bytes: n/2 log2 g.
//
// DIRECT. Every pair of ranks talks at once.
//   reduce_scatter  1 step: part d of every rank goes to rank d, which sums in canonical tree order. n (g-1)/g bytes.
//   all_gather      1 step: the own part goes to all. n (g-1)/g bytes.
//   all_reduce      2 steps, the two above.
//   broadcast       1 step: n (g-1) bytes from the root.
//   all_to_all      1 step: n (g-1)/g bytes.
//
// TREE. A binomial tree: in the round of distance d, from 1 up by doubling, rank r with r mod 2d = d sends to r-d; l = ceil(log2 g)
// rounds. Latency is l steps, and every step has the whole buffer.
//   all_reduce      l rounds up to rank 0, adding; l rounds down again. 2l steps; a rank sends n once up, and down n for each child.
//   reduce_scatter  l rounds up; then rank 0 scatters: what goes down an edge is the parts of the subtree below it.
//   all_gather      the subtrees' parts up, then the whole down.
//   broadcast       l rounds down from the root (ranks are numbered from it).
//   all_to_all      no tree helps it: as the ring's.
//
// HIERARCHICAL. g = N nodes of L ranks; rank r is (m, l) = (r / L, r mod L). A column is the parts (*, l) of all nodes, a row the
// parts (m, *) of one.
//   reduce_scatter  L-1 steps of a ring within the node, by columns: n (L-1)/L bytes; then N-1 steps of a ring across nodes between
//                   ranks of one l, by the parts of column l: n/L (N-1)/N bytes, all that leaves the node. Sum: n (g-1)/g.
//   all_gather      the two in reverse.
//   all_reduce      the one after the other: 2 (L-1) + 2 (N-1) steps.
//   broadcast       a chain across nodes between ranks of the root's l, by columns' counterparts, the rows: N parts, 2N-2 steps; then
//                   a chain in each node, 2L-2 steps by columns.
//   all_to_all      within the node rank l meets q = k - l mod L in step k (itself in some: a pause) and they exchange columns: place
//                   (m', q) then holds what (m, q) has for (m', l). Across nodes m meets p = k - m mod N and they exchange rows.
//                   L + N steps, n (L-1)/L + n (N-1)/N bytes, in N messages across nodes for the direct way's g.

#include "plan/collective_steps.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace shardlab {
namespace {

using Steps = std::vector<CollectiveStep>;
using Action = CollectiveStep::Action;

constexpr int kEveryOther = -2;

void append(Steps& steps, Steps more) {
  steps.insert(steps.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

/// `count` part numbers from `first`.
std::vector<int> parts_from(int first, int count) {
  std::vector<int> parts(static_cast<size_t>(count));
  std::iota(parts.begin(), parts.end(), first);
  return parts;
}

std::vector<int> parts_but(int size, int left_out) {
  std::vector<int> parts;
  for (int p = 0; p < size; ++p)
    if (p != left_out) parts.push_back(p);
  return parts;
}

struct Ring {
  int g, r;

  int wrap(int i) const { return ((i % g) + g) % g; }

  Steps reduce_scatter() const {
    Steps steps;
    for (int k = 0; k < g - 1; ++k)
      steps.push_back({wrap(r + 1), wrap(r - 1), {wrap(r - k - 1)}, {wrap(r - k - 2)}, Action::kReduce});
    return steps;
  }
  Steps all_gather() const {
    Steps steps;
    for (int k = 0; k < g - 1; ++k) steps.push_back({wrap(r + 1), wrap(r - 1), {wrap(r - k)}, {wrap(r - k - 1)}, Action::kCopy});
    return steps;
  }
  Steps broadcast(int root) const {
    const int distance = wrap(r - root);
    Steps steps(static_cast<size_t>(2 * g - 2));
    for (int part = 0; part < g; ++part) {
      if (distance > 0) {
        CollectiveStep& step = steps[static_cast<size_t>(part + distance - 1)];
        step.receive_from = wrap(r - 1);
        step.receive_parts = {part};
      }
      if (distance < g - 1) {
        CollectiveStep& step = steps[static_cast<size_t>(part + distance)];
        step.send_to = wrap(r + 1);
        step.send_parts = {part};
      }
    }
    return steps;
  }
  Steps all_to_all() const {
    Steps steps;
    for (int k = 1; k < g; ++k)
      steps.push_back({wrap(r + k), wrap(r - k), {wrap(r + k)}, {wrap(r - k)}, Action::kCopy, false, {r}});
    return steps;
  }
};

struct HalvingDoubling {
  int g, r;

  /// First of the `count` aligned parts that hold part `part`.
  static int block(int part, int count) { return part / count * count; }

  Steps reduce_scatter() const {
    Steps steps;
    for (int d = g / 2; d >= 1; d /= 2)
      steps.push_back({r ^ d, r ^ d, parts_from(block(r ^ d, d), d), parts_from(block(r, d), d), Action::kReduce});
    return steps;
  }
  Steps all_gather() const {
    Steps steps;
    for (int d = 1; d < g; d *= 2)
      steps.push_back({r ^ d, r ^ d, parts_from(block(r, d), d), parts_from(block(r ^ d, d), d), Action::kCopy});
    return steps;
  }
  Steps broadcast(int root) const {
    const int v = r ^ root;  // the root is 0 in this numbering, and owns part `root` = 0 ^ root
    const auto named = [&](int first, int count) {
      std::vector<int> parts = parts_from(first, count);
      for (int& p : parts) p ^= root;
      return parts;
    };
    Steps steps;
    for (int d = g / 2; d >= 1; d /= 2) {
      CollectiveStep& step = steps.emplace_back();
      if (v % (2 * d) == 0) {
        step.send_to = r ^ d;
        step.send_parts = named(v + d, d);
      } else if (v % (2 * d) == d) {
        step.receive_from = r ^ d;
        step.receive_parts = named(v, d);
      }
    }
    append(steps, all_gather());
    return steps;
  }
  Steps all_to_all() const {
    Steps steps;
    for (int d = 1; d < g; d *= 2) {
      std::vector<int> moved;
      for (int place = 0; place < g; ++place)
        if ((place & d) != (r & d)) moved.push_back(place);
      std::vector<int> theirs = moved;
      for (int& place : theirs) place ^= d;
      steps.push_back({r ^ d, r ^ d, moved, moved, Action::kCopy, false, theirs});
    }
    return steps;
  }
};

struct Direct {
  int g, r;

  Steps reduce_scatter() const { return {{kEveryOther, kEveryOther, parts_but(g, r), {r}, Action::kTreeReduce, true}}; }
  Steps all_gather() const { return {{kEveryOther, kEveryOther, {r}, parts_but(g, r), Action::kCopy}}; }
  Steps broadcast(int root) const {
    if (r == root) return {{kEveryOther, -1, parts_from(0, g), {}, Action::kCopy}};
    return {{-1, root, {}, parts_from(0, g), Action::kCopy}};
  }
  Steps all_to_all() const {
    const std::vector<int> others = parts_but(g, r);
    return {{kEveryOther, kEveryOther, others, others, Action::kCopy, true, std::vector<int>(others.size(), r)}};
  }
};

struct Tree {
  int g, r;

  int rounds() const { return std::bit_width(static_cast<unsigned>(g - 1)); }
  int wrap(int i) const { return (i % g + g) % g; }
  /// Parts of the subtree that rank `top` is the root of when all edges shorter than `d` are below it.
  std::vector<int> below(int top, int d) const { return parts_from(top, std::min(d, g - top)); }

  /// Every edge once, from the leaves up or from the root down; `visit(step, child, d)` fills this rank's step of the round.
  template <class Visit>
  Steps rounds_of(bool up, int root, const Visit& visit) const {
    Steps steps(static_cast<size_t>(rounds()));
    const int v = wrap(r - root);
    for (int k = 0; k < rounds(); ++k) {
      const int d = 1 << (up ? k : rounds() - 1 - k);
      CollectiveStep& step = steps[static_cast<size_t>(k)];
      const bool child = v % (2 * d) == d, parent = v % (2 * d) == 0 && v + d < g;
      if (!child && !parent) continue;
      const int peer = wrap((child ? v - d : v + d) + root);
      const std::vector<int> parts = visit(child ? v : v + d, d);
      (child == up ? step.send_to : step.receive_from) = peer;
      (child == up ? step.send_parts : step.receive_parts) = parts;
    }
    return steps;
  }
  Steps reduce() const {
    Steps steps = rounds_of(true, 0, [&](int, int) { return parts_from(0, g); });
    for (CollectiveStep& step : steps) step.action = Action::kReduce;
    return steps;
  }
  Steps broadcast(int root) const {
    return rounds_of(false, root, [&](int, int) { return parts_from(0, g); });
  }
  Steps reduce_scatter() const {
    Steps steps = reduce();
    append(steps, rounds_of(false, 0, [&](int child, int d) { return below(child, d); }));
    return steps;
  }
  Steps all_gather() const {
    Steps steps = rounds_of(true, 0, [&](int child, int d) { return below(child, d); });
    append(steps, broadcast(0));
    return steps;
  }
  Steps all_reduce() const {
    Steps steps = reduce();
    append(steps, broadcast(0));
    return steps;
  }
  Steps all_to_all() const { return Ring{g, r}.all_to_all(); }
};

struct Hierarchical {
  int g, r, per_node;

  int nodes() const { return g / per_node; }
  int node() const { return r / per_node; }
  int place() const { return r % per_node; }
  int rank(int node, int place) const { return node * per_node + place; }
  std::vector<int> column(int place) const {
    std::vector<int> parts;
    for (int m = 0; m < nodes(); ++m) parts.push_back(rank(m, place));
    return parts;
  }
  std::vector<int> row(int node) const { return parts_from(rank(node, 0), per_node); }

  /// A ring's steps within this rank's node, with columns for parts.
  Steps within(Steps steps) const {
    for (CollectiveStep& step : steps) {
      if (step.send_to >= 0) step.send_to = rank(node(), step.send_to);
      if (step.receive_from >= 0) step.receive_from = rank(node(), step.receive_from);
      for (std::vector<int>* parts : {&step.send_parts, &step.receive_parts})
        if (!parts->empty()) *parts = column(parts->front());
    }
    return steps;
  }
  /// A ring's steps between ranks of one place; `parts_of` gives the parts of a node that travel.
  template <class Parts>
  Steps across(Steps steps, const Parts& parts_of) const {
    for (CollectiveStep& step : steps) {
      if (step.send_to >= 0) step.send_to = rank(step.send_to, place());
      if (step.receive_from >= 0) step.receive_from = rank(step.receive_from, place());
      for (std::vector<int>* parts : {&step.send_parts, &step.receive_parts})
        if (!parts->empty()) *parts = parts_of(parts->front());
    }
    return steps;
  }
  Ring ring_within() const { return {per_node, place()}; }
  Ring ring_across() const { return {nodes(), node()}; }
  std::vector<int> own_column_at(int node) const { return {rank(node, place())}; }

  Steps reduce_scatter() const {
    Steps steps = within(ring_within().reduce_scatter());
    append(steps, across(ring_across().reduce_scatter(), [&](int m) { return own_column_at(m); }));
    return steps;
  }
  Steps all_gather() const {
    Steps steps = across(ring_across().all_gather(), [&](int m) { return own_column_at(m); });
    append(steps, within(ring_within().all_gather()));
    return steps;
  }
  Steps broadcast(int root) const {
    Steps steps = across(ring_across().broadcast(root / per_node), [&](int m) { return row(m); });
    if (place() != root % per_node)
      for (CollectiveStep& step : steps) step = {};
    append(steps, within(ring_within().broadcast(root % per_node)));
    return steps;
  }
  Steps all_to_all() const {
    Steps steps;
    const auto wrap = [](int i, int n) { return (i % n + n) % n; };
    for (int k = 0; k < per_node; ++k) {
      const int q = wrap(k - place(), per_node);
      if (q == place())
        steps.emplace_back();
      else
        steps.push_back({rank(node(), q), rank(node(), q), column(q), column(q), Action::kCopy, false, column(place())});
    }
    for (int k = 0; k < nodes(); ++k) {
      const int p = wrap(k - node(), nodes());
      if (p == node())
        steps.emplace_back();
      else
        steps.push_back({rank(p, place()), rank(p, place()), row(p), row(p), Action::kCopy, false, row(node())});
    }
    return steps;
  }
};

template <class Generator>
Steps generate(const Generator& rank, CollectiveKind kind, int root) {
  switch (kind) {
    case CollectiveKind::kReduceScatter: return rank.reduce_scatter();
    case CollectiveKind::kAllGather: return rank.all_gather();
    case CollectiveKind::kBroadcast: return rank.broadcast(root);
    case CollectiveKind::kAllToAll: return rank.all_to_all();
    case CollectiveKind::kAllReduce: break;
  }
  if constexpr (requires { rank.all_reduce(); }) {
    return rank.all_reduce();
  } else {
    Steps steps = rank.reduce_scatter();
    append(steps, rank.all_gather());
    return steps;
  }
}

/// A group must be whole nodes.
void check_nodes(Algorithm algorithm, int size, int per_node) {
  SHARDLAB_CHECK(algorithm != Algorithm::kHierarchical || (per_node >= 1 && size % per_node == 0),
                 "a group of {} ranks, {} on each node", size, per_node);
}

}  // namespace

std::vector<CollectiveStep> collective_steps(CollectiveKind kind, Algorithm algorithm, int size, int index, int root,
                                             int per_node) {
  SHARDLAB_CHECK(index >= 0 && index < size && root >= 0 && root < size, "rank {} and root {} of a group of {}", index, root, size);
  if (size == 1) return {};
  check_nodes(algorithm, size, per_node);
  switch (algorithm) {
    case Algorithm::kRing: return generate(Ring{size, index}, kind, root);
    case Algorithm::kDirect: return generate(Direct{size, index}, kind, root);
    case Algorithm::kTree: return generate(Tree{size, index}, kind, root);
    case Algorithm::kHierarchical: return generate(Hierarchical{size, index, per_node}, kind, root);
    case Algorithm::kHalvingDoubling: break;
  }
  SHARDLAB_CHECK(std::has_single_bit(static_cast<unsigned>(size)), "halving-doubling in a group of {}, no power of two", size);
  return generate(HalvingDoubling{size, index}, kind, root);
}

namespace {

/// Elements of parts [first, first + count) of a buffer that is cut in `size`.
int64_t elements_of_parts(int64_t elements, int size, int first, int count) {
  return part_begin(elements, size, first + count) - part_begin(elements, size, first);
}

/// Elements that a rank sends in a ring: every part but one passes through the rank.
int64_t sent_by_ring(CollectiveKind kind, int64_t elements, const Ring& ring, int root) {
  const auto but = [&](int part) { return elements - elements_of_parts(elements, ring.g, part, 1); };
  switch (kind) {
    case CollectiveKind::kReduceScatter: return but(ring.r);
    case CollectiveKind::kAllGather: return but(ring.wrap(ring.r + 1));
    case CollectiveKind::kAllReduce: return but(ring.r) + but(ring.wrap(ring.r + 1));
    case CollectiveKind::kAllToAll: return but(ring.r);
    case CollectiveKind::kBroadcast: return ring.wrap(ring.r - root) < ring.g - 1 ? elements : 0;
  }
  return 0;
}

int64_t sent_directly(CollectiveKind kind, int64_t elements, int size, int index, int root) {
  const int64_t own = elements_of_parts(elements, size, index, 1);
  switch (kind) {
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll: return elements - own;
    case CollectiveKind::kAllGather: return own * (size - 1);
    case CollectiveKind::kAllReduce: return elements - own + own * (size - 1);
    case CollectiveKind::kBroadcast: return index == root ? elements * (size - 1) : 0;
  }
  return 0;
}

/// Elements of the parts of places [first, first + count) of a node, on all nodes.
int64_t elements_of_columns(int64_t elements, const Hierarchical& h, int first, int count) {
  int64_t sum = 0;
  for (int m = 0; m < h.nodes(); ++m) sum += elements_of_parts(elements, h.g, h.rank(m, first), count);
  return sum;
}

int64_t sent_in_levels(CollectiveKind kind, int64_t elements, const Hierarchical& h, int root) {
  const int l = h.place(), m = h.node();
  const int64_t column = elements_of_columns(elements, h, l, 1);
  const int64_t scattered = elements - elements_of_parts(elements, h.g, h.r, 1);
  const int64_t next_part = elements_of_parts(elements, h.g, h.rank((m + 1) % h.nodes(), l), 1);
  const int64_t gathered = column - next_part + elements - elements_of_columns(elements, h, (l + 1) % h.per_node, 1);
  switch (kind) {
    case CollectiveKind::kReduceScatter: return scattered;
    case CollectiveKind::kAllGather: return gathered;
    case CollectiveKind::kAllReduce: return scattered + gathered;
    case CollectiveKind::kAllToAll:
      return elements - column + elements - elements_of_parts(elements, h.g, h.rank(m, 0), h.per_node);
    case CollectiveKind::kBroadcast: break;
  }
  const bool onward = l == root % h.per_node && h.ring_across().wrap(m - root / h.per_node) < h.nodes() - 1;
  return (onward ? elements : 0) + (h.ring_within().wrap(l - root % h.per_node) < h.per_node - 1 ? elements : 0);
}

}  // namespace

// Halving-doubling and trees send few messages, so their steps are summed; those of the others grow with the square of the group and are not
// written down. `tests/plan/test_collectives.cpp` compares each with the sum over the steps.
int64_t sent_elements(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int index, int root, int per_node) {
  SHARDLAB_CHECK(index >= 0 && index < size && root >= 0 && root < size, "rank {} and root {} of a group of {}", index, root, size);
  if (size == 1) return 0;
  check_nodes(algorithm, size, per_node);
  if (algorithm == Algorithm::kHierarchical) return sent_in_levels(kind, elements, {size, index, per_node}, root);
  if (algorithm == Algorithm::kRing) return sent_by_ring(kind, elements, Ring{size, index}, root);
  if (algorithm == Algorithm::kDirect) return sent_directly(kind, elements, size, index, root);
  int64_t sent = 0;
  for (const CollectiveStep& step : collective_steps(kind, algorithm, size, index, root))
    for (const int p : step.send_parts) sent += elements_of_parts(elements, size, p, 1);
  return sent;
}

namespace {

/// Whether some pair of ranks `distance` apart, which is one of an aligned block of twice the distance, lies on two nodes: node m begins
/// within the block, behind its first rank and no later than its second.
bool pair_crosses(int distance, int size, int per_node) {
  for (int begin = per_node, blocks = 0; begin < size && blocks <= 2 * distance; begin += per_node, ++blocks) {
    const int within = begin % (2 * distance);
    if (within > 0 && within <= distance) return true;
  }
  return false;
}

/// Whether a step in which rank 0 meets `peer` goes between nodes.
bool goes_across(CollectiveKind kind, Algorithm algorithm, int peer, int size, int per_node) {
  if (algorithm == Algorithm::kHierarchical) return peer / per_node != 0;
  if (algorithm == Algorithm::kTree && kind == CollectiveKind::kAllToAll)
    return per_node < size;  // the ring's: pairs are not aligned
  return pair_crosses(peer, size, per_node);
}

}  // namespace

StepsInTurn steps_in_turn(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int per_node) {
  StepsInTurn turn;
  for (const CollectiveStep& step : collective_steps(kind, algorithm, size, 0, 0, per_node)) {
    int64_t sent = 0, received = 0;
    for (const int p : step.send_parts) sent += elements_of_parts(elements, size, p, 1);
    for (const int p : step.receive_parts) received += elements_of_parts(elements, size, p, 1);
    const int peer = std::max(step.send_to, step.receive_from);
    turn.steps += 1;
    turn.elements += std::max(sent, received);
    if (peer < 0 || !goes_across(kind, algorithm, peer, size, per_node)) continue;
    turn.steps_across += 1;
    turn.elements_across += std::max(sent, received);
  }
  return turn;
}

int64_t strips_of(const Mesh& mesh, const Comm& comm, CollectiveKind kind, const Type& source, const Type& target) {
  if (kind != CollectiveKind::kAllGather && kind != CollectiveKind::kReduceScatter) return 1;
  const Type& part = kind == CollectiveKind::kAllGather ? source : target;
  int64_t strips = 1;
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    if (!comm.axes.contains(static_cast<int>(a)) || mesh.axes[a].size == 1 || !part.place[a].is_shard()) continue;
    strips = 1;
    for (int d = 0; d < part.place[a].dim; ++d) strips *= part.shape[d];
  }
  return strips;
}

}  // namespace shardlab
