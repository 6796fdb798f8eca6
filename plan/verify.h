// Proves a plan before anything runs. Every finding names the rule, the role, the call and the op.
//
//  1. form        operands exist, bindings have exactly the slot's type, class and space, views lie inside their base,
//                 in-place writes are views of the named read, shapes and settings fit the op, names are unique,
//                 sizes are within plan/limits.h.
//  2. types       the placement, scale and micro-batch type of every write follows from the op's reads; reads of partial
//                 values by nonlinear ops, mixed placements and unreduced sums are found here.
//  3. values      no read before a write, of a stale name (overwritten since), outside the buffer's life, or after free;
//                 persistent storage ends the period with the type it began with; backward ops, and forward ops that run again,
//                 read what the forward op of their label, layer and micro-batch read and made; layers read one another in order.
//                 State that a step changes is kept, and no kept copy of it is older (plan/verify_state.cpp).
//  4. gradients   before an optimizer op, a gradient has the parameter's own placement, scale 1, and every micro-batch of the
//                 step exactly once; every parameter is updated exactly once; a squared norm counts each element once. The
//                 gradient of a result that a backward op reads is the sum of the terms of all forward ops that read the result.
//  5. order       the waits of an expanded program cover every conflict between streams (`find_unordered`). A plan's issue order is
//                 itself an order that keeps every edge, so a plan alone cannot break this rule.
//  6. messages    collectives are issued in equal order on every rank of their group, with equal sizes; sends match receives
//                 in order, type and size; nothing deadlocks under rendezvous sends and in-order communicators.
//  7. memory      the peak of every role is within the budget, where one is given; buffers that live at the same time lie apart in
//                 the arena (`find_overlaps`, on the layout that the executor uses).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/memory.h"
#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab {

enum class Rule : uint8_t { kForm, kTypes, kValues, kGradients, kOrder, kMessages, kMemory };
std::string_view name_of(Rule rule);

struct Finding {
  Rule rule = Rule::kForm;
  int role = -1;
  std::string op;       ///< as `describe` names it
  std::string message;  ///< what is wrong, what was expected, what was found
};

struct VerifyOptions {
  std::optional<std::array<int64_t, kSpaces>> budget;  ///< bytes a rank has in each space
  int max_findings = 20;
};

/// Every finding, none for a good plan.
std::vector<Finding> find_faults(const Plan& plan, const VerifyOptions& options = {});

/// `find_faults` as a Result: refuses with the findings and, for a message fault, the grid of steps by stages with the
/// offending cell marked. A memory finding has ExitCode::kNo.
Result<void> verify(const Plan& plan, const VerifyOptions& options = {});

/// Rule 5 on an expanded program: pairs of accesses to the same bytes, at least one of them a write, that no chain of stream
/// order and waits separates. Derived from the waits that are there, independently of how `expand_program` chose them.
std::vector<Finding> find_unordered(const Plan& plan, const Program& program);

/// Rule 7 on an arena's layout: storage outside its arena or off its grain, and storage that overlaps other live storage.
std::vector<Finding> find_overlaps(const Plan& plan, const Program& program, const ArenaLayout& layout);

}  // namespace shardlab
