#include "plan/type.h"

namespace shardlab {

AxisSet axes_placed(const Type& type, const Mesh& mesh, Place kind) {
  AxisSet set;
  for (size_t a = 0; a < mesh.axes.size(); ++a)
    if (type.place[a].kind == kind) set = set | AxisSet::of(static_cast<int>(a));
  return set;
}

namespace {

/// The axes that cut dim `dim`.
AxisSet axes_of_dim(const Type& type, const Mesh& mesh, int dim) {
  AxisSet set;
  for (size_t a = 0; a < mesh.axes.size(); ++a)
    if (type.place[a].is_shard() && type.place[a].dim == dim) set = set | AxisSet::of(static_cast<int>(a));
  return set;
}

}  // namespace

Shape logical_shape(const Type& type, const Mesh& mesh) {
  Shape shape = type.shape;
  for (int d = 0; d < shape.rank; ++d) shape[d] *= mesh.size(axes_of_dim(type, mesh, d));
  return shape;
}

Shape logical_origin(const Type& type, const Mesh& mesh, const Coordinates& c) {
  Shape origin = type.shape;
  for (int d = 0; d < origin.rank; ++d) origin[d] *= mesh.index_in_group(axes_of_dim(type, mesh, d), c);
  return origin;
}

}  // namespace shardlab
