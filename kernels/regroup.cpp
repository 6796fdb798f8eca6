#include "kernels/regroup.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "plan/base/check.h"
#include "plan/base/tree.h"

namespace shardlab::kernels {
namespace {

constexpr int64_t kBlock = 64;  // elements that are added at a time
constexpr int kMostCopies = 16;

/// Where the parts of one row lie.
class Rows {
 public:
  explicit Rows(const Regroup& a)
      : a_(a),
        bytes_(bytes_of(a.dtype, 1)),
        shared_(a.copies == 1 ? 0 : 2 * a.head_dim),
        own_(a.width - shared_),
        group_(a.copies * own_ + shared_),
        row_(a.parts / a.copies * group_) {}

  /// The elements of part p that are its own, in x and y, and how many they are.
  int64_t own() const { return own_; }
  int64_t own_in_row(int64_t p) const { return p / a_.copies * group_ + p % a_.copies * own_; }
  /// Those that all parts of a group have: a key and a value.
  int64_t shared() const { return shared_; }
  int64_t shared_in_row(int64_t group) const { return group * group_ + a_.copies * own_; }
  int64_t row(int64_t sequence, int64_t token) const { return (sequence * a_.tokens + token) * row_; }
  int64_t part(int64_t p, int64_t sequence, int64_t token) const {
    return ((p * a_.tokens + token) * a_.sequences + sequence) * a_.width;
  }
  void copy(int64_t from, int64_t to, int64_t n) const {
    std::memcpy(static_cast<char*>(a_.to) + to * bytes_, static_cast<const char*>(a_.from) + from * bytes_,
                static_cast<size_t>(n * bytes_));
  }
  const void* from(int64_t element) const { return static_cast<const char*>(a_.from) + element * bytes_; }
  void* to(int64_t element) const { return static_cast<char*>(a_.to) + element * bytes_; }

 private:
  const Regroup& a_;
  const int64_t bytes_, shared_, own_, group_, row_;
};

/// Adds the copies of a group's key and value.
void add_copies(const StorageKernels& storage, const Regroup& a, const Rows& rows, int64_t group, int64_t b, int64_t t) {
  std::array<std::array<float, kBlock>, kMostCopies> copies;
  std::array<float, kBlock> sums;
  for (int64_t first = 0; first < rows.shared(); first += kBlock) {
    const int64_t n = std::min(kBlock, rows.shared() - first);
    for (int c = 0; c < a.copies; ++c)
      storage.widen({rows.from(rows.part(group * a.copies + c, b, t) + rows.own() + first), a.dtype, n,
                     copies[static_cast<size_t>(c)].data()});
    for (int64_t i = 0; i < n; ++i)
      sums[static_cast<size_t>(i)] = tree_sum(
          0, a.copies, [&](int64_t c) { return copies[static_cast<size_t>(c)][static_cast<size_t>(i)]; },
          [](float x, float y) { return x + y; });
    storage.narrow({sums.data(), n, a.dtype, rows.to(rows.row(b, t) + rows.shared_in_row(group) + first)});
  }
}

}  // namespace

void regroup(const StorageKernels& storage, const Regroup& a) {
  SHARDLAB_CHECK(a.copies >= 1 && a.copies <= kMostCopies && a.parts % a.copies == 0, "{} parts of {} copies each", a.parts,
                 a.copies);
  const Rows rows(a);
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t row = rows.row(b, t);
      for (int64_t p = 0; p < a.parts; ++p) {
        const int64_t part = rows.part(p, b, t), own = row + rows.own_in_row(p);
        if (a.join)
          rows.copy(part, own, rows.own());
        else
          rows.copy(own, part, rows.own());
        if (a.copies > 1 && !a.join) rows.copy(row + rows.shared_in_row(p / a.copies), part + rows.own(), rows.shared());
      }
      for (int64_t group = 0; a.copies > 1 && a.join && group < a.parts / a.copies; ++group)
        add_copies(storage, a, rows, group, b, t);
    }
}

}  // namespace shardlab::kernels
