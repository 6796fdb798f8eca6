// The type of a buffer: element type, extents on one rank, and for every mesh axis how the ranks' copies relate.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "plan/base/dtype.h"
#include "plan/base/rational.h"
#include "plan/mesh.h"

namespace shardlab {

/// Extents of a tensor, at most four.
struct Shape {
  std::array<int64_t, 4> extent{};
  int rank = 0;

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<int64_t> e) {
    SHARDLAB_CHECK(e.size() <= 4, "a shape has at most 4 dims, not {}", e.size());
    for (const int64_t v : e) extent[static_cast<size_t>(rank++)] = v;
  }
  constexpr int64_t operator[](int dim) const { return extent[static_cast<size_t>(dim)]; }
  constexpr int64_t& operator[](int dim) { return extent[static_cast<size_t>(dim)]; }
  constexpr int64_t last() const { return extent[static_cast<size_t>(rank - 1)]; }
  constexpr int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= extent[static_cast<size_t>(i)];
    return n;
  }
  friend constexpr bool operator==(const Shape&, const Shape&) = default;
};

/// How the copies of a buffer on the ranks along one mesh axis relate to the logical tensor.
enum class Place : uint8_t {
  kReplicate,  ///< every rank holds the same values
  kShard,      ///< rank i holds the i-th equal slice of dim `dim`; where axes share a dim, the mesh's later ones cut within slices
  kPartial,    ///< the logical value is the sum over the ranks
  kLocal,      ///< unrelated: the tensor belongs to this coordinate alone (a stage's own layers along pp)
};

struct Placement {
  Place kind = Place::kReplicate;
  int8_t dim = 0;  ///< for kShard

  static constexpr Placement replicate() { return {Place::kReplicate, 0}; }
  static constexpr Placement shard(int dim) { return {Place::kShard, static_cast<int8_t>(dim)}; }
  static constexpr Placement partial() { return {Place::kPartial, 0}; }
  static constexpr Placement local() { return {Place::kLocal, 0}; }
  constexpr bool is_shard() const { return kind == Place::kShard; }
  constexpr bool is_partial() const { return kind == Place::kPartial; }
  friend constexpr bool operator==(Placement, Placement) = default;
};

/// logical value = factor / denominator * (sum of what the ranks hold along partial axes).
/// `denominator` names a count that is known only at run time ("target_tokens"); empty for none.
struct Scale {
  Rational factor;
  std::string denominator;
  friend bool operator==(const Scale&, const Scale&) = default;
};

/// The micro-batches of the step that a buffer's value covers.
enum class Micro : uint8_t {
  kNone,   ///< no function of one micro-batch: parameters, moments, constants
  kSlice,  ///< belongs to one micro-batch: activations and their gradients
  kSum,    ///< a sum over micro-batches; `verify` tracks which, and demands each exactly once before an update
};

/// The full type. Two buffers of equal type are interchangeable in a plan.
struct Type {
  DType dtype = DType::f32;
  Shape shape;                              ///< extents on ONE rank; a sharded dim's logical extent is this times the axis size
  std::array<Placement, kMaxAxes> place{};  ///< by mesh axis; axes the mesh lacks stay kReplicate
  Scale scale;
  Micro micro = Micro::kNone;

  int64_t bytes() const { return bytes_of(dtype, shape.elements()); }
  friend bool operator==(const Type&, const Type&) = default;
};

/// Vectors along the last dim.
inline int64_t rows_of(const Type& type) { return type.shape.elements() / std::max<int64_t>(1, type.shape.last()); }

/// Axes along which `type` has this kind of placement (and dim, for shards).
AxisSet axes_placed(const Type& type, const Mesh& mesh, Place kind);

/// Extents of the whole logical tensor: local extents times the sizes of the axes that shard each dim.
Shape logical_shape(const Type& type, const Mesh& mesh);

/// For a rank at `c`: the logical index of the first element along each dim.
Shape logical_origin(const Type& type, const Mesh& mesh, const Coordinates& c);

}  // namespace shardlab
