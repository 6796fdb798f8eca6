#include "plan/mesh.h"

#include <algorithm>

namespace shardlab {

Groups mirror_pairs(int size) {
  Groups groups;
  for (int i = 0; i < size - 1 - i; ++i) groups.push_back({i, size - 1 - i});
  if (size % 2 == 1) groups.push_back({size / 2});
  return groups;
}

const std::vector<int>* group_at(const Comm& comm, int at) {
  for (const std::vector<int>& group : comm.groups)
    if (std::ranges::find(group, at) != group.end()) return &group;
  return nullptr;
}

namespace {

size_t only_axis(const Comm& comm) {
  SHARDLAB_CHECK(comm.axes.size() == 1, "communicator `{}` has groups along {} axes", comm.name, comm.axes.size());
  return static_cast<size_t>(std::countr_zero(comm.axes.mask));
}

const std::vector<int>& group_at(const Comm& comm, const Coordinates& c) {
  const std::vector<int>* group = group_at(comm, c[only_axis(comm)]);
  SHARDLAB_CHECK(group != nullptr, "coordinate {} is in no group of `{}`", c[only_axis(comm)], comm.name);
  return *group;
}

}  // namespace

Seat seat_of(const Mesh& mesh, const Comm& comm, const Coordinates& c) {
  if (comm.groups.empty()) return {mesh.size(comm.axes), mesh.index_in_group(comm.axes, c)};
  const std::vector<int>& group = group_at(comm, c);
  return {static_cast<int>(group.size()), static_cast<int>(std::ranges::find(group, c[only_axis(comm)]) - group.begin())};
}

std::vector<int> group_of(const Mesh& mesh, const Comm& comm, int rank) {
  Coordinates member = mesh.coordinates(rank);
  std::vector<int> ranks;
  if (!comm.groups.empty()) {
    for (const int at : group_at(comm, member)) {
      member[only_axis(comm)] = at;
      ranks.push_back(mesh.rank(member));
    }
    return ranks;
  }
  for (int i = 0; i < mesh.size(comm.axes); ++i) {
    int rest = i;  // index along the axes of the group, the last varying fastest
    for (size_t a = mesh.axes.size(); a-- > 0;) {
      if (!comm.axes.contains(static_cast<int>(a))) continue;
      member[a] = rest % mesh.axes[a].size;
      rest /= mesh.axes[a].size;
    }
    ranks.push_back(mesh.rank(member));
  }
  return ranks;
}

int group_size(const Mesh& mesh, const Comm& comm) {
  size_t largest = 0;
  for (const std::vector<int>& group : comm.groups) largest = std::max(largest, group.size());
  return comm.groups.empty() ? mesh.size(comm.axes) : static_cast<int>(largest);
}

int group_per_node(const Mesh& mesh, const Comm& comm, int ranks_per_node) {
  int per_node = 0;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const Seat seat = seat_of(mesh, comm, mesh.coordinates(rank));
    if (seat.index != 0 || seat.size == 1) continue;
    const std::vector<int> group = group_of(mesh, comm, rank);
    for (size_t first = 0, last = 0; first < group.size(); first = last) {
      while (last < group.size() && group[last] / ranks_per_node == group[first] / ranks_per_node) ++last;
      const int here = static_cast<int>(last - first);
      if (per_node != 0 && here != per_node) return 1;
      per_node = here;
    }
  }
  return std::max(1, per_node);
}

}  // namespace shardlab
