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

TEST_CASE("groups along an axis: a coordinate meets its mirror image, or whom the communicator says") {
  const Mesh mesh{{{"pp", 5}, {"tp", 2}}};
  const Comm ends{"tied", AxisSet::of(0), mirror_pairs(5)};
  REQUIRE(ends.groups == Groups{{0, 4}, {1, 3}, {2}});
  REQUIRE(group_of(mesh, ends, 1) == std::vector<int>{1, 9});
  REQUIRE(group_of(mesh, ends, 9) == std::vector<int>{1, 9});
  REQUIRE(group_of(mesh, ends, 3) == std::vector<int>{3, 7});
  REQUIRE(group_of(mesh, ends, 5) == std::vector<int>{5});
  REQUIRE(group_size(mesh, ends) == 2);
  REQUIRE(seat_of(mesh, ends, mesh.coordinates(7)) == Seat{2, 1});
  REQUIRE(seat_of(mesh, ends, mesh.coordinates(5)) == Seat{1, 0});
  const Comm said{"said", AxisSet::of(0), {{3, 0}, {1, 4}, {2}}};
  REQUIRE(group_of(mesh, said, 0) == std::vector<int>{6, 0});
  const Mesh flat{{{"pp", 1}, {"tp", 2}}};
  const Comm alone{"tied", AxisSet::of(0), mirror_pairs(1)};
  REQUIRE(group_of(flat, alone, 1) == std::vector<int>{1});
  REQUIRE(group_size(flat, alone) == 1);
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
