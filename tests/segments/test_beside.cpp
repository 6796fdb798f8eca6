// Profiles of pieces beside other ops, held to DeviceSharing.
#include <array>
#include <vector>

#include "simulator/interpreter/segments/beside.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace segments;

Shares shares(double units, double memory, double link = 0, double held = 0) {
  Shares s;
  s.of[static_cast<size_t>(Resource::kUnits)] = units;
  s.of[static_cast<size_t>(Resource::kMemory)] = memory;
  s.of[static_cast<size_t>(Resource::kLinkOut)] = link;
  s.held_units = held;
  return s;
}

/// The speeds of `tasks` side by side on one device, as the timeline op by op has them.
std::vector<double> shared(const std::vector<Shares>& tasks) {
  DeviceSharing device(1, static_cast<int>(tasks.size()));
  std::vector<Demand> demands;
  for (const Shares& t : tasks) demands.push_back({t.of, t.held_units});
  for (size_t i = 0; i < tasks.size(); ++i) {
    const DeviceSharing::Part part{0, &demands[i]};
    device.start(static_cast<int>(i), 1, {&part, 1}, 0);
  }
  std::vector<double> speeds;
  for (size_t i = 0; i < tasks.size(); ++i) speeds.push_back(1 / device.end_of(static_cast<int>(i)));
  return speeds;
}

}  // namespace

TEST_CASE("one device shares as DeviceSharing does") {
  const std::vector<std::vector<Shares>> groups{
      {shares(1, 0.9), shares(0, 0.2, 1)},
      {shares(0.2, 1), shares(0, 0.5, 1)},
      {shares(1, 0.4), shares(0, 0.1, 1, 0.15), shares(0, 0.3, 0.8)},
      {shares(0.1, 0.9), shares(0, 0.4, 1), shares(0, 0.4, 1), shares(1, 1)},
      {shares(1, 0), shares(0, 0.6, 1, 0.7), shares(0, 0.6, 1, 0.7)},
  };
  for (const auto& group : groups) {
    std::vector<const Shares*> tasks;
    for (const Shares& s : group) tasks.push_back(&s);
    std::vector<double> speeds(group.size());
    share_device(tasks, speeds);
    const std::vector<double> expected = shared(group);
    bool any_slowed = false;
    for (size_t i = 0; i < group.size(); ++i) {
      INFO("task " << i << " of " << group.size());
      CHECK(speeds[i] == Approx(expected[i]).epsilon(1e-12));
      any_slowed = any_slowed || speeds[i] < 1;
    }
    CHECK(any_slowed);
  }
}

TEST_CASE("sets are what runs, whatever the order in which it came") {
  Beside beside;
  Beside::Set& nobody = beside.nobody();
  const int32_t a = beside.kind_of(shares(0, 0.5, 1)), b = beside.kind_of(shares(0, 0.7)),
                again = beside.kind_of(shares(0, 0.5, 1));
  CHECK(a == again);
  CHECK(a != b);
  Beside::Set &just_a = beside.with(nobody, a), &just_b = beside.with(nobody, b);
  Beside::Set& both = beside.with(just_a, b);
  CHECK(&both == &beside.with(just_b, a));
  CHECK(&both != &just_a);
  CHECK(&beside.without(both, a) == &just_b);
  CHECK(&beside.without(just_a, a) == &nobody);
  Beside::Set& twice = beside.with(just_a, a);
  CHECK(&twice != &just_a);
  CHECK(&beside.without(twice, a) == &just_a);
  // Two that ask for the whole link each go at half speed.
  CHECK(just_a.alone[0] == 1);
  CHECK(twice.alone[0] == Approx(0.5));
}

TEST_CASE("a profile adds up speeds op by op") {
  Beside beside;
  const int32_t compute = beside.kind_of(shares(1, 0.2)), memory = beside.kind_of(shares(0.1, 1)),
                message = beside.kind_of(shares(0, 0.25, 1));
  const std::vector<Cost> piece{{2, compute}, {1, memory}, {0, 0}, {4, compute}};
  const Profile& alone = beside.profile(0, piece, beside.nobody());
  CHECK(std::vector<double>(alone.row(0).begin(), alone.row(0).end()) == std::vector<double>{0, 2, 3, 3, 7});
  const Profile& with = beside.profile(0, piece, beside.with(beside.nobody(), message));
  // Beside the op that needs all of the memory both take a quarter longer: 1.25 is asked for.
  CHECK(std::vector<double>(with.row(0).begin(), with.row(0).end()) == std::vector<double>{0, 2, 3.25, 3.25, 7.25});
  CHECK(std::vector<double>(with.row(1).begin(), with.row(1).end()) == std::vector<double>{0, 2, 3, 3, 7});
  CHECK(with.total(0) == 7.25);
}

}  // namespace shardlab::testing
