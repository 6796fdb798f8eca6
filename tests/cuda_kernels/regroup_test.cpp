// Rows cut in parts and put together again: the bits of kernels/regroup.h, which is held to a loop that says the same.
#include "kernels/kernels.h"
#include "kernels/regroup.h"
#include "plan/base/tree.h"
#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_regroup {
namespace {

struct Cut {
  int64_t sequences, tokens, parts, width;
  int copies = 1;
  int64_t head_dim = 0;

  int64_t shared() const { return copies == 1 ? 0 : 2 * head_dim; }
  int64_t own() const { return width - shared(); }
  int64_t row() const { return parts / copies * (copies * own() + shared()); }
};
const Cut kCuts[] = {{1, 5, 4, 3}, {3, 4, 2, 6}, {2, 3, 1, 8}, {2, 3, 4, 6, 2, 2}, {1, 2, 8, 12, 4, 4}, {2, 2, 6, 9, 3, 3}};

/// Element c of part p of a row: where it stands in the row.
int64_t in_row(const Cut& cut, int64_t p, int64_t c) {
  const int64_t group = p / cut.copies * (cut.copies * cut.own() + cut.shared());
  return c < cut.own() ? group + p % cut.copies * cut.own() + c : group + cut.copies * cut.own() + c - cut.own();
}

template <class Visit>
void for_elements(const Cut& cut, const Visit& visit) {
  for (int64_t p = 0; p < cut.parts; ++p)
    for (int64_t t = 0; t < cut.tokens; ++t)
      for (int64_t b = 0; b < cut.sequences; ++b)
        for (int64_t c = 0; c < cut.width; ++c)
          visit(static_cast<size_t>((b * cut.tokens + t) * cut.row() + in_row(cut, p, c)),
                static_cast<size_t>(((p * cut.tokens + t) * cut.sequences + b) * cut.width + c));
}

Floats split(const Cut& cut, const Floats& x) {
  Floats y(static_cast<size_t>(cut.parts * cut.tokens * cut.sequences * cut.width));
  for_elements(cut, [&](size_t from, size_t to) { y[to] = x[from]; });
  return y;
}

Floats joined(const Cut& cut, const Floats& y) {
  std::vector<Floats> terms(static_cast<size_t>(cut.sequences * cut.tokens * cut.row()));
  for_elements(cut, [&](size_t to, size_t from) { terms[to].push_back(y[from]); });
  Floats x;
  for (const Floats& t : terms)
    x.push_back(tree_sum(
        0, static_cast<int64_t>(t.size()), [&](int64_t i) { return t[static_cast<size_t>(i)]; },
        [](float a, float b) { return a + b; }));
  return x;
}

}  // namespace

TEST_CASE("regroup: parts of rows, copies of kv heads and their sums, on processors and GPUs") {
  const auto& storage = kernels::storage_kernels(kernels::kernels_for_this_processor());
  for (const DType t : kActivationTypes)
    for (const Cut& cut : kCuts)
      for (const bool join : {false, true}) {
        INFO(name_of(t) << " parts " << cut.parts << " copies " << cut.copies << " join " << join);
        const int64_t rows = cut.sequences * cut.tokens * cut.row(), parts = cut.parts * cut.tokens * cut.sequences * cut.width;
        const Floats from = as_stored(random_floats(join ? parts : rows, 1), t);
        const Floats want = as_stored(join ? joined(cut, from) : split(cut, from), t);
        const Floats have = in_both_orders([&] {
          const Array in(from, t), out(Array::poison(join ? rows : parts), t);
          table().regroup({in.in(), out.out(), cut.sequences, cut.tokens, cut.parts, cut.width, join, cut.copies, cut.head_dim},
                          stream());
          return out.read();
        });
        CHECK(have == want);
        if (t != DType::f32) continue;
        Floats to = poisoned(join ? rows : parts);
        kernels::regroup(storage, {from.data(), to.data(), t, cut.sequences, cut.tokens, cut.parts, cut.width, join, cut.copies,
                                   cut.parts / cut.copies, cut.head_dim});
        CHECK(to == want);
      }
}

}  // namespace shardlab::testing::of_regroup
