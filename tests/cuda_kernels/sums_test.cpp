// Bias gradients, scalar totals, squared norms, sums over ranks, optimizers.
#include "plan/base/moment_codes.h"
#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_sums {
namespace {

struct Shape {
  int64_t sequences, tokens, width;
  int shift = 0;
};

Floats bias_gradient(const Floats& dy, const Shape& s, DType t, DType result, const Floats* old = nullptr, gpu::Part part = {}) {
  const Array d(dy, t, s.shift), to(old != nullptr ? *old : Array::poison(s.width), result);
  gpu::BiasWeight a{
      .dy = d.in(), .dbias = to.out(), .tokens = {s.sequences, s.tokens, part}, .width = s.width, .accumulate = old != nullptr};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  table().bias_weight(a, stream());
  return to.read();
}

}  // namespace

TEST_CASE("bias: W equals fp64 in every type and alignment") {
  for (const DType t : kActivationTypes)
    for (const Shape& s : {Shape{1, 1, 1}, {1, 5, 3}, {3, 40, 264}, {2, 200, 17}, {1, 33, 40, 1}}) {
      INFO(name_of(t) << " sequences " << s.sequences << " tokens " << s.tokens << " width " << s.width);
      const Floats dy = as_stored(random_floats(s.sequences * s.tokens * s.width, 1), t);
      Doubles want(static_cast<size_t>(s.width));
      for (size_t i = 0; i < dy.size(); ++i) want[i % want.size()] += dy[i];
      REQUIRE(difference(in_both_orders([&] { return bias_gradient(dy, s, t, DType::f32); }), want, kTolerance) == "");
      REQUIRE(difference(in_both_orders([&] { return bias_gradient(dy, s, t, t); }), want, tolerance(t)) == "");
    }
}

TEST_CASE("bias: the sum of parts of sequences, joined by the tree, has the bits of the whole") {
  const Shape whole{1, 64, 24};
  const Floats dy = random_floats(whole.tokens * whole.width, 1);
  std::vector<Floats> parts;
  for (int64_t rank = 0; rank < 4; ++rank)
    parts.push_back(bias_gradient(part_of(dy, rank * 16 * whole.width, (rank + 1) * 16 * whole.width), {1, 16, whole.width},
                                  DType::f32, DType::f32, nullptr, {16 * rank, 64}));
  REQUIRE(bit_difference(bias_gradient(dy, whole, DType::f32, DType::f32), tree_of(parts)) == "");
}

TEST_CASE("bias: a batch of more sequences than a block sums at once is the tree over them") {
  for (const int64_t sequences : {8, 9, 21, 70}) {
    INFO(sequences << " sequences");
    const Shape whole{sequences, 18, 40};
    const Floats dy = random_floats(sequences * whole.tokens * whole.width, 3);
    std::vector<Floats> each;
    for (int64_t b = 0; b < sequences; ++b)
      each.push_back(bias_gradient(part_of(dy, b * whole.tokens * whole.width, (b + 1) * whole.tokens * whole.width),
                                   {1, whole.tokens, whole.width}, DType::f32, DType::f32));
    REQUIRE(bit_difference(in_both_orders([&] { return bias_gradient(dy, whole, DType::f32, DType::f32); }), tree_of(each)) == "");
  }
}

TEST_CASE("bias: W accumulates as old + new") {
  const Shape s{2, 9, 30};
  const Floats dy = random_floats(s.sequences * s.tokens * s.width, 1), old = random_floats(s.width, 2);
  Floats want = bias_gradient(dy, s, DType::f32, DType::f32);
  for (size_t i = 0; i < want.size(); ++i) want[i] = old[i] + want[i];
  REQUIRE(bit_difference(bias_gradient(dy, s, DType::f32, DType::f32, &old), want) == "");
}

TEST_CASE("sum_scalars: the tree over all elements in order, the CPU's bits") {
  // More arrays than one launch collects, and more elements than the block fetches at once.
  for (const int count : {0, 1, 3, 70}) {
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<Floats> values;
    std::vector<const void*> there;
    std::vector<const float*> here;
    std::vector<int64_t> sizes;
    for (int p = 0; p < count; ++p) {
      values.push_back(random_floats(p % 3 == 2 ? 300 : 1 + p % 5, static_cast<uint32_t>(p)));
      arrays.push_back(std::make_unique<Array>(values.back(), DType::f32));
      there.push_back(arrays.back()->data());
      sizes.push_back(static_cast<int64_t>(values.back().size()));
    }
    for (const Floats& v : values) here.push_back(v.data());
    float want = NAN;
    kernels::kernels_for_this_processor().sum_scalars({here.data(), sizes.data(), count, 3, 7, &want});
    const Floats got = in_both_orders([&] {
      const Array total(Array::poison(1), DType::f32);
      gpu::SumScalars a{{there.data(), sizes.data(), count}, 3, 7, total.floats(), {}};
      const Lent scratch(gpu::scratch_bytes(a));
      a.scratch = scratch;
      table().sum_scalars(a, stream());
      return total.read();
    });
    REQUIRE(bit_difference(got, {want}) == "");
  }
}

TEST_CASE("squared_norm: fp64 over all parts") {
  for (const DType t : kActivationTypes) {
    const Floats x = as_stored(random_floats(20000, 1), t), y = as_stored(random_floats(37, 2), t), none;
    double want = 0;
    for (const Floats& part : {x, y})
      for (const float v : part) want += static_cast<double>(v) * static_cast<double>(v);
    const Array a(x, t), b(y, t, 1);
    const void* parts[] = {a.data(), b.data(), a.data()};
    const int64_t sizes[] = {20000, 37, 0};
    for (const bool reversed : {false, true}) {
      device().reverse(reversed);
      const Numbers<double> total({NAN});
      gpu::SquaredNorm n{{parts, sizes, 3}, t, total.data(), {}};
      const Lent scratch(gpu::scratch_bytes(n));
      n.scratch = scratch;
      table().squared_norm(n, stream());
      REQUIRE(std::abs(total.read()[0] - want) < 1e-12 * want);
    }
    device().reverse(false);
  }
}

TEST_CASE("combine: the tree over ranks, the CPU's bits; every result gets it, in place of parts too") {
  for (const int ranks : {1, 2, 3, 8, 64})
    for (const Shape& s : {Shape{1, 1, 1037}, {1, 1, 64, 1}}) {
      std::vector<Floats> values;
      std::vector<const float*> here;
      for (int r = 0; r < ranks; ++r) values.push_back(random_floats(s.width, static_cast<uint32_t>(r)));
      for (const Floats& v : values) here.push_back(v.data());
      Floats sum = poisoned(s.width), most = values[0];
      kernels::kernels_for_this_processor().tree_combine({here.data(), ranks, sum.data(), s.width});
      for (const Floats& v : values)
        for (size_t i = 0; i < v.size(); ++i) most[i] = std::max(most[i], v[i]);
      for (const bool maximum : {false, true}) {
        std::vector<std::unique_ptr<Array>> arrays;
        std::vector<const void*> parts;
        std::vector<void*> outs;
        for (const Floats& v : values) {
          arrays.push_back(std::make_unique<Array>(v, DType::f32, s.shift));
          parts.push_back(arrays.back()->data());
          outs.push_back(arrays.back()->data());
        }
        device().reverse(ranks % 2 == 0);
        table().combine({parts.data(), ranks, outs.data(), ranks, s.width, DType::f32, maximum}, stream());
        for (const auto& a : arrays) REQUIRE(bit_difference(a->read(), maximum ? most : sum) == "");
        device().reverse(false);
      }
    }
}

TEST_CASE("combine: two-byte types add in fp32 and round once; integers and doubles keep theirs") {
  for (const DType t : {DType::bf16, DType::f16}) {
    std::vector<Floats> values;
    for (uint32_t r = 0; r < 5; ++r) values.push_back(as_stored(random_floats(40, r), t));
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<const void*> parts;
    for (const Floats& v : values) {
      arrays.push_back(std::make_unique<Array>(v, t));
      parts.push_back(arrays.back()->data());
    }
    const Array to(Array::poison(40), t);
    void* out = to.data();
    table().combine({parts.data(), 5, &out, 1, 40, t, false}, stream());
    REQUIRE(bit_difference(to.read(), as_stored(tree_of(values), t)) == "");
  }
  const Numbers<int64_t> a({1, int64_t{1} << 40}), b({2, 5});
  const Numbers<double> c({1e300, 0.5}), d({-1e300, 0.25});
  const Numbers<int32_t> e({-7, 3}), f({-9, 4});
  const void *integers[] = {a.data(), b.data()}, *doubles[] = {c.data(), d.data()}, *words[] = {e.data(), f.data()};
  void *to_a = a.data(), *to_c = c.data(), *to_e = e.data();
  table().combine({integers, 2, &to_a, 1, 2, DType::i64, false}, stream());
  table().combine({doubles, 2, &to_c, 1, 2, DType::f64, false}, stream());
  table().combine({words, 2, &to_e, 1, 2, DType::i32, true}, stream());
  REQUIRE(a.read() == std::vector<int64_t>{3, (int64_t{1} << 40) + 5});
  REQUIRE(c.read() == std::vector<double>{0, 0.75});
  REQUIRE(e.read() == std::vector<int32_t>{-7, 4});
}

TEST_CASE("sgd, adamw and lion: fp32 equals the CPU's bits; two-byte gradients and parameters are rounded once") {
  for (const Shape& s : {Shape{1, 1, 1031}, {1, 1, 5, 1}})
    for (const float decay : {0.0f, 0.1f}) {
      const int64_t n = s.width;
      const Floats grad = random_floats(n, 1), param = random_floats(n, 2), m = random_floats(n, 3);
      Floats v = random_floats(n, 4);
      for (float& x : v) x = std::abs(x);
      for (const DType g : kActivationTypes)
        for (const DType p : kActivationTypes) {
          const Floats sg = as_stored(grad, g);
          Floats sp = as_stored(param, p), sm = m, sv = v, plain = sp, signs = sp, lion_m = m;
          const kernels::AdamW cpu{.grad = sg.data(),
                                   .param = sp.data(),
                                   .m = sm.data(),
                                   .v = sv.data(),
                                   .n = n,
                                   .step = 3,
                                   .learning_rate = 0.01f,
                                   .weight_decay = decay};
          kernels::kernels_for_this_processor().adamw(cpu);
          kernels::kernels_for_this_processor().sgd({sg.data(), plain.data(), n, 0.5f, decay});
          kernels::kernels_for_this_processor().lion({sg.data(), signs.data(), lion_m.data(), n, 0.01f, 0.9f, 0.99f, decay});
          const Floats got = in_both_orders([&] {
            const Array dg(grad, g, s.shift), dp(param, p), dm(m, DType::f32), dv(v, DType::f32);
            table().adamw({.grad = dg.in(),
                           .param = dp.out(),
                           .m = dm.floats(),
                           .v = dv.floats(),
                           .n = n,
                           .step = 3,
                           .learning_rate = 0.01f,
                           .weight_decay = decay},
                          stream());
            return joined({dp.read(), dm.read(), dv.read()});
          });
          REQUIRE(bit_difference(got, joined({as_stored(sp, p), sm, sv})) == "");
          REQUIRE(bit_difference(in_both_orders([&] {
                                   const Array dg(grad, g, s.shift), dp(param, p);
                                   table().sgd({dg.in(), dp.out(), n, 0.5f, decay}, stream());
                                   return dp.read();
                                 }),
                                 as_stored(plain, p)) == "");
          REQUIRE(bit_difference(in_both_orders([&] {
                                   const Array dg(grad, g, s.shift), dp(param, p), dm(m, DType::f32);
                                   table().lion({dg.in(), dp.out(), dm.floats(), n, 0.01f, 0.9f, 0.99f, decay}, stream());
                                   return joined({dp.read(), dm.read()});
                                 }),
                                 joined({as_stored(signs, p), lion_m})) == "");
        }
    }
}

TEST_CASE("adamw on moments in 8 bits: parameters, codes and scales are the CPU's over several steps") {
  for (const int64_t n : {1, 300, 2048, 5000}) {
    const int64_t blocks = moment_blocks(n);
    Floats want = random_floats(n, 2), m_scale(blocks), v_scale(blocks), scratch(2 * kMomentBlock);
    std::vector<uint8_t> m(static_cast<size_t>(n)), v(static_cast<size_t>(n));
    const Array param(want, DType::f32), dm_scale(m_scale, DType::f32), dv_scale(v_scale, DType::f32);
    const Numbers<uint8_t> dm(m), dv(v);
    for (int64_t step = 0; step < 3; ++step) {
      INFO("n " << n << ", step " << step);
      Floats g = random_floats(n, 10 + static_cast<uint32_t>(step));
      if (step == 1)
        for (int64_t i = 0; i < n / 2; ++i) g[i] = 0;
      kernels::kernels_for_this_processor().adamw8bit({.grad = g.data(),
                                                       .param = want.data(),
                                                       .m = m.data(),
                                                       .v = v.data(),
                                                       .m_scale = m_scale.data(),
                                                       .v_scale = v_scale.data(),
                                                       .scratch = scratch.data(),
                                                       .n = n,
                                                       .step = step,
                                                       .learning_rate = 0.01f,
                                                       .weight_decay = 0.1f});
      const Array dg(g, DType::f32);
      table().adamw8bit({.grad = dg.in(),
                         .param = param.out(),
                         .m = dm.data(),
                         .v = dv.data(),
                         .m_scale = dm_scale.floats(),
                         .v_scale = dv_scale.floats(),
                         .n = n,
                         .step = step,
                         .learning_rate = 0.01f,
                         .weight_decay = 0.1f},
                        stream());
      REQUIRE(bit_difference(param.read(), want) == "");
      REQUIRE(bit_difference(joined({dm_scale.read(), dv_scale.read()}), joined({m_scale, v_scale})) == "");
      REQUIRE(dm.read() == m);
      REQUIRE(dv.read() == v);
    }
  }
}

}  // namespace shardlab::testing::of_sums
