// The rules by which streams hand cores on.

#include <fmt/format.h>

#include "plan/cores.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Cores cores_of(int count, const std::vector<bool>& first, double turn_s) {
  Cores cores(count, turn_s);
  for (const bool f : first) cores.add(f);
  return cores;
}

std::vector<int> holders(const Cores& cores) {
  std::vector<int> all;
  for (int c = 0; c < cores.count(); ++c) all.push_back(cores.holder(c));
  return all;
}

/// "3+0.5 1w": stream 3 was given a core that nobody had for half a second, stream 1 its own again.
std::string grants(Cores& cores) {
  std::string text;
  for (const Cores::Grant& g : cores.take_grants())
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " ", g.stream, g.idle_s > 0 ? fmt::format("+{}", g.idle_s) : "",
                        g.watched ? "w" : "");
  return text;
}

}  // namespace

TEST_CASE("streams have cores while there are any, then wait for one in turn") {
  Cores cores = cores_of(2, std::vector<bool>(4, false), 0);
  for (int s = 0; s < 4; ++s) cores.want(s, 0);
  CHECK(grants(cores) == "0w 1w");  // as the step begins nobody sleeps
  CHECK(cores.busy() == 2);
  CHECK(holders(cores) == std::vector<int>{0, 1});
  cores.give_up(1, 1);
  CHECK(grants(cores) == "2");
  cores.give_up(0, 2);
  CHECK(grants(cores) == "3");
  CHECK_FALSE(cores.has(0));
  CHECK(cores.has(3));
  cores.give_up(0, 2);  // which has none
  CHECK(grants(cores).empty());
  CHECK_FALSE(cores.any_waits());
  cores.want(0, 3);
  CHECK(cores.any_waits());
  CHECK_FALSE(cores.first_waits());
  cores.forget(0);
  CHECK_FALSE(cores.any_waits());
  cores.give_up(3, 4);
  CHECK(cores.busy() == 1);
}

TEST_CASE("a stream gets the idle core that it had, and has watched it if nobody had it since") {
  Cores cores = cores_of(2, std::vector<bool>(3, false), 0);
  cores.want(0, 0);
  cores.want(1, 0);
  cores.give_up(0, 1);
  cores.give_up(1, 2);
  grants(cores);
  cores.want(0, 4);
  CHECK(grants(cores) == "0+3w");
  CHECK(holders(cores) == std::vector<int>{0, -1});
  cores.want(2, 5);
  CHECK(grants(cores) == "2+3");
  CHECK(holders(cores) == std::vector<int>{0, 2});
  cores.give_up(0, 6);
  cores.want(1, 8);  // its own is taken
  const std::vector<Cores::Grant> last = cores.take_grants();
  REQUIRE(last.size() == 1);
  CHECK(last[0].stream == 1);
  CHECK(last[0].core == 0);
  CHECK(last[0].moved);
  CHECK(last[0].idle_s == 2);
  CHECK_FALSE(last[0].watched);
}

TEST_CASE("of control streams that wait the one that had the core goes on, else the oldest; others go before them") {
  Cores cores = cores_of(2, {false, false, false, false, true}, 0);
  cores.want(0, 0);
  cores.want(1, 0);
  cores.want(2, 0);
  cores.want(3, 0);
  cores.give_up(0, 1);  // to 2
  cores.want(0, 1);
  grants(cores);
  cores.give_up(2, 2);  // 3 has waited longer, but 0 had this core
  CHECK(grants(cores) == "0");
  cores.want(4, 2);
  cores.give_up(0, 3);
  CHECK(grants(cores) == "4");
  cores.give_up(1, 3);
  CHECK(grants(cores) == "3");
}

TEST_CASE("a control stream yields between ops to a stream of the first kind at once, to another after its turn") {
  Cores cores = cores_of(1, {false, false, true}, 10);
  cores.want(0, 0);
  CHECK_FALSE(cores.pause(0, 5));  // nobody wants it
  cores.want(1, 5);
  CHECK_FALSE(cores.pause(0, 6));
  cores.want(2, 6);
  CHECK(cores.pause(0, 6));
  grants(cores);
  CHECK(holders(cores) == std::vector<int>{2});
  CHECK_FALSE(cores.pause(2, 7));  // one of the first kind never does
  cores.give_up(2, 8);
  CHECK(grants(cores) == "0");  // is the next of its kind, and goes on with its turn
  CHECK_FALSE(cores.pause(0, 9));
  CHECK(cores.pause(0, 10));
  CHECK(grants(cores) == "1");
  CHECK_FALSE(cores.pause(0, 99));  // which has no core
  cores.want(2, 99);
  CHECK(cores.pause(1, 99));  // both wait for it, and its turn is over: behind 0
  cores.give_up(2, 99);
  CHECK(grants(cores) == "2 0");
}

}  // namespace shardlab::testing
