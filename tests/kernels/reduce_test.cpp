#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_reduce {

TEST_CASE("reduce: add, maximum and fill, in place or not") {
  for (const int64_t n : {1, 3, 16, 17, 100}) {
    const Floats a = random_floats(n, 1), b = random_floats(n, 2);
    Floats sum, most;
    for (int64_t i = 0; i < n; ++i) {
      sum.push_back(a[i] + b[i]);
      most.push_back(std::max(a[i], b[i]));
    }
    for (const kernels::Kernels* k : variants_here()) {
      Floats c = a, d = b, e = poisoned(n), f = poisoned(n);
      k->add({.a = c.data(), .b = b.data(), .c = c.data(), .n = n});
      k->add({.a = a.data(), .b = d.data(), .c = d.data(), .n = n});
      k->maximum({.a = a.data(), .b = b.data(), .c = e.data(), .n = n});
      k->fill(f.data(), n, -2.5f);
      REQUIRE(bit_difference(c, sum) == "");
      REQUIRE(bit_difference(d, sum) == "");
      REQUIRE(bit_difference(e, most) == "");
      REQUIRE(bit_difference(f, Floats(static_cast<size_t>(n), -2.5f)) == "");
    }
  }
}

TEST_CASE("reduce: tree_combine is the canonical tree, also into one of its parts") {
  for (const int count : {1, 2, 3, 4, 7, 8}) {
    const int64_t n = 37;
    std::vector<Floats> parts;
    for (int p = 0; p < count; ++p) parts.push_back(random_floats(n, static_cast<uint32_t>(p)));
    const Floats want = tree_of(parts);
    for (const kernels::Kernels* k : variants_here()) {
      std::vector<Floats> own = parts;
      std::vector<const float*> pointers;
      for (const Floats& p : own) pointers.push_back(p.data());
      Floats out = poisoned(n);
      k->tree_combine({.parts = pointers.data(), .count = count, .out = out.data(), .n = n});
      REQUIRE(bit_difference(out, want) == "");
      k->tree_combine({.parts = pointers.data(), .count = count, .out = own.back().data(), .n = n});
      REQUIRE(bit_difference(own.back(), want) == "");
    }
  }
}

TEST_CASE("reduce: sum_scalars is a tree over all elements in order, times the factor") {
  const Floats a = random_floats(5, 1), b = random_floats(1, 2), c = random_floats(6, 3);
  const float* parts[] = {a.data(), b.data(), c.data()};
  const int64_t sizes[] = {5, 1, 6};
  const Floats want{tree_of(joined({a, b, c})) * static_cast<float>(3.0 / 7.0)};
  REQUIRE(
      bit_difference(on_every_variant([&](const kernels::Kernels& k) {
                       Floats total = poisoned(1);
                       k.sum_scalars(
                           {.parts = parts, .sizes = sizes, .count = 3, .factor_num = 3, .factor_den = 7, .total = total.data()});
                       return total;
                     }),
                     want) == "");
  Floats none = poisoned(1);
  kernels::kernels_for_this_processor().sum_scalars({.total = none.data()});
  REQUIRE(none[0] == 0);
}

TEST_CASE("reduce: squared_norm in fp64, equal on every variant") {
  for (const int64_t n : {1, 3, 16, 17, 1000}) {
    const Floats x = random_floats(n, 4);
    double want = 0;
    for (const float v : x) want += double{v} * v;
    const double first = kernels::kernels_for_this_processor().squared_norm(x.data(), n);
    REQUIRE(std::abs(first - want) < 1e-13 * want);
    for (const kernels::Kernels* k : variants_here()) REQUIRE(k->squared_norm(x.data(), n) == first);
  }
}

}  // namespace shardlab::testing::of_reduce
