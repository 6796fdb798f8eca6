// The control plane: what is gathered, who may join, who is told of a failure.
#include <fmt/format.h>

#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/wires/group.h"

namespace shardlab::testing {

TEST_CASE("every process gets what each has given, in order, however long it is") {
  const GroupEnd end = run_group(3, [](Control& control) {
    std::string all;
    for (int round = 0; round < 50; ++round) {
      const std::string own(static_cast<size_t>(round * (control.process() + 1) * 1000),
                            static_cast<char>('a' + control.process()));
      for (const std::string& text : control.gather(own)) all += fmt::format("{}{} ", text.size(), text.empty() ? '-' : text[0]);
    }
    return all;
  });
  std::string want;
  for (int round = 0; round < 50; ++round)
    for (int p = 0; p < 3; ++p) want += fmt::format("{}{} ", round * (p + 1) * 1000, round == 0 ? '-' : "abc"[p]);
  for (const std::string& text : end.texts) REQUIRE(text == want);
  REQUIRE(!end.failure);
}

TEST_CASE("a process that fails ends the group with its words") {
  const GroupEnd end = run_group(3, [](Control& control) -> std::string {
    control.barrier();
    if (control.process() == 1) throw WorldError("the disk is full", "make room");
    control.barrier();
    return "went on";
  });
  for (const std::string& text : end.texts) CHECK(text == "failed: the disk is full");
  REQUIRE(end.failure);
  CHECK(end.failure->message == "the disk is full");
}

TEST_CASE("a process that leaves while others go on ends the group") {
  const GroupEnd end = run_group(2, [](Control& control) -> std::string {
    control.barrier();
    if (control.process() == 1) return "left";
    control.barrier();
    return "went on";
  });
  CHECK(end.texts[0] == "failed: process 1 has left the group while others go on");
  CHECK(end.texts[1] == "left");
}

TEST_CASE("others do not come: the wait ends at the time-out") {
  const GroupEnd end = run_group(
      2,
      [](Control& control) -> std::string {
        if (control.process() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
        control.barrier();
        return "went on";
      },
      0.3);
  CHECK(end.texts[0] == "failed: process 0 of 2 has waited 0.3 s for the others, which is the limit");
  CHECK(end.texts[1].starts_with("failed: "));
}

TEST_CASE("nobody joins without the group's token, and strangers do no harm") {
  const GroupEnd end = run_group(2, [](Control& control) -> std::string {
    control.barrier();
    return "";
  });
  REQUIRE(!end.failure);
  ControlServer server(2, {}, "the token");
  REQUIRE_THROWS_AS(Control(server.endpoint(), "another", 0, 2, 1).gather(""), WorldError);
  auto stranger = connect_to(server.endpoint(), 1);
  REQUIRE(stranger.ok());
  const std::string noise = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
  REQUIRE(write_all(*stranger, noise.data(), noise.size()));
  char byte = 0;
  REQUIRE_FALSE(read_all(*stranger, &byte, 1));
  REQUIRE(!server.failure());
}

TEST_CASE("what differs between processes is refused by its name") {
  const GroupEnd end = run_group(3, [](Control& control) -> std::string {
    const auto alike = check_alike(control, {{"plan", "1f"}, {"data set", control.process() == 2 ? "b" : "a"}});
    return alike.ok() ? "alike" : alike.error().message;
  });
  for (const std::string& text : end.texts) CHECK(text == "process 2 has another data set than process 0: `b`, not `a`");
}

TEST_CASE("addresses") {
  const auto plain = parse_endpoint("node-3:29500");
  REQUIRE(plain.ok());
  REQUIRE(plain->host == "node-3");
  REQUIRE(plain->port == 29500);
  REQUIRE(to_string(*parse_endpoint("[fe80::1]:80")) == "[fe80::1]:80");
  for (const char* bad : {"", "node", "node:", "node:0", "node:65536", "node:8x", ":80"}) {
    INFO(bad);
    REQUIRE_FALSE(parse_endpoint(bad).ok());
  }
}

}  // namespace shardlab::testing
