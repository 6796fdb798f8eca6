// The exchange of packed rows by node: what its two levels send, and the staging that they need. The CPU transport executes it
// (runtime/rows_by_node.cpp), lowering gives its stream the staging, the simulator prices it.
//
// A group of n ranks lies on N nodes of L ranks; rank r is (m, l) = (r / L, r mod L). A row of rank (m, l) whose expert is on rank (p, q)
// goes across nodes to (p, l), and within the node to (p, q). What the experts made of it comes back by the same rank: within the node to
// (p, l), and across to (m, l). So N-1 messages leave a rank for other nodes in place of n-L, and a rank's rows cross nodes over links of
// the ranks at the tokens' places: an expert that all choose fills no link between nodes more than another expert does.
//
// Rows that are copies of tokens, or tokens times weights (`crosses_once`), cross to a node once for each token that has experts there; rank
// (p, l) makes the rows of it. Rows that come back cross one by one.
//
// Counts travel before rows in each exchange, since rank (p, l) passes on rows that are neither from nor for itself:
//   going      (m, l) tells (p, l) how many of the rows are for each of the L ranks there: 4 L bytes, N-1 times
//   once       then (m, l) tells (p, l) for each row which row of its token crosses in its place: 4 bytes a row, and 4 for its weight, in N-1 messages
//   returning  (p, q) tells (p, l) how many rows are for each (m, l), and where they begin: 8 N bytes, L-1 times
// Bytes of rows: each row, or token, that changes nodes crosses once, and each row that changes places travels once within a node.
// Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 3.2.2: a token crosses to a node once, to the device of the same index.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/model.h"
#include "plan/op.h"
#include "plan/plan.h"

namespace shardlab {

/// One exchange of packed rows in two levels.
struct RowLevels {
  int nodes = 1, per_node = 1;  ///< N and L
  /// Rows go from tokens to experts, across nodes first. Else they come back, within nodes first.
  bool goes = true;
  bool once = false;      ///< a token crosses to a node once ...
  bool weighed = false;   ///< ... with the weights of its rows there
  int64_t rows = 0;       ///< rows that a rank has room for at home; where routes are even it sends an n-th of them to each rank
  int64_t most_rows = 0;  ///< rows of one rank for the experts of one node, at most
  int64_t row_bytes = 0;
  int64_t even_across = 0;  ///< rows that a rank sends to other nodes where routes are even

  /// Bytes of the counts that each rank sends, in so many messages.
  int64_t count_bytes() const { return goes ? int64_t{4} * per_node * (nodes - 1) : int64_t{8} * nodes * (per_node - 1); }
  int64_t count_bytes_across() const { return goes ? count_bytes() : 0; }
  /// Bytes of what is told of so many rows for other nodes: which row crosses in the place of each, and its weight.
  int64_t list_bytes(int64_t rows_for_others) const { return (weighed ? 8 : once ? 4 : 0) * rows_for_others; }
  /// Messages of a rank one after another, of rows and of what travels before them.
  int64_t steps() const { return steps_across() + int64_t{goes ? 1 : 2} * (per_node - 1); }
  int64_t steps_across() const { return int64_t{once ? 3 : goes ? 2 : 1} * (nodes - 1); }
  /// Messages that a row of the rank `from` for the rank `to` of the group travels in, whichever way: 0, 1 or 2.
  int64_t hops(int from, int to) const { return crosses(from, to) + changes_place(from, to); }
  int64_t crosses(int from, int to) const { return from / per_node != to / per_node ? 1 : 0; }
  int64_t changes_place(int from, int to) const { return from % per_node != to % per_node ? 1 : 0; }

  /// Bytes that a rank sends to other nodes, and within its own, where routes are even: rows, and what travels before them.
  int64_t even_bytes_across() const {
    return count_bytes_across() + list_bytes(rows / nodes * (nodes - 1)) + even_across * row_bytes;
  }
  int64_t even_bytes_within() const { return count_bytes() - count_bytes_across() + rows / per_node * (per_node - 1) * row_bytes; }
  int64_t even_bytes() const { return even_bytes_across() + even_bytes_within(); }
  /// The same exchange in which every row crosses by itself.
  RowLevels one_by_one() const {
    RowLevels all = *this;
    all.once = all.weighed = false, all.even_across = rows / nodes * (nodes - 1);
    return all;
  }

  /// Staging begins with counts that are sent and counts that have come; then for each row what is told of it, and what is heard of the
  /// rows of each rank of the place; then rows.
  int64_t counts_room() const { return aligned_to_line(int64_t{16} * nodes * per_node); }
  int64_t head_bytes() const { return counts_room() + aligned_to_line(list_bytes(rows + nodes * most_rows)); }
  int64_t stage_bytes() const { return head_bytes() + aligned_to_line(nodes * most_rows * row_bytes); }

 private:
  static constexpr int64_t aligned_to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

/// The levels of `op` where it moves packed rows by node; none where it goes from rank to rank: under another algorithm, or where the
/// group is on one node or has one rank on each.
std::optional<RowLevels> row_levels(const Segment& segment, const Op& op);

/// Staging bytes of `op`, 0 without levels. Rank (p, l) passes on what the N ranks of place l have for its node: of each all its rows at
/// home, or with a capacity `room` rows for each of the L ranks if that is less. A bound on the rows with experts does not lessen it.
int64_t row_stage_bytes(const Segment& segment, const Op& op);

/// Has a token cross to a node once in the place of the rows that `op` of `segment` moves, if `op` moves them to experts by node and they are a
/// dispatch's, rounded or not, or the gradients that a combine makes. `op` then reads the choice that laid them out, of gradients also the
/// weights and the tokens that they are products of, and expects as many rows across as `experts` have it where routes are even. An op that
/// moves rows otherwise loses these reads. Whether `op` is another now.
bool cross_once(const Segment& segment, const Experts& experts, Op& op);

/// Has the slots that the op at step `at` reads, and that were given up before it, given up behind it: for reads that `cross_once` has added
/// to a plan that knew where its slots end.
void free_behind(Segment& segment, size_t at);

}  // namespace shardlab
