// Quantised parts and their sums, selections, signs, low rank; and that nothing is lost: sent + error is what was to be sent.
#include <algorithm>
#include <numeric>

#include "kernels/compress.h"
#include "kernels/quantise.h"
#include "tests/kernels_lowp/packed.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using kernels::MixedKernels;

MixedKernels mixed() { return MixedKernels(kernels::kernels_for_this_processor()); }

/// Calls a free function of kernels/ as run_counted does.
template <class Args>
void run(void (*kernel)(const MixedKernels&, const Args&, kernels::Scratch&), const Args& args) {
  const MixedKernels k = mixed();
  run_counted([&](const Args& a, kernels::Scratch& s) { kernel(k, a, s); }, args);
}

}  // namespace

TEST_CASE("quantise: each block by its own scale, within half a scale, and no byte shared") {
  for (const DType t : {DType::f32, DType::bf16})
    for (const kernels::BlockShape& shape :
         {kernels::BlockShape{1, 1, 1, 8}, kernels::BlockShape{3, 1000, 7, 8}, kernels::BlockShape{2, 9000, 2, 8},
          kernels::BlockShape{3, 1001, 7, 4}, kernels::BlockShape{2, 9001, 2, 4}, kernels::BlockShape{1, 5, 4, 4}}) {
      Floats values = random_floats(shape.rows * shape.columns, 3);
      for (size_t i = 0; i < values.size(); ++i) values[i] *= static_cast<float>(1 + i / 100);
      if (shape.rows == 3) std::fill_n(values.begin() + shape.columns, shape.block(), 0.0f);  // a block of zeros
      Packed x(t, values), y(DType::f32, shape.rows * shape.columns);
      const Floats xs = x.values();
      std::vector<uint8_t> q(static_cast<size_t>(shape.rows * shape.row_bytes()), 0xff);
      Floats scales = poisoned(shape.rows * shape.blocks);
      run<kernels::BlockQuantise>(kernels::block_quantise, {shape, x.stored(), q.data(), scales.data()});
      run<kernels::BlockDequantise>(kernels::block_dequantise, {shape, q.data(), scales.data(), y.stored()});
      const Floats ys = y.values();
      const float most = shape.bits == 8 ? 127.0f : 7.0f;
      for (int64_t r = 0; r < shape.rows; ++r)
        for (int64_t b = 0; b < shape.blocks; ++b) {
          const int64_t begin = r * shape.columns + std::min(shape.columns, b * shape.block());
          const int64_t end = r * shape.columns + std::min(shape.columns, (b + 1) * shape.block());
          float amax = 0;
          for (int64_t i = begin; i < end; ++i) amax = std::max(amax, std::abs(xs[static_cast<size_t>(i)]));
          const float scale = scales[static_cast<size_t>(r * shape.blocks + b)];
          REQUIRE(scale == amax / most);
          for (int64_t i = begin; i < end; ++i) {
            const float v = xs[static_cast<size_t>(i)];
            const float want = scale == 0 ? 0.0f : std::clamp(std::nearbyint(v / scale), -most, most) * scale;
            if (ys[static_cast<size_t>(i)] != want)
              FAIL("element " << i << " is " << ys[static_cast<size_t>(i)] << " not " << want);
            REQUIRE(std::abs(want - v) <= scale * 0.5001f);
          }
        }
      // The sum over rows is the tree over the dequantised rows.
      Packed sum(DType::bf16, shape.columns);
      run<kernels::BlockDequantiseSum>(kernels::block_dequantise_sum, {shape, q.data(), scales.data(), sum.stored()});
      std::vector<Floats> parts;
      for (int64_t r = 0; r < shape.rows; ++r) parts.push_back(part_of(ys, r * shape.columns, (r + 1) * shape.columns));
      REQUIRE(bit_difference(sum.values(), sum.rounded(tree_of(parts))) == "");
    }
}

TEST_CASE("quantise: a block with an infinity or NaN dequantises to NaN, its neighbours do not") {
  for (const int bits : {8, 4})
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      const kernels::BlockShape shape{1, 12, 3, bits};
      Packed x(DType::f32, Floats{1, 2, 3, 4, 5, bad, 7, 8, 9, 10, 11, 12}), y(DType::f32, 12);
      std::vector<uint8_t> q(12);
      Floats scales = poisoned(3);
      run<kernels::BlockQuantise>(kernels::block_quantise, {shape, x.stored(), q.data(), scales.data()});
      run<kernels::BlockDequantise>(kernels::block_dequantise, {shape, q.data(), scales.data(), y.stored()});
      const Floats ys = y.values();
      for (size_t i = 0; i < 12; ++i) REQUIRE(std::isnan(ys[i]) == (i / 4 == 1));
    }
}

TEST_CASE("sum_rows: the canonical tree in fp32 over bf16 parts, rounded once") {
  for (const int64_t rows : {1, 2, 3, 8, 9}) {
    const int64_t columns = 5003;
    Packed x = random_packed(DType::bf16, rows * columns, 1), y(DType::bf16, columns), z(DType::f32, columns);
    std::vector<Floats> parts;
    for (int64_t r = 0; r < rows; ++r) parts.push_back(part_of(x.values(), r * columns, (r + 1) * columns));
    run<kernels::SumRows>(kernels::sum_rows, {x.stored(), y.stored(), rows, columns});
    run<kernels::SumRows>(kernels::sum_rows, {x.stored(), z.stored(), rows, columns});
    REQUIRE(bit_difference(y.values(), y.rounded(tree_of(parts))) == "");
    REQUIRE(bit_difference(z.values(), tree_of(parts)) == "");
  }
}

TEST_CASE("top_k: the largest by size, ties to the smaller index, in index order") {
  for (const DType t : {DType::f32, DType::bf16})
    for (const int64_t n : {1, 100, 9000})
      for (const int64_t k : {int64_t{0}, int64_t{1}, n / 3, n - 1, n}) {
        Packed x = random_packed(t, n, 5);  // in bf16 with many ties
        const Floats xs = x.values();
        std::vector<int32_t> order(xs.size());
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
          return std::abs(xs[static_cast<size_t>(a)]) > std::abs(xs[static_cast<size_t>(b)]);
        });
        order.resize(static_cast<size_t>(k));
        std::ranges::sort(order);
        std::vector<int32_t> indices(static_cast<size_t>(k), -1);
        Floats values = poisoned(k);
        run<kernels::TopK>(kernels::top_k, {x.stored(), n, k, values.data(), indices.data()});
        REQUIRE(indices == order);
        for (size_t i = 0; i < order.size(); ++i) REQUIRE(values[i] == xs[static_cast<size_t>(order[i])]);

        // Sent + error is the whole, bit for bit; everything sent leaves no error.
        Floats error = xs, sent = poisoned(n);
        Packed dense(DType::f32, n);
        run<kernels::Scatter>(kernels::scatter, {1, k, n, values.data(), indices.data(), dense.stored()});
        kernels::zero_selected({error.data(), k, indices.data()});
        const Floats scattered = dense.values();
        for (size_t i = 0; i < xs.size(); ++i) {
          REQUIRE(scattered[i] + error[i] == xs[i]);
          REQUIRE((scattered[i] == 0 || error[i] == 0));
        }
        if (k == n) REQUIRE(bit_difference(scattered, xs) == "");
      }
  Packed bad(DType::f32, Floats{5, 1, NAN, -INFINITY, 7});
  std::vector<int32_t> indices(2);
  Floats values(2);
  run<kernels::TopK>(kernels::top_k, {bad.stored(), 5, 2, values.data(), indices.data()});
  REQUIRE(indices == std::vector<int32_t>{2, 3});
}

TEST_CASE("random_k: the k smallest random words, the same for whoever has the key") {
  const int64_t n = 9000, k = 1234;
  Packed x = random_packed(DType::bf16, n, 6);
  const Floats xs = x.values();
  const RandomKey key{.seed = 4, .use = RandomUse::kShuffle, .tensor = 9, .step = 2};
  std::vector<int32_t> indices(static_cast<size_t>(k), -1), order(xs.size());
  Floats values = poisoned(k);
  run<kernels::RandomK>(
      kernels::random_k,
      {.x = x.stored(), .n = n, .k = k, .key = key, .element = 70, .values = values.data(), .indices = indices.data()});
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t i) { return random_bits(key, static_cast<uint64_t>(70 + i)); });
  order.resize(static_cast<size_t>(k));
  std::ranges::sort(order);
  REQUIRE(indices == order);
  for (size_t i = 0; i < order.size(); ++i) REQUIRE(values[i] == xs[static_cast<size_t>(order[i])]);
  std::vector<int32_t> other(static_cast<size_t>(k));
  RandomKey next = key;
  next.step = 3;
  run<kernels::RandomK>(
      kernels::random_k,
      {.x = x.stored(), .n = n, .k = k, .key = next, .element = 70, .values = values.data(), .indices = other.data()});
  REQUIRE(other != indices);
}

TEST_CASE("scatter: parts that selected differently add up in a tree") {
  const int64_t n = 9001, k = 700;
  for (const int64_t parts : {1, 2, 3, 5}) {
    Floats values;
    std::vector<int32_t> indices;
    std::vector<Floats> dense;
    for (int64_t p = 0; p < parts; ++p) {
      std::vector<int32_t> all(static_cast<size_t>(n));
      std::iota(all.begin(), all.end(), 0);
      std::ranges::stable_sort(
          all, {}, [&](int32_t i) { return random_bits({.seed = static_cast<uint64_t>(p)}, static_cast<uint64_t>(i)); });
      all.resize(static_cast<size_t>(k));
      std::ranges::sort(all);
      const Floats v = random_floats(k, static_cast<uint32_t>(20 + p));
      dense.emplace_back(static_cast<size_t>(n), 0.0f);
      for (size_t i = 0; i < all.size(); ++i) dense.back()[static_cast<size_t>(all[i])] = v[i];
      values.insert(values.end(), v.begin(), v.end());
      indices.insert(indices.end(), all.begin(), all.end());
    }
    Packed y(DType::bf16, n);
    run<kernels::Scatter>(kernels::scatter, {parts, k, n, values.data(), indices.data(), y.stored()});
    REQUIRE(bit_difference(y.values(), y.rounded(tree_of(dense))) == "");
  }
}

TEST_CASE("signs: the mean size with the signs, and the error conserves the sum") {
  for (const kernels::SignShape& shape :
       {kernels::SignShape{1, 1, 1}, kernels::SignShape{3, 1001, 4}, kernels::SignShape{2, 9003, 1}}) {
    const int64_t n = shape.rows * shape.columns;
    Packed x = random_packed(DType::f32, n, 8), y(DType::f32, n), error(DType::f32, n);
    const Floats xs = x.values();
    std::vector<uint8_t> signs(static_cast<size_t>(shape.rows * shape.row_bytes()), 0xff);
    Floats scales = poisoned(shape.rows * shape.blocks);
    run<kernels::SignCompress>(kernels::sign_compress, {shape, x.stored(), signs.data(), scales.data()});
    run<kernels::SignExpand>(kernels::sign_expand, {shape, signs.data(), scales.data(), y.stored()});
    run<kernels::SubtractShare>(kernels::subtract_share, {x.stored(), y.stored(), error.stored(), n, 1.0f});
    const Floats ys = y.values(), errors = error.values();
    for (int64_t r = 0; r < shape.rows; ++r)
      for (int64_t b = 0; b < shape.blocks; ++b) {
        const int64_t begin = r * shape.columns + std::min(shape.columns, b * shape.block());
        const int64_t end = r * shape.columns + std::min(shape.columns, (b + 1) * shape.block());
        double mean = 0;
        for (int64_t i = begin; i < end; ++i) mean += std::abs(double{xs[static_cast<size_t>(i)]});
        mean /= static_cast<double>(end - begin);
        const float scale = scales[static_cast<size_t>(r * shape.blocks + b)];
        REQUIRE(std::abs(scale - mean) <= 1e-7 * mean);
        for (int64_t i = begin; i < end; ++i) {
          const auto e = static_cast<size_t>(i);
          REQUIRE(ys[e] == std::copysign(scale, xs[e]));
          REQUIRE(errors[e] == xs[e] - ys[e]);
        }
      }
  }
}

namespace {

/// Largest deviation of q^T q from the identity, over its first `rank` columns.
double orthogonality(const Floats& q, int64_t rows, int64_t columns, int64_t rank) {
  double worst = 0;
  for (int64_t a = 0; a < rank; ++a)
    for (int64_t b = 0; b <= a; ++b) {
      double dot = 0;
      for (int64_t r = 0; r < rows; ++r)
        dot += double{q[static_cast<size_t>(r * columns + a)]} * double{q[static_cast<size_t>(r * columns + b)]};
      worst = std::max(worst, std::abs(dot - (a == b ? 1.0 : 0.0)));
    }
  return worst;
}

Floats orthogonal(const Floats& p, int64_t rows, int64_t columns) {
  Floats q = poisoned(rows * columns);
  run_counted([](const kernels::Orthogonalise& a, kernels::Scratch& s) { orthogonalise(a, s); },
              kernels::Orthogonalise{rows, columns, p.data(), q.data()});
  return q;
}

}  // namespace

TEST_CASE("orthogonalise: an orthonormal basis, also of columns that depend on one another") {
  const int64_t rows = 40, columns = 6;
  Floats p = random_floats(rows * columns, 1);
  REQUIRE(orthogonality(orthogonal(p, rows, columns), rows, columns, columns) < 1e-6);
  // Nearly parallel columns, of very different sizes.
  for (int64_t r = 0; r < rows; ++r)
    p[static_cast<size_t>(r * columns + 3)] = 1e4f * p[static_cast<size_t>(r * columns)] * (1 + 1e-4f * static_cast<float>(r % 3));
  REQUIRE(orthogonality(orthogonal(p, rows, columns), rows, columns, columns) < 1e-6);
  // A repeated column, and one of zeros: replaced by directions that the others do not span.
  for (int64_t r = 0; r < rows; ++r) {
    p[static_cast<size_t>(r * columns + 2)] = p[static_cast<size_t>(r * columns + 1)];
    p[static_cast<size_t>(r * columns + 4)] = 0;
  }
  const Floats q = orthogonal(p, rows, columns);
  REQUIRE(orthogonality(q, rows, columns, columns) < 1e-6);
  // The first column only changes its length.
  double norm = 0;
  for (int64_t r = 0; r < rows; ++r)
    norm += double{p[static_cast<size_t>(r * columns)]} * double{p[static_cast<size_t>(r * columns)]};
  for (int64_t r = 0; r < rows; ++r)
    REQUIRE(std::abs(q[static_cast<size_t>(r * columns)] - p[static_cast<size_t>(r * columns)] / std::sqrt(norm)) < 1e-7);
  // More columns than rows: the others are 0.
  const Floats wide_q = orthogonal(random_floats(3 * 5, 2), 3, 5);
  REQUIRE(orthogonality(wide_q, 3, 5, 3) < 1e-6);
  for (int64_t r = 0; r < 3; ++r)
    REQUIRE((wide_q[static_cast<size_t>(r * 5 + 3)] == 0 && wide_q[static_cast<size_t>(r * 5 + 4)] == 0));
}

TEST_CASE("PowerSGD: full rank loses nothing, less rank leaves an error that conserves the sum") {
  const int64_t rows = 8, columns = 12;
  const kernels::Kernels& fp32 = kernels::kernels_for_this_processor();
  for (const int64_t rank : {int64_t{2}, rows}) {
    const Floats m = random_floats(rows * columns, 1), basis = random_floats(rank * columns, 2);
    Floats p = poisoned(rows * rank), q = poisoned(rank * columns), whole = poisoned(rows * columns);
    const auto linear = [&](auto args, auto kernel) {
      args.canonical = true;
      Scratch scratch(kernels::linear_scratch_bytes(args));
      args.scratch = scratch.data();
      kernel(args);
    };
    linear(kernels::LinearForward{.x = m.data(), .w = basis.data(), .y = p.data(), .rows = rows, .in = columns, .out = rank},
           fp32.linear_forward);
    const Floats p_hat = orthogonal(p, rows, rank);
    linear(
        kernels::LinearWeight{
            .x = m.data(), .dy = p_hat.data(), .dw = q.data(), .tokens = {1, rows, {}}, .in = columns, .out = rank},
        fp32.linear_weight);
    linear(kernels::LinearInput{.dy = p_hat.data(), .w = q.data(), .dx = whole.data(), .rows = rows, .in = columns, .out = rank},
           fp32.linear_input);
    Packed ms(DType::f32, m), approximation(DType::f32, whole), error(DType::f32, rows * columns);
    run<kernels::SubtractShare>(kernels::subtract_share,
                                {ms.stored(), approximation.stored(), error.stored(), rows * columns, 1.0f});
    double lost = 0, size = 0;
    const Floats errors = error.values();
    for (size_t i = 0; i < m.size(); ++i) {
      lost += double{errors[i]} * double{errors[i]};
      size += double{m[i]} * double{m[i]};
      REQUIRE(std::abs(double{errors[i]} + double{whole[i]} - double{m[i]}) <= 1.2e-7);
    }
    if (rank == rows)
      REQUIRE(std::sqrt(lost / size) < 1e-6);
    else
      REQUIRE(std::sqrt(lost / size) > 0.1);
  }
}

}  // namespace shardlab::testing
