// The work of an op, never its seconds: flops, memory bytes, payload bytes. Pure functions of the op and its operand types.
#pragma once

#include <functional>

#include "plan/base/units.h"
#include "plan/plan.h"

namespace shardlab {

struct WorkAmount {
  Flops flops;
  Bytes memory;  ///< read and written, each operand once
  /// The message of a collective or p2p op, on one rank. Packed rows of experts: the bytes of all rows that the rank's tokens make.
  Bytes payload;
};

/// Work of `op` on one rank. Counts: a multiply-add is 2 flops; causal attention counts the pairs of a query and a key that it sees;
/// elementwise ops count the flops of their formula. The work of a block of attention differs by rank: the result is for the rank `at`. If
/// `at` is null, it is for the rank with the most work, for which the others wait.
WorkAmount work_of(const Segment& segment, const Op& op, const Mesh& mesh, const TokenOrder& order = {},
                   const Coordinates* at = nullptr);

/// The part of a sequence that a rank's operand of attention holds: places [begin, begin + tokens) of `total`.
struct SequencePart {
  int64_t begin = 0, tokens = 0, total = 0;
};
/// Queries and keys of an AttentionBlock on the rank at `at`.
struct BlockParts {
  SequencePart queries, keys;
};
BlockParts block_parts(const Segment& segment, const Op& op, const Mesh& mesh, const Coordinates& at);
/// Pairs of a query and a key which the query sees in an AttentionBlock, for each sequence and head. `at` is used as by `work_of`.
int64_t pairs_of_block(const Segment& segment, const Op& op, const Mesh& mesh, const TokenOrder& order,
                       const Coordinates* at = nullptr);

/// The axis along which the ranks hold the strips of a Linear or of Strips, or -1 where there is none.
int strip_axis(const Segment& segment, const Op& op, const Mesh& mesh);

/// Extents of a Linear as a matmul [m, n, k], 2mnk flops: F is [tokens, out, in], I [tokens, in, out], W [out, in, tokens].
std::vector<int64_t> matmul_extents(const Segment& segment, const Op& op);

/// Bytes that a kernel of `op` may use beside its operands while it runs: what `workspace.<stream>` must hold.
///
/// Formula, with e = 4, rows and widths padded to 16 elements and each part aligned: attention of s keys F e (d s + s d +
///   4 s), I e (3 s d + 8 s + 8 d + 2 n s d) with n = 1, in canonical mode 6 + bits of (query heads of a kv head - 1); embedding W two lists of (row, position), 8 bytes a token each; in canonical mode a linear of contraction K packs
///   e K (8 + c) for c = clamp(2^18 / K to a multiple of 64, 64, 512) columns; a route 4 rows of E numbers; dispatch and combine 4 bytes a
///   row and an expert; a grouped linear W 8 bytes a source and expert, and in canonical mode 16 a source, 8 a leaf, and a linear's of the
///   largest K up to its rows. Packed rows that go by node
///   are staged (`row_stage_bytes` in plan/row_levels.h). Everything else works in place.
/// Units: bytes.
/// Source: kernels/scratch.cpp, to which tests hold it.
int64_t scratch_bytes(const Segment& segment, const Op& op, bool canonical);

/// Elements of the table of cosines and sines that a Rope op reads: tokens * head_dim; 0 for any other op.
int64_t rope_table_elements(const Segment& segment, const Op& op);

/// Whether no operand of `op` is in device memory: the host does the work, whatever the back end.
bool works_on_host(const Segment& segment, const Op& op);

/// Gives each role the buffers that kernels need beside operands: "workspace.<stream>", as large as the largest need of an op on
/// the stream (in host memory if all those ops work there), and tables of rotations (plan/rope_table.h). They live across steps. If a role
/// already has them, they get the size that its program needs.
void add_workspaces(Plan& plan, bool canonical);

/// Gives a role one such buffer, or gives the buffer that it has the size.
void add_workspace(const Plan& plan, Role& role, std::string name, DType dtype, int64_t elements, Space space);

/// The same buffers for another set of kernels: `scratch` gives the bytes that an op needs there (plan/device_scratch.h
/// for a GPU's).
void add_workspaces(Plan& plan, const std::function<int64_t(const Segment&, const Op&)>& scratch);

}  // namespace shardlab
