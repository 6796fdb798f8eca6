// The exchange of packed rows by node: what its two levels send, and the staging that they need. The CPU transport executes it
// (runtime/stepped_communicator.cpp), lowering gives its stream the staging, the simulator prices it.
//
// A group of n ranks lies on N nodes of L ranks; rank r is (m, l) = (r / L, r mod L). A row of rank (m, l) whose expert is on rank (p, q)
// goes across nodes to (p, l), and within the node to (p, q). What the experts made of it comes back by the same rank: within the node to
// (p, l), and across to (m, l). So N-1 messages leave a rank for other nodes in place of n-L, and a rank's rows cross nodes over links of
// the ranks at the tokens' places: an expert that all choose fills no link between nodes more than another expert does.
//
// Counts travel before rows in each exchange, since rank (p, l) passes on rows that are neither from nor for itself:
//   going      (m, l) tells (p, l) how many of the rows are for each of the L ranks there: 4 L bytes, N-1 times
//   returning  (p, q) tells (p, l) how many rows are for each (m, l), and where they begin: 8 N bytes, L-1 times
// Bytes of rows: each row that changes nodes crosses once, and each row that changes places travels once within a node.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/op.h"
#include "plan/plan.h"

namespace shardlab {

/// One exchange of packed rows in two levels.
struct RowLevels {
  int nodes = 1, per_node = 1;  ///< N and L
  /// Rows go from tokens to experts, across nodes first. Else they come back, within nodes first.
  bool goes = true;

  /// Bytes of the counts that each rank sends, in so many messages.
  int64_t count_bytes() const { return goes ? int64_t{4} * per_node * (nodes - 1) : int64_t{8} * nodes * (per_node - 1); }
  int64_t count_bytes_across() const { return goes ? count_bytes() : 0; }
  /// Messages of a rank one after another, of rows and of counts.
  int64_t steps() const { return steps_across() + int64_t{goes ? 1 : 2} * (per_node - 1); }
  int64_t steps_across() const { return int64_t{goes ? 2 : 1} * (nodes - 1); }
  /// Messages that a row of the rank `from` for the rank `to` of the group travels in, whichever way: 0, 1 or 2.
  int64_t hops(int from, int to) const {
    return (from / per_node != to / per_node ? 1 : 0) + (from % per_node != to % per_node ? 1 : 0);
  }

  /// Staging begins with counts that are sent and counts that have come.
  int64_t head_bytes() const { return (int64_t{16} * nodes * per_node + 63) / 64 * 64; }
  /// Bytes of the staging where one rank has `most_rows` rows at most for the experts of one node.
  int64_t stage_bytes(int64_t most_rows, int64_t row_bytes) const {
    return head_bytes() + (nodes * most_rows * row_bytes + 63) / 64 * 64;
  }
};

/// The levels of `op` where it moves packed rows by node; none where it goes from rank to rank: under another algorithm, or where the
/// group is on one node or has one rank on each.
std::optional<RowLevels> row_levels(const Segment& segment, const Op& op);

/// Staging bytes of `op`, 0 without levels. Rank (p, l) passes on what the N ranks of place l have for its node: of each all its rows at
/// home, or with a capacity `room` rows for each of the L ranks if that is less. A bound on the rows with experts does not lessen it.
int64_t row_stage_bytes(const Segment& segment, const Op& op);

}  // namespace shardlab
