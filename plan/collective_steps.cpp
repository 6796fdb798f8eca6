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

#include "plan/collective_steps.h"

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
    for (int k = 1; k < g; ++k) steps.push_back({wrap(r + k), wrap(r - k), {wrap(r + k)}, {wrap(r - k)}, Action::kCopy});
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
      steps.push_back({r ^ d, r ^ d, moved, moved, Action::kCopy});
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
  Steps all_to_all() const { return {{kEveryOther, kEveryOther, parts_but(g, r), parts_but(g, r), Action::kCopy, true}}; }
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
  Steps steps = rank.reduce_scatter();
  append(steps, rank.all_gather());
  return steps;
}

}  // namespace

std::vector<CollectiveStep> collective_steps(CollectiveKind kind, Algorithm algorithm, int size, int index, int root) {
  SHARDLAB_CHECK(index >= 0 && index < size && root >= 0 && root < size, "rank {} and root {} of a group of {}", index, root, size);
  if (size == 1) return {};
  switch (algorithm) {
    case Algorithm::kRing: return generate(Ring{size, index}, kind, root);
    case Algorithm::kDirect: return generate(Direct{size, index}, kind, root);
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

}  // namespace

// Halving-doubling sends few messages, so its steps are summed; those of the others grow with the square of the group and are not
// written down. `tests/plan/test_collectives.cpp` compares each with the sum over the steps.
int64_t sent_elements(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int index, int root) {
  SHARDLAB_CHECK(index >= 0 && index < size && root >= 0 && root < size, "rank {} and root {} of a group of {}", index, root, size);
  if (size == 1) return 0;
  if (algorithm == Algorithm::kRing) return sent_by_ring(kind, elements, Ring{size, index}, root);
  if (algorithm == Algorithm::kDirect) return sent_directly(kind, elements, size, index, root);
  int64_t sent = 0;
  for (const CollectiveStep& step : collective_steps(kind, algorithm, size, index, root))
    for (const int p : step.send_parts) sent += elements_of_parts(elements, size, p, 1);
  return sent;
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
