// Rule 6: messages between stages, and within a role along a ring.
#include <fmt/format.h>

#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string finding(const std::string& text) {
  const auto findings = find_faults(parse_or_fail(text));
  return findings.empty() ? "" : fmt::format("{}: {}", name_of(findings[0].rule), findings[0].message);
}
std::string broken_pipeline(std::string_view from, std::string_view to) { return finding(replaced(pipeline_text(), from, to)); }

}  // namespace

TEST_CASE("messages: sends and receives match") {
  CHECK(broken_pipeline("  call send.x m=1 (x=%x@1)\n", "") ==
        "messages: stage 0 never sends it: 1 sends meet 2 receives on `fwd`");
  CHECK(broken_pipeline("  call take m=1 (d=%d@1)\n", "  call take m=1 (d=%d@1)\n  call send.x m=1 (x=%x@1)\n") ==
        "messages: stage 1 never receives it: 3 sends meet 2 receives on `fwd`");
  CHECK(broken_pipeline("segment recv.d\n  bound %d activation f32[4]", "segment recv.d\n  bound %d activation f32[2]")
            .starts_with("form:"));
  CHECK(broken_pipeline("recv recv.x () -> (%x) comm=fwd", "recv recv.d () -> (%x) comm=fwd") ==
        "messages: it waits for `d`, but what stage 0 sends then is `x`");
  CHECK(broken_pipeline("recv recv.d () -> (%d) comm=bwd hop=1", "recv recv.d () -> (%d) comm=bwd hop=-1") ==
        "messages: stage 0 has no peer -1 hops along `bwd`");
}

TEST_CASE("messages: two sends in the wrong order") {
  std::string text = replaced(pipeline_text(), "  call send.x m=0 (x=%x@0)\n", "");
  text = replaced(text, "  call send.x m=1 (x=%x@1)\n", "  call send.x m=1 (x=%x@1)\n  call send.x m=0 (x=%x@0)\n");
  CHECK(finding(text) == "messages: it waits for micro-batch 0, but what stage 0 sends then is of micro-batch 1");
}

TEST_CASE("messages: a deadlock is shown as a grid") {
  // Stage 0 wants the first gradient before it sends what stage 1 makes it of.
  std::string text = replaced(pipeline_text(), "  call send.x m=0 (x=%x@0)\n", "");
  text = replaced(text, "  call send.x m=1 (x=%x@1)\n", "");
  text = replaced(
      text, "  call take m=0 (d=%d@0)\n",
      "  call take m=0 (d=%d@0)\n  call copy m=0 (a=%d@0, b=%x@0)\n  call send.x m=0 (x=%x@0)\n  call send.x m=1 (x=%x@1)\n");
  text = replaced(text, "segment send.x\n",
                  "segment copy\n  bound %a activation f32[4] pp:L micro:slice\n  bound %b activation f32[4] pp:L micro:slice\n\n  "
                  "copy copy (%a) -> (%b)\n\nsegment send.x\n");
  CHECK(finding(text) == R"(messages: deadlock: every rank waits.
    step  stage 0         stage 1
       0  >> recv bwd m0  >> recv fwd m0
       1  >> send fwd m0  >> send bwd m0
       2     send fwd m1     recv fwd m1
       3     recv bwd m1     send bwd m1
    stage 0 stream fwd.send: send fwd m0 waits for its own recv bwd m0
    stage 0 stream bwd.recv: recv bwd m0 waits for stage 1
    stage 1 stream fwd.recv: recv fwd m0 waits for stage 0
    stage 1 stream bwd.send: send bwd m0 waits for its own recv fwd m0)");
}

TEST_CASE("messages: a deadlock among the last of many stages is shown around those that wait") {
  std::string text = R"(shardlab plan 1
name late
mesh pp=10
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute
strategies by-hand
comm forward axes pp
comm backward axes pp

segment eight
  local %x buffer f32[4] pp:L
  local %d buffer f32[4] pp:L

  alloc %x
  alloc %d
  kernel make () -> (%x) name=make rule=opaque
  recv recv.d () -> (%d) comm=backward hop=1
  send send.x (%x) -> () comm=forward hop=1
  free %d
  free %x

segment nine
  local %x buffer f32[4] pp:L
  local %d buffer f32[4] pp:L

  alloc %x
  alloc %d
  kernel make () -> (%d) name=make rule=opaque
  recv recv.x () -> (%x) comm=forward hop=-1
  send send.d (%d) -> () comm=backward hop=-1
  free %d
  free %x

)";
  for (int r = 0; r < 10; ++r)
    text += fmt::format("role {}\n\n{}", r, r == 8 ? "  call eight ()\n\n" : r == 9 ? "  call nine ()\n" : "");
  const std::string grid = finding(text);
  INFO(grid);
  CHECK(grid.starts_with("messages: deadlock: every rank waits.\n    step  stage 2 "));
  CHECK(grid.find("stage 8 stream compute: recv backward waits for stage 9\n") != std::string::npos);
  CHECK(grid.find("stage 9 stream compute: recv forward waits for stage 8\n") != std::string::npos);
  CHECK(grid.ends_with("\n    2 more stages are not shown"));
}

TEST_CASE("messages: a free waits for the send, so a buffer given back too soon can hold the compute stream") {
  // Stage 0 frees x@1 before it posts the receive that stage 1 waits on: nothing is wrong with that alone,
  std::string text = replaced(pipeline_text(), "  free %d@1\n  free %x@1\n\nrole 1", "  free %d@1\n\nrole 1");
  text = replaced(text, "  alloc %d@0\n  call recv.d m=0", "  free %x@1\n  alloc %d@0\n  call recv.d m=0");
  CHECK(finding(text) == "");
  // ... and stage 1 doing the same, each waits for the other's next receive.
  text = replaced(text, "  free %x@1\n  free %d@0\n", "  free %x@1\n");
  text =
      replaced(text, "  free %x@0\n  alloc %x@1\n  call recv.x m=1", "  free %d@0\n  free %x@0\n  alloc %x@1\n  call recv.x m=1");
  CHECK(finding(text).starts_with("messages: deadlock: every rank waits."));
}

namespace {

/// Two ranks of one role pass a block around a ring along `cp`. `streams` are those of the send and the receive.
std::string ring(const std::string& send, const std::string& receive, const std::string& attributes = "cyclic") {
  return fmt::format(R"(shardlab plan 1
name ring
mesh cp=2
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute out in
strategies by-hand
comm ring axes cp

segment round
  local %k    activation f32[4] cp:S0 micro:slice
  local %next activation f32[4] cp:L micro:slice

  alloc %k
  alloc %next
  kernel make () -> (%k) name=make rule=opaque
  send send.k (%k) -> () comm=ring {2} @{0}
  recv recv.k () -> (%next) comm=ring {2} @{1}
  free %next
  free %k

role 0

  call round m=0 ()
)",
                     send, receive, attributes);
}

}  // namespace

TEST_CASE("messages: a ring needs its send and its receive at the same time") {
  CHECK(finding(ring("out", "in")) == "");
  CHECK(finding(ring("out", "out")).starts_with("messages: deadlock"));
  CHECK(finding(ring("out", "in", "")) ==
        "messages: every rank along `ring` issues it, so the last has no peer: the hop must be cyclic");
}

TEST_CASE("messages: collectives that join roles") {
  const std::string text = R"(shardlab plan 1
name ends
mesh pp=3
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute
strategies by-hand
comm ends axes pp ends

segment tie
  local %part  buffer f32[4] pp:P
  local %whole buffer f32[4] pp:L view %part

  alloc %part
  kernel make () -> (%part) name=make rule=trusted
  all_reduce tie (%part) -> (%whole) comm=ends
  free %part

segment other
  local %part  buffer f32[4] pp:P
  local %whole buffer f32[4] pp:L view %part

  alloc %part
  kernel make () -> (%part) name=make rule=trusted
  all_reduce other (%part) -> (%whole) comm=ends
  free %part

role 0

  call tie ()
  call other ()

role 1

role 2

  call tie ()
  call other ()
)";
  CHECK(finding(text) == "");
  CHECK(finding(replaced(text, "role 1\n", "role 1\n\n  call tie ()\n")) == "messages: stage 1 stands alone in `ends`");
  CHECK(finding(replaced(text, "role 1\n\nrole 2\n\n  call tie ()\n", "role 1\n\nrole 2\n\n")) ==
        "messages: it meets tie tie all_reduce on stage 0, which is another collective");
  CHECK(finding(replaced(text, "role 2\n\n  call tie ()\n  call other ()\n", "role 2\n\n  call tie ()\n")) ==
        "messages: stage 2 never joins it: its collective number 2 on `ends`");
  // Stages whose sides are of as many bytes, and are not the same thing.
  const auto unlike = [&](const std::string& type) {
    const std::string tie = text.substr(text.find("segment tie"), text.find("segment other") - text.find("segment tie"));
    std::string mine = replaced(replaced(tie, "segment tie", "segment mine"), "f32[4] pp:P", type);
    const bool sum = type.find("micro:sum") != std::string::npos;  // which rule 4 follows over roles
    mine = replaced(mine, "f32[4] pp:L view", type.substr(0, type.find(" pp")) + (sum ? " micro:sum view" : " pp:L view"));
    const std::string both = replaced(text, "role 0\n", mine + "role 0\n");
    return finding(replaced(both, "role 2\n\n  call tie ()", "role 2\n\n  call mine ()"));
  };
  CHECK(unlike("f32[4] pp:P") == "");
  const std::string meets = "messages: it meets tie tie all_reduce on stage 0, where ";
  CHECK(unlike("f16[8] pp:P") == meets + "the shape or element type is another");
  CHECK(unlike("f32[2,2] pp:P") == meets + "the shape or element type is another");
  CHECK(unlike("f32[4] pp:P micro:sum") == meets + "it is micro:none and not micro:sum");
}

}  // namespace shardlab::testing
