#include "plan/mesh.h"
#include "plan/type.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Mesh mesh_2_3_2() { return {{{"pp", 2}, {"dp", 3}, {"tp", 2}}}; }

TEST_CASE("groups join the ranks that share all other coordinates, in group order") {
  const Mesh mesh = mesh_2_3_2();
  const auto axis = [&](const char* name) { return AxisSet::of(mesh.axis(name)); };
  REQUIRE(group_of(mesh, {"tp", axis("tp")}, 3) == std::vector<int>{2, 3});
  REQUIRE(group_of(mesh, {"dp", axis("dp")}, 9) == std::vector<int>{7, 9, 11});
  REQUIRE(group_of(mesh, {"pp", axis("pp")}, 9) == std::vector<int>{3, 9});
  REQUIRE(group_of(mesh, {"both", axis("dp") | axis("tp")}, 9) == std::vector<int>{6, 7, 8, 9, 10, 11});
  REQUIRE(group_of(mesh, {"none", AxisSet{}}, 9) == std::vector<int>{9});
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const Comm comm{"both", axis("pp") | axis("tp")};
    const std::vector<int> group = group_of(mesh, comm, rank);
    REQUIRE(group[static_cast<size_t>(mesh.index_in_group(comm.axes, mesh.coordinates(rank)))] == rank);
    REQUIRE(static_cast<int>(group.size()) == group_size(mesh, comm));
  }
}

TEST_CASE("an `ends` communicator joins first and last; those between meet themselves") {
  const Mesh mesh{{{"pp", 4}, {"tp", 2}}};
  const Comm ends{"tied", AxisSet::of(0), Span::kEnds};
  REQUIRE(group_of(mesh, ends, 1) == std::vector<int>{1, 7});
  REQUIRE(group_of(mesh, ends, 7) == std::vector<int>{1, 7});
  REQUIRE(group_of(mesh, ends, 3) == std::vector<int>{3});
  REQUIRE(group_size(mesh, ends) == 2);
  const Mesh flat{{{"pp", 1}, {"tp", 2}}};
  REQUIRE(group_of(flat, ends, 1) == std::vector<int>{1});
  REQUIRE(group_size(flat, ends) == 1);
}

TEST_CASE("the logical shape and origin of a shard, along one axis or several of one dim") {
  const Mesh mesh = mesh_2_3_2();
  Type t{.shape = {4, 5, 6}};
  t.place[0] = Placement::local();
  t.place[1] = Placement::shard(0);
  t.place[2] = Placement::shard(2);
  REQUIRE(logical_shape(t, mesh) == Shape{12, 5, 12});
  REQUIRE(logical_origin(t, mesh, {1, 2, 1}) == Shape{8, 0, 6});
  t.place[2] = Placement::shard(0);
  REQUIRE(logical_shape(t, mesh) == Shape{24, 5, 6});
  REQUIRE(logical_origin(t, mesh, {1, 2, 1}) == Shape{20, 0, 0});
  REQUIRE(axes_placed(t, mesh, Place::kShard) == (AxisSet::of(1) | AxisSet::of(2)));
  REQUIRE(axes_placed(t, mesh, Place::kLocal) == AxisSet::of(0));
  REQUIRE(axes_placed(t, mesh, Place::kPartial).empty());
}

}  // namespace
}  // namespace shardlab::testing
