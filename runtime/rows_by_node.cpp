// Packed rows that go by node (plan/row_levels.h). Names are those of that file: this rank is (node, place), N nodes have L ranks each.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "plan/base/check.h"
#include "plan/collective_steps.h"
#include "runtime/packed_rows.h"
#include "runtime/reduction.h"
#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

namespace {

/// The staging of one call: counts that are told and heard, which rows stand for which, then rows.
class RowStage {
 public:
  RowStage(const CollectiveCall& call, int rank)
      : levels_(*call.levels),
        counts_(reinterpret_cast<int32_t*>(call.stage.data())),
        heard_(2 * static_cast<int64_t>(levels_.nodes) * levels_.per_node),
        stands_(reinterpret_cast<int32_t*>(call.stage.data() + levels_.counts_room())),
        rows_(call.stage.data() + levels_.head_bytes()),
        room_(std::ssize(call.stage) - levels_.head_bytes()),
        rank_(rank) {}

  int32_t* told(int64_t at) const { return counts_ + at; }
  int32_t* heard(int64_t at) const { return counts_ + heard_ + at; }
  /// What is told, or heard, of rows that go to another node. stands: below 0 where the row crosses, ~its place in what its sender offers; else the
  /// row of the run that crosses in its place. weights: of rows that are tokens times these.
  struct List {
    std::span<int32_t> stands;
    std::span<float> weights;
  };
  List told_list() const { return list(0, levels_.rows); }
  /// Of `rows` rows that (m, place) has for this node.
  List heard_list(int m, int64_t rows) const {
    SHARDLAB_CHECK(rows <= levels_.most_rows, "rank {} hears of {} rows and has room for {}", rank_, rows, levels_.most_rows);
    return list(levels_.rows + m * levels_.most_rows, rows);
  }
  /// Bytes from what is told of a row to its weight, on every rank.
  int64_t to_weights() const { return 4 * all(); }
  /// The next `bytes` bytes for rows.
  std::byte* take(int64_t bytes) {
    SHARDLAB_CHECK(taken_ + bytes <= room_, "rank {} passes on {} bytes of rows and has room for {}", rank_, taken_ + bytes, room_);
    return rows_ + std::exchange(taken_, taken_ + bytes);
  }

 private:
  int64_t all() const { return levels_.rows + levels_.nodes * levels_.most_rows; }
  List list(int64_t first, int64_t rows) const {
    const auto n = static_cast<size_t>(rows);
    return {{stands_ + first, n}, {reinterpret_cast<float*>(stands_ + all()) + first, levels_.weighed ? n : 0}};
  }

  const RowLevels& levels_;
  int32_t* counts_;
  int64_t heard_;
  int32_t* stands_;
  std::byte* rows_;
  int64_t room_, taken_ = 0;
  int rank_;
};

const std::byte* row_at(const void* base, int64_t offset) { return static_cast<const std::byte*>(base) + offset; }
std::byte* row_at(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
std::byte* count_bytes(int32_t* counts) { return reinterpret_cast<std::byte*>(counts); }
template <class T>
std::byte* bytes_of_list(std::span<T> list) {
  return reinterpret_cast<std::byte*>(list.data());
}

/// At home rows of one peer lie behind those of another, and none on top of others: rows for, and from, a node are one run.
void check_runs(const std::vector<RowRun>& home, int rank) {
  int64_t end = 0;
  for (const RowRun& rows : home) {
    SHARDLAB_CHECK(rows.begin == end, "rank {} has more rows than room at home: some begin at byte {} and not at {}", rank,
                   rows.begin, end);
    end += rows.bytes;
  }
}

/// Of a token's rows for each node the first, in the order of its experts, stands for all of them. `first_row`: of each node, the first row at
/// home. Rows are by place and then by token.
void list_rows(const CollectiveCall& call, std::span<const int64_t> first_row, const RowStage::List& told, int rank) {
  const int64_t of_node = call.experts * call.levels->per_node;
  std::vector<int64_t> next(static_cast<size_t>(of_node * call.levels->nodes));  // of each place, its next row
  for (const int32_t place : call.choice)
    if (place >= 0) ++next[static_cast<size_t>(place)];
  std::exclusive_scan(next.begin(), next.end(), next.begin(), int64_t{0});
  for (size_t node = 0; node < first_row.size(); ++node)
    SHARDLAB_CHECK(next[node * static_cast<size_t>(of_node)] == first_row[node],
                   "rank {} has rows for node {} of its group from row {} on, and by the choice of experts from row {}", rank, node,
                   first_row[node], next[node * static_cast<size_t>(of_node)]);
  std::vector<int64_t> stands(first_row.size());
  for (size_t at = 0; at < call.choice.size(); ++at) {
    const size_t token = at / static_cast<size_t>(call.top_k);
    if (at % static_cast<size_t>(call.top_k) == 0) std::ranges::fill(stands, -1);
    const int32_t place = call.choice[at];
    if (place < 0) continue;
    const int64_t row = next[static_cast<size_t>(place)]++;
    const auto node = static_cast<size_t>(place / of_node);
    const int64_t in_run = row - first_row[node];
    const int64_t offered = call.levels->weighed ? static_cast<int64_t>(token) : in_run;
    told.stands[static_cast<size_t>(row)] = static_cast<int32_t>(stands[node] < 0 ? ~offered : stands[node]);
    if (stands[node] < 0) stands[node] = in_run;
    if (call.levels->weighed) told.weights[static_cast<size_t>(row)] = call.weights[at];
  }
}

/// The rows that cross, of a buffer that begins at `base`: neighbours in one slice.
std::vector<Slice> rows_that_cross(const std::byte* base, std::span<const int32_t> stands, int64_t row_bytes) {
  std::vector<Slice> rows;
  for (const int32_t row : stands) {
    if (row >= 0) continue;
    const std::byte* at = base + ~row * row_bytes;
    if (!rows.empty() && rows.back().at + rows.back().bytes == at)
      rows.back().bytes += row_bytes;
    else
      rows.push_back({at, row_bytes});
  }
  return rows;
}

void copy_rows(std::byte* to, const std::byte* from, int64_t n) {
  if (n > 0) std::memcpy(to, from, static_cast<size_t>(n));
}

}  // namespace

/// Across nodes to the rank of the own place, then within the node. Staged are rows for other places, by place and then by node, so
/// that a message within the node is one run of bytes. Rows for this rank go straight to the target. Where a token crosses once, its row goes
/// to one of the places at which the token's rows come to lie, and from there to the others; then each is multiplied by its weight.
Moved SteppedCommunicator::send_rows_by_node(const CollectiveCall& call, Task& task) {
  const int N = call.levels->nodes, L = call.levels->per_node, node = index_ / L, place = index_ % L;
  const std::vector<RowRun> out = rows_sent(call, size(), task.rank()), in = rows_received(call, size(), task.rank());
  const auto to_rank = [&](int p, int q) -> const RowRun& { return out[static_cast<size_t>(p * L + q)]; };
  const auto from_rank = [&](int m, int l) -> const RowRun& { return in[static_cast<size_t>(m * L + l)]; };
  check_runs(out, task.rank());
  Moved moved;
  RowStage stage(call, task.rank());

  // told[p][q]: rows for (p, q). heard[m][q]: rows that (m, place) has for (node, q).
  for (int d = 0; d < size(); ++d) *stage.told(d) = static_cast<int32_t>(out[static_cast<size_t>(d)].bytes / call.row_bytes);
  copy_rows(count_bytes(stage.heard(node * L)), count_bytes(stage.told(node * L)), 4 * L);
  for (int k = 1; k < N; ++k) {
    const int to = (node + k) % N, from = (node - k + N) % N;
    const Slice told{count_bytes(stage.told(to * L)), 4 * L};
    const Piece heard{0, 4 * L, count_bytes(stage.heard(from * L))};
    swap(to * L + place, told.at, std::span(&told, 1), from * L + place, std::span(&heard, 1), moved, task);
  }
  const auto heard_bytes = [&](int m, int q) { return *stage.heard(m * L + q) * call.row_bytes; };

  std::vector<std::byte*> lies(static_cast<size_t>(size()));  // by q and m: where rows of (m, place) for (node, q) come to lie
  for (int q = 0; q < L; ++q)
    for (int m = 0; m < N; ++m) {
      std::byte*& where = lies[static_cast<size_t>(q * N + m)];
      if (q != place) {
        where = stage.take(heard_bytes(m, q));
        continue;
      }
      const RowRun& mine = from_rank(m, place);
      SHARDLAB_CHECK(heard_bytes(m, q) == mine.bytes, "rank {} expects {} bytes of rows from rank {} of the group, which has {}",
                     task.rank(), mine.bytes, m * L + place, heard_bytes(m, q));
      where = row_at(call.target, mine.begin);
    }

  for (int q = 0; q < L; ++q)
    copy_rows(lies[static_cast<size_t>(q * N + node)], row_at(call.source, to_rank(node, q).begin), to_rank(node, q).bytes);
  std::vector<int64_t> first_row;  // at home, for each node
  for (int p = 0; p < N; ++p) first_row.push_back(to_rank(p, 0).begin / call.row_bytes);
  if (call.levels->once) list_rows(call, first_row, stage.told_list(), task.rank());
  std::vector<Piece> pieces;
  for (int k = 1; k < N; ++k) {
    const int to = (node + k) % N, from = (node - k + N) % N;
    Slice run{row_at(call.source, to_rank(to, 0).begin), 0};
    for (int q = 0; q < L; ++q) run.bytes += to_rank(to, q).bytes;
    pieces.clear();
    int64_t there = 0;
    for (int q = 0; q < L; ++q) {
      const int64_t n = heard_bytes(from, q);
      pieces.push_back({there, n, lies[static_cast<size_t>(q * N + from)]});
      there += n;
    }
    if (!call.levels->once) {
      swap(to * L + place, run.at, std::span(&run, 1), from * L + place, pieces, moved, task);
      continue;
    }
    const auto first = static_cast<size_t>(first_row[static_cast<size_t>(to)]), n = static_cast<size_t>(run.bytes / call.row_bytes);
    const std::span<int32_t> told = stage.told_list().stands.subspan(first, n);
    const RowStage::List heard = stage.heard_list(from, there / call.row_bytes);
    std::vector<Slice> telling{{bytes_of_list(told), std::ssize(told) * 4}};
    std::vector<Piece> hearing{{0, std::ssize(heard.stands) * 4, bytes_of_list(heard.stands)}};
    if (call.levels->weighed) {
      telling.push_back({bytes_of_list(stage.told_list().weights.subspan(first, n)), std::ssize(told) * 4});
      hearing.push_back({stage.to_weights(), std::ssize(heard.weights) * 4, bytes_of_list(heard.weights)});
    }
    swap(to * L + place, telling[0].at, telling, from * L + place, hearing, moved, task);
    std::vector<std::byte*> where;  // of each row that comes
    for (const Piece& piece : pieces)
      for (int64_t at = 0; at < piece.bytes; at += call.row_bytes) where.push_back(piece.to + at);
    pieces.clear();
    for (size_t i = 0; i < where.size(); ++i)
      if (heard.stands[i] < 0) pieces.push_back({~heard.stands[i] * call.row_bytes, call.row_bytes, where[i]});
    const std::byte* offered = call.levels->weighed ? static_cast<const std::byte*>(call.tokens) : run.at;
    swap(to * L + place, offered, rows_that_cross(offered, told, call.row_bytes), from * L + place, pieces, moved, task);
    for (size_t i = 0; i < where.size(); ++i)
      if (heard.stands[i] >= 0) copy_rows(where[i], where[static_cast<size_t>(heard.stands[i])], call.row_bytes);
    for (size_t i = 0; i < heard.weights.size(); ++i)
      weigh(kernels_, call.dtype, heard.weights[i], where[i], call.row_bytes * 8 / bits_of(call.dtype));
  }
  for (int k = 1; k < L; ++k) {
    const int to = (place + k) % L, from = (place - k + L) % L;
    Slice run{lies[static_cast<size_t>(to * N)], 0};
    for (int m = 0; m < N; ++m) run.bytes += heard_bytes(m, to);
    pieces.clear();
    for (int64_t m = 0, there = 0; m < N; ++m) {
      const RowRun& rows = from_rank(static_cast<int>(m), from);
      pieces.push_back({there, rows.bytes, row_at(call.target, rows.begin)});
      there += rows.bytes;
    }
    swap(node * L + to, run.at, std::span(&run, 1), node * L + from, pieces, moved, task);
  }
  return moved;
}

/// The way back: within the node to the rank of the tokens' place, then across. Staged are rows for other nodes, by node and then by
/// place, so that a message across is one run of bytes, which lies in one run at home too.
Moved SteppedCommunicator::return_rows_by_node(const CollectiveCall& call, Task& task) {
  const int N = call.levels->nodes, L = call.levels->per_node, node = index_ / L, place = index_ % L;
  const std::vector<RowRun> out = rows_sent(call, size(), task.rank()), in = rows_received(call, size(), task.rank());
  const auto to_rank = [&](int m, int l) -> const RowRun& { return out[static_cast<size_t>(m * L + l)]; };
  const auto from_rank = [&](int p, int q) -> const RowRun& { return in[static_cast<size_t>(p * L + q)]; };
  check_runs(in, task.rank());
  Moved moved;
  RowStage stage(call, task.rank());

  // told[l][m]: rows for (m, l), and the first of them. heard[q][m]: what (node, q) has for (m, place).
  for (int l = 0; l < L; ++l)
    for (int m = 0; m < N; ++m) {
      int32_t* pair = stage.told(2 * (l * N + m));
      pair[0] = static_cast<int32_t>(to_rank(m, l).bytes / call.row_bytes);
      pair[1] = static_cast<int32_t>(to_rank(m, l).begin / call.row_bytes);
    }
  copy_rows(count_bytes(stage.heard(2 * place * N)), count_bytes(stage.told(2 * place * N)), 8 * N);
  for (int k = 1; k < L; ++k) {
    const int to = (place + k) % L, from = (place - k + L) % L;
    const Slice told{count_bytes(stage.told(2 * to * N)), 8 * N};
    const Piece heard{0, 8 * N, count_bytes(stage.heard(2 * from * N))};
    swap(node * L + to, told.at, std::span(&told, 1), node * L + from, std::span(&heard, 1), moved, task);
  }
  const auto heard_bytes = [&](int q, int m) { return stage.heard(2 * (q * N + m))[0] * call.row_bytes; };
  const auto heard_begin = [&](int q, int m) { return stage.heard(2 * (q * N + m))[1] * call.row_bytes; };

  std::vector<std::byte*> lies(static_cast<size_t>(size()));  // by m and q: where rows of (node, q) for (m, place) come to lie
  for (int m = 0; m < N; ++m)
    for (int q = 0; q < L; ++q) {
      std::byte*& where = lies[static_cast<size_t>(m * L + q)];
      if (m != node) {
        where = stage.take(heard_bytes(q, m));
        continue;
      }
      const RowRun& mine = from_rank(node, q);
      SHARDLAB_CHECK(heard_bytes(q, m) == mine.bytes, "rank {} expects {} bytes of rows from rank {} of the group, which has {}",
                     task.rank(), mine.bytes, node * L + q, heard_bytes(q, m));
      where = row_at(call.target, mine.begin);
    }

  for (int m = 0; m < N; ++m)
    copy_rows(lies[static_cast<size_t>(m * L + place)], row_at(call.source, to_rank(m, place).begin), to_rank(m, place).bytes);
  std::vector<Slice> slices;
  std::vector<Piece> pieces;
  for (int k = 1; k < L; ++k) {
    const int to = (place + k) % L, from = (place - k + L) % L;
    slices.clear(), pieces.clear();
    for (int m = 0; m < N; ++m) {
      if (to_rank(m, to).bytes > 0) slices.push_back({row_at(call.source, to_rank(m, to).begin), to_rank(m, to).bytes});
      pieces.push_back({heard_begin(from, m), heard_bytes(from, m), lies[static_cast<size_t>(m * L + from)]});
    }
    swap(node * L + to, call.source, slices, node * L + from, pieces, moved, task);
  }
  for (int k = 1; k < N; ++k) {
    const int to = (node + k) % N, from = (node - k + N) % N;
    Slice run{lies[static_cast<size_t>(to * L)], 0};
    Piece rows{0, 0, row_at(call.target, from_rank(from, 0).begin)};
    for (int q = 0; q < L; ++q) {
      run.bytes += heard_bytes(q, to);
      rows.bytes += from_rank(from, q).bytes;
    }
    swap(to * L + place, run.at, std::span(&run, 1), from * L + place, std::span(&rows, 1), moved, task);
  }
  return moved;
}

/// The messages of an exchange of an even route, without the rows.
Moved SteppedCommunicator::rehearse_rows_by_node(const CollectiveCall& call, Task& task) {
  const RowLevels& levels = *call.levels;
  const int N = levels.nodes, L = levels.per_node, node = index_ / L, place = index_ % L;
  Moved moved;
  const auto meet = [&](int to, int from, int64_t bytes) {
    const Slice told{nullptr, bytes};
    const Piece heard{0, bytes, nullptr};
    swap(to, nullptr, std::span(&told, 1), from, std::span(&heard, 1), moved, task);
  };
  const auto across = [&] {
    for (int k = 1; k < N; ++k) {
      const int to = (node + k) % N * L + place, from = (node - k + N) % N * L + place;
      if (levels.goes) meet(to, from, levels.count_bytes() / (N - 1));
      if (levels.once) meet(to, from, levels.list_bytes(levels.rows / N));
      const int64_t rows = part_begin(levels.even_across, N - 1, k) - part_begin(levels.even_across, N - 1, k - 1);
      meet(to, from, rows * levels.row_bytes);
    }
  };
  const auto within = [&] {
    for (int k = 1; k < L; ++k) {
      const int to = node * L + (place + k) % L, from = node * L + (place - k + L) % L;
      if (!levels.goes) meet(to, from, levels.count_bytes() / (L - 1));
      meet(to, from, levels.rows / L * levels.row_bytes);
    }
  };
  if (levels.goes) across();
  within();
  if (!levels.goes) across();
  return moved;
}

}  // namespace shardlab::runtime
