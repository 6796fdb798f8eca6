#include "plan/mesh.h"

namespace shardlab {

std::vector<int> group_of(const Mesh& mesh, const Comm& comm, int rank) {
  const Coordinates c = mesh.coordinates(rank);
  const int size = mesh.size(comm.axes);
  if (comm.span == Span::kEnds) {
    const int index = mesh.index_in_group(comm.axes, c);
    if (index != 0 && index != size - 1) return {rank};
  }
  std::vector<int> group;
  for (int i = 0; i < size; ++i) {
    if (comm.span == Span::kEnds && i != 0 && i != size - 1) continue;
    Coordinates member = c;
    int rest = i;  // index along the axes of the group, the last varying fastest
    for (size_t a = mesh.axes.size(); a-- > 0;) {
      if (!comm.axes.contains(static_cast<int>(a))) continue;
      member[a] = rest % mesh.axes[a].size;
      rest /= mesh.axes[a].size;
    }
    group.push_back(mesh.rank(member));
  }
  return group;
}

int group_size(const Mesh& mesh, const Comm& comm) {
  const int size = mesh.size(comm.axes);
  return comm.span == Span::kEnds && size > 2 ? 2 : size;
}

}  // namespace shardlab
