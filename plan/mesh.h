// The mesh of ranks: named axes, groups of ranks along them, and the communicators a plan names.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/check.h"
#include "plan/base/units.h"

namespace shardlab {

/// Axes are few; a set of them is a bit mask.
inline constexpr int kMaxAxes = 8;

/// A set of mesh axes, by index into `Mesh::axes`.
struct AxisSet {
  uint8_t mask = 0;

  static constexpr AxisSet of(int axis) { return AxisSet{static_cast<uint8_t>(1u << axis)}; }
  constexpr bool contains(int axis) const { return (mask >> axis) & 1; }
  constexpr bool empty() const { return mask == 0; }
  constexpr int size() const { return std::popcount(mask); }
  friend constexpr bool operator==(AxisSet, AxisSet) = default;
  friend constexpr AxisSet operator|(AxisSet a, AxisSet b) { return AxisSet{static_cast<uint8_t>(a.mask | b.mask)}; }
};

/// The axis along which ranks have different roles; all others have ranks do the same.
inline constexpr std::string_view kPipelineAxis = "pp";

struct MeshAxis {
  std::string name;  ///< "pp", "dp", "cp", "tp"; a plan may name others ("ep", "replica")
  int size = 1;
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

/// Coordinates of one rank, by axis index.
using Coordinates = std::array<int, kMaxAxes>;

/// Ranks arranged along named axes, slowest axis first: rank = ((c0 * n1 + c1) * n2 + c2) ...
/// The canonical mesh of a case is [pp, dp, cp, tp]: tensor-parallel neighbours have adjacent ranks.
struct Mesh {
  std::vector<MeshAxis> axes;

  int world_size() const {
    int n = 1;
    for (const MeshAxis& a : axes) n *= a.size;
    return n;
  }
  /// Index of the axis called `name`; nothing when the mesh has none.
  std::optional<int> find(std::string_view name) const {
    for (size_t i = 0; i < axes.size(); ++i)
      if (axes[i].name == name) return static_cast<int>(i);
    return std::nullopt;
  }
  /// Index of the axis called `name`, which must exist.
  int axis(std::string_view name) const {
    const auto found = find(name);
    SHARDLAB_CHECK(found.has_value(), "the mesh has no axis `{}`", name);
    return *found;
  }
  /// Size of the axis called `name`, 1 when there is none.
  int size(std::string_view name) const {
    const auto found = find(name);
    return found ? axes[static_cast<size_t>(*found)].size : 1;
  }
  int size(AxisSet set) const {
    int n = 1;
    for (size_t i = 0; i < axes.size(); ++i)
      if (set.contains(static_cast<int>(i))) n *= axes[i].size;
    return n;
  }
  Coordinates coordinates(int rank) const {
    Coordinates c{};
    for (size_t i = axes.size(); i-- > 0;) {
      c[i] = rank % axes[i].size;
      rank /= axes[i].size;
    }
    return c;
  }
  int rank(const Coordinates& c) const {
    int r = 0;
    for (size_t i = 0; i < axes.size(); ++i) r = r * axes[i].size + c[i];
    return r;
  }
  /// The role of a rank: its coordinate along the pipeline axis, 0 if the mesh has no such axis.
  int role_of(const Coordinates& c) const {
    const auto pipeline = find(kPipelineAxis);
    return pipeline ? c[static_cast<size_t>(*pipeline)] : 0;
  }
  int role_of(int rank) const { return role_of(coordinates(rank)); }
  /// Index of a rank among the ranks that differ from it along `set` only, slowest axis first.
  int index_in_group(AxisSet set, const Coordinates& c) const {
    int r = 0;
    for (size_t i = 0; i < axes.size(); ++i)
      if (set.contains(static_cast<int>(i))) r = r * axes[i].size + c[i];
    return r;
  }
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

/// Groups of coordinates along one axis: each coordinate once. Groups have one size, but that a coordinate may stand alone.
using Groups = std::vector<std::vector<int>>;

/// Each of `size` coordinates with its mirror image: the first with the last (a tied embedding's stages), the second with the last
/// but one (DualPipe's). "ends" in plan text.
Groups mirror_pairs(int size);

/// A communicator that the plan names. Operations on one communicator run in issue order on every back end, so
/// traffic that must not wait for other traffic (per direction, gathers apart from scatters) has its own. Only the sends and the
/// receives of a cyclic hop are two orders: every rank of a ring sends and receives at the same time.
struct Comm {
  std::string name;  ///< "tp", "dp.grads", "pp.fwd"
  AxisSet axes;
  Groups groups;  ///< of the coordinates along the only axis; empty: all ranks along `axes` are one group
  friend bool operator==(const Comm&, const Comm&) = default;
};

/// The group of `comm` that coordinate `at` along its only axis is in; nothing where the communicator has no groups.
const std::vector<int>* group_at(const Comm& comm, int at);

/// The place of a rank in its group on a communicator.
struct Seat {
  int size = 1;
  int index = 0;
  friend auto operator<=>(const Seat&, const Seat&) = default;
};
Seat seat_of(const Mesh& mesh, const Comm& comm, const Coordinates& c);

/// The ranks that `rank` meets on `comm`, in group order, itself included.
std::vector<int> group_of(const Mesh& mesh, const Comm& comm, int rank);

/// Ranks of a group of `comm` on one node, where nodes have `ranks_per_node` ranks one after the other. Groups that are uneven over
/// nodes give 1.
int group_per_node(const Mesh& mesh, const Comm& comm, int ranks_per_node);

/// Number of ranks in a group of `comm`. All groups have this size, except those in which a coordinate stands alone.
int group_size(const Mesh& mesh, const Comm& comm);

}  // namespace shardlab
