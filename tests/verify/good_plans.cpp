#include "tests/verify/good_plans.h"

#include <fmt/format.h>

#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Plan parse_or_fail(std::string_view text) {
  Result<Plan> plan = parse_plan(text);
  if (!plan.ok()) FAIL(to_string(plan.error()));
  return std::move(plan).value();
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  INFO("looking for: " << from);
  REQUIRE(at != std::string::npos);
  REQUIRE(text.find(from, at + 1) == std::string::npos);
  return text.replace(at, from.size(), to);
}

std::string findings_text(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& f : findings) text += fmt::format("{} | {} | {}\n", name_of(f.rule), f.op, f.message);
  return text;
}

std::string training_text() {
  return R"(shardlab plan 1
name training
mesh pp=1 dp=2 tp=2
micro_batches 2
sequences_per_micro_batch 2
period 1
streams compute dp
strategies by-hand
comm tp axes tp
comm dp axes dp

parameter table f32[4,6] tp:S0 stage 0 normal deviation 0.02 decay tensor 0
parameter head  f32[8,6] stage 0 normal deviation 0.02 decay tensor 1

segment zero
  bound %g.table gradient f32[4,6] dp:P tp:S0 micro:sum
  bound %g.head  gradient f32[8,6] dp:P micro:sum

  fill zero.table () -> (%g.table)
  fill zero.head () -> (%g.head)

segment micro
  bound %table   parameter f32[4,6] tp:S0
  bound %head    parameter f32[8,6]
  bound %g.table gradient  f32[4,6] dp:P tp:S0 micro:sum
  bound %g.head  gradient  f32[8,6] dp:P micro:sum
  bound %nll     metric    f32[2] dp:S0 micro:slice
  local %tokens  input     i32[2,3] dp:S0 micro:slice
  local %targets input     i32[2,3] dp:S0 micro:slice
  local %x.part  temporary f32[2,3,6] dp:S0 tp:P micro:slice
  local %x       temporary f32[2,3,6] dp:S0 micro:slice view %x.part
  local %logits  temporary f32[2,3,8] dp:S0 micro:slice
  local %d.x     temporary f32[2,3,6] dp:S0 micro:slice

  alloc %tokens
  alloc %targets
  alloc %x.part
  alloc %logits
  alloc %d.x
  load_batch tokens () -> (%tokens)
  load_batch targets () -> (%targets) targets
  embed.F embed (%tokens, %table) -> (%x.part)
  all_reduce embed.sum (%x.part) -> (%x) comm=tp
  linear.F head (%x, %head) -> (%logits)
  cross_entropy loss (%logits, %targets) -> (%nll, %logits) tokens=24
  linear.I head (%logits, %head) -> (%d.x)
  linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate
  embed.W embed (%tokens, %d.x, %g.table) -> (%g.table) accumulate
  free %d.x
  free %logits
  free %x.part
  free %targets
  free %tokens

segment reduce.table
  bound %part gradient f32[4,6] dp:P tp:S0 micro:sum
  local %whole gradient f32[4,6] tp:S0 micro:sum view %part

  all_reduce dp.table (%part) -> (%whole) comm=dp @dp

segment reduce.head
  bound %part gradient f32[8,6] dp:P micro:sum
  local %whole gradient f32[8,6] micro:sum view %part

  all_reduce dp.head (%part) -> (%whole) comm=dp @dp

segment update.table
  bound %g gradient f32[4,6] tp:S0 micro:sum
  bound %p parameter f32[4,6] tp:S0

  sgd update.table (%g, %p) -> (%p)

segment update.head
  bound %g gradient f32[8,6] micro:sum
  bound %p parameter f32[8,6]

  sgd update.head (%g, %p) -> (%p)

segment loss.sum
  bound %nll0  metric f32[2] dp:S0 micro:slice
  bound %nll1  metric f32[2] dp:S0 micro:slice
  bound %loss  metric f32[1] dp:P micro:sum
  local %whole metric f32[1] micro:sum view %loss

  sum_scalars loss (%nll0, %nll1) -> (%loss) factor=1/24
  all_reduce loss.dp (%loss) -> (%whole) comm=dp

role 0
  %table     parameter f32[4,6] tp:S0 persistent of table
  %head      parameter f32[8,6] persistent of head
  %g.table   gradient  f32[4,6] dp:P tp:S0 micro:sum of table
  %g.head    gradient  f32[8,6] dp:P micro:sum of head
  %s.table   gradient  f32[4,6] tp:S0 micro:sum view %g.table of table
  %s.head    gradient  f32[8,6] micro:sum view %g.head of head
  %nll@0     metric    f32[2] dp:S0 micro:slice
  %nll@1     metric    f32[2] dp:S0 micro:slice
  %loss      metric    f32[1] dp:P micro:sum persistent

  alloc %g.table
  alloc %g.head
  alloc %nll@0
  alloc %nll@1
  call zero (g.table=%g.table, g.head=%g.head)
  call micro m=0 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@0)
  call micro m=1 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@1)
  call reduce.table (part=%g.table)
  call reduce.head (part=%g.head)
  call update.table (g=%s.table, p=%table)
  call update.head (g=%s.head, p=%head)
  call loss.sum (nll0=%nll@0, nll1=%nll@1, loss=%loss)
  free %nll@1
  free %nll@0
  free %g.head
  free %g.table
)";
}

std::string zero1_text() {
  std::string text = training_text();
  const size_t segments = text.find("segment reduce.table");
  const size_t loss = text.find("segment loss.sum");
  text.replace(segments, loss - segments, R"(segment scatter
  bound %part  gradient f32[72] dp:P tp:L micro:sum
  local %shard gradient f32[36] dp:S0 tp:L micro:sum view %part shard dp

  reduce_scatter grads (%part) -> (%shard) comm=dp @dp

segment update
  bound %g gradient  f32[36] dp:S0 tp:L micro:sum
  bound %p parameter f32[36] dp:S0 tp:L
  bound %m moment    f32[36] dp:S0 tp:L
  bound %v moment    f32[36] dp:S0 tp:L

  adamw update (%g, %p, %m, %v) -> (%p, %m, %v)

segment gather
  bound %whole parameter f32[72] tp:L
  local %shard parameter f32[36] dp:S0 tp:L view %whole shard dp

  all_gather values (%shard) -> (%whole) comm=dp @dp

)");
  const size_t role = text.find("role 0");
  text.replace(role, std::string::npos, R"(role 0
  %values  parameter f32[72] tp:L persistent
  %mine    parameter f32[36] dp:S0 tp:L view %values shard dp
  %table   parameter f32[4,6] tp:S0 view %values of table
  %head    parameter f32[8,6] view %values offset 24 of head
  %grads   gradient  f32[72] dp:P tp:L micro:sum
  %sum     gradient  f32[36] dp:S0 tp:L micro:sum view %grads shard dp
  %g.table gradient  f32[4,6] dp:P tp:S0 micro:sum view %grads of table
  %g.head  gradient  f32[8,6] dp:P micro:sum view %grads offset 24 of head
  %m       moment    f32[36] dp:S0 tp:L persistent
  %v       moment    f32[36] dp:S0 tp:L persistent
  %nll@0   metric    f32[2] dp:S0 micro:slice
  %nll@1   metric    f32[2] dp:S0 micro:slice
  %loss    metric    f32[1] dp:P micro:sum persistent

  alloc %grads
  alloc %nll@0
  alloc %nll@1
  call zero (g.table=%g.table, g.head=%g.head)
  call micro m=0 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@0)
  call micro m=1 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@1)
  call scatter (part=%grads)
  call update (g=%sum, p=%mine, m=%m, v=%v)
  call gather (whole=%values)
  call loss.sum (nll0=%nll@0, nll1=%nll@1, loss=%loss)
  free %nll@1
  free %nll@0
  free %grads
)");
  return text;
}

std::string pipeline_text() {
  return R"(shardlab plan 1
name pipeline
mesh pp=2
micro_batches 2
sequences_per_micro_batch 1
period 1
streams compute fwd.send fwd.recv bwd.send bwd.recv
strategies by-hand
comm fwd axes pp
comm bwd axes pp

segment make
  bound %x activation f32[4] pp:L micro:slice

  kernel make () -> (%x) name=make rule=opaque

segment turn
  bound %x activation f32[4] pp:L micro:slice
  bound %d activation f32[4] pp:L micro:slice

  kernel turn (%x) -> (%d) name=turn rule=opaque

segment take
  bound %d activation f32[4] pp:L micro:slice
  local %z temporary  f32[4] pp:L micro:slice

  alloc %z
  kernel take (%d) -> (%z) name=take rule=opaque
  free %z

segment send.x
  bound %x activation f32[4] pp:L micro:slice

  send send.x (%x) -> () comm=fwd @fwd.send

segment recv.x
  bound %x activation f32[4] pp:L micro:slice

  recv recv.x () -> (%x) comm=fwd @fwd.recv

segment send.d
  bound %d activation f32[4] pp:L micro:slice

  send send.d (%d) -> () comm=bwd hop=-1 @bwd.send

segment recv.d
  bound %d activation f32[4] pp:L micro:slice

  recv recv.d () -> (%d) comm=bwd hop=1 @bwd.recv

role 0
  %x@0 activation f32[4] pp:L micro:slice
  %x@1 activation f32[4] pp:L micro:slice
  %d@0 activation f32[4] pp:L micro:slice
  %d@1 activation f32[4] pp:L micro:slice

  alloc %x@0
  call make m=0 (x=%x@0)
  call send.x m=0 (x=%x@0)
  alloc %x@1
  call make m=1 (x=%x@1)
  call send.x m=1 (x=%x@1)
  alloc %d@0
  call recv.d m=0 (d=%d@0)
  call take m=0 (d=%d@0)
  free %d@0
  free %x@0
  alloc %d@1
  call recv.d m=1 (d=%d@1)
  call take m=1 (d=%d@1)
  free %d@1
  free %x@1

role 1
  %x@0 activation f32[4] pp:L micro:slice
  %x@1 activation f32[4] pp:L micro:slice
  %d@0 activation f32[4] pp:L micro:slice
  %d@1 activation f32[4] pp:L micro:slice

  alloc %x@0
  call recv.x m=0 (x=%x@0)
  alloc %d@0
  call turn m=0 (x=%x@0, d=%d@0)
  call send.d m=0 (d=%d@0)
  free %x@0
  alloc %x@1
  call recv.x m=1 (x=%x@1)
  alloc %d@1
  call turn m=1 (x=%x@1, d=%d@1)
  call send.d m=1 (d=%d@1)
  free %x@1
  free %d@0
  free %d@1
)";
}

}  // namespace shardlab::testing
