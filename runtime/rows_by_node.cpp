// Packed rows that go by node (plan/row_levels.h). Names are those of that file: this rank is (node, place), N nodes have L ranks each.
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "plan/base/check.h"
#include "runtime/packed_rows.h"
#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

namespace {

/// The staging of one call: counts that are told and heard, then rows.
class RowStage {
 public:
  RowStage(const CollectiveCall& call, int rank)
      : counts_(reinterpret_cast<int32_t*>(call.stage.data())),
        heard_(2 * static_cast<int64_t>(call.levels->nodes) * call.levels->per_node),
        rows_(call.stage.data() + call.levels->head_bytes()),
        room_(std::ssize(call.stage) - call.levels->head_bytes()),
        rank_(rank) {}

  int32_t* told(int64_t at) const { return counts_ + at; }
  int32_t* heard(int64_t at) const { return counts_ + heard_ + at; }
  /// The next `bytes` bytes for rows.
  std::byte* take(int64_t bytes) {
    SHARDLAB_CHECK(taken_ + bytes <= room_, "rank {} passes on {} bytes of rows and has room for {}", rank_, taken_ + bytes, room_);
    return rows_ + std::exchange(taken_, taken_ + bytes);
  }

 private:
  int32_t* counts_;
  int64_t heard_;
  std::byte* rows_;
  int64_t room_, taken_ = 0;
  int rank_;
};

const std::byte* row_at(const void* base, int64_t offset) { return static_cast<const std::byte*>(base) + offset; }
std::byte* row_at(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
std::byte* count_bytes(int32_t* counts) { return reinterpret_cast<std::byte*>(counts); }

/// At home rows of one peer lie behind those of another, and none on top of others: rows for, and from, a node are one run.
void check_runs(const std::vector<RowRun>& home, int rank) {
  int64_t end = 0;
  for (const RowRun& rows : home) {
    SHARDLAB_CHECK(rows.begin == end, "rank {} has more rows than room at home: some begin at byte {} and not at {}", rank,
                   rows.begin, end);
    end += rows.bytes;
  }
}

void copy_rows(std::byte* to, const std::byte* from, int64_t n) {
  if (n > 0) std::memcpy(to, from, static_cast<size_t>(n));
}

}  // namespace

/// Across nodes to the rank of the own place, then within the node. Staged are rows for other places, by place and then by node, so
/// that a message within the node is one run of bytes. Rows for this rank go straight to the target.
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
  std::vector<Piece> pieces;
  for (int k = 1; k < N; ++k) {
    const int to = (node + k) % N, from = (node - k + N) % N;
    Slice run{row_at(call.source, to_rank(to, 0).begin), 0};
    for (int q = 0; q < L; ++q) run.bytes += to_rank(to, q).bytes;
    pieces.clear();
    for (int64_t q = 0, there = 0; q < L; ++q) {
      const int64_t n = heard_bytes(from, static_cast<int>(q));
      pieces.push_back({there, n, lies[static_cast<size_t>(q * N + from)]});
      there += n;
    }
    swap(to * L + place, run.at, std::span(&run, 1), from * L + place, pieces, moved, task);
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

/// The messages of counts alone: a rehearsal moves the rows of an even route by the steps of the algorithm.
Moved SteppedCommunicator::rehearse_counts(const CollectiveCall& call, Task& task) {
  const int N = call.levels->nodes, L = call.levels->per_node, node = index_ / L, place = index_ % L;
  const int64_t n = call.levels->goes ? 4 * L : 8 * N;
  Moved moved;
  const auto meet = [&](int to, int from) {
    const Slice told{nullptr, n};
    const Piece heard{0, n, nullptr};
    swap(to, nullptr, std::span(&told, 1), from, std::span(&heard, 1), moved, task);
  };
  if (call.levels->goes)
    for (int k = 1; k < N; ++k) meet((node + k) % N * L + place, (node - k + N) % N * L + place);
  else
    for (int k = 1; k < L; ++k) meet(node * L + (place + k) % L, node * L + (place - k + L) % L);
  return moved;
}

}  // namespace shardlab::runtime
