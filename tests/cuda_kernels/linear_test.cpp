#include "tests/cuda_kernels/linear_support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_linear {

TEST_CASE("linear: the fixed-order product equals fp64 in every type") {
  for (const DType t : kActivationTypes)
    for (const DType result : {t, DType::f32}) equals_fp64({nullptr}, t, result);
}

TEST_CASE("linear: the library's product equals fp64 in every type") {
  NoFailure check;
  const auto library = table().matmul({.tf32 = false}, check);
  REQUIRE(library != nullptr);
  INFO(library->name());
  for (const DType t : kActivationTypes)
    for (const DType result : {t, DType::f32}) equals_fp64({library.get()}, t, result);
}

TEST_CASE("linear: in fp32 the fixed-order product has the bits of the CPU's canonical one, of parts of the contraction too") {
  const kernels::Kernels& cpu = kernels::kernels_for_this_processor();
  for (const LinearShape& s :
       {LinearShape{2, 5, 40, 24}, {1, 70, 100, 66}, {3, 33, 17, 5}, {1, 3, 9, 4}, {70, 2, 20, 6}, {66, 16, 9, 5}}) {
    INFO("rows " << s.rows() << " in " << s.in << " out " << s.out);
    const LinearInputs in = inputs(s, DType::f32);
    Floats y = poisoned(s.rows() * s.out), dx = poisoned(s.rows() * s.in), dw = poisoned(s.out * s.in);
    // The second quarter of logical extents four times as long.
    const gpu::Part in_part{s.in, 4 * s.in}, out_part{s.out, 4 * s.out};
    kernels::LinearForward f{in.x.data(), in.w.data(), in.bias.data(), y.data(), s.rows(), s.in, s.out, in_part, true, nullptr};
    Scratch scratch_f(linear_scratch_bytes(f));
    f.scratch = scratch_f.data();
    cpu.linear_forward(f);
    kernels::LinearInput i{in.dy.data(), in.w.data(), dx.data(), s.rows(), s.in, s.out, out_part, true, nullptr};
    Scratch scratch_i(linear_scratch_bytes(i));
    i.scratch = scratch_i.data();
    cpu.linear_input(i);
    kernels::LinearWeight w{.x = in.x.data(),
                            .dy = in.dy.data(),
                            .dw = dw.data(),
                            .tokens = {s.sequences, s.tokens, {}},
                            .in = s.in,
                            .out = s.out,
                            .canonical = true};
    Scratch scratch_w(linear_scratch_bytes(w));
    w.scratch = scratch_w.data();
    cpu.linear_weight(w);
    const LinearWay fixed{nullptr};
    REQUIRE(bit_difference(in_both_orders([&] { return forward(fixed, in, s, DType::f32, DType::f32, true, in_part); }), y) == "");
    REQUIRE(bit_difference(in_both_orders([&] { return input_gradient(fixed, in, s, DType::f32, DType::f32, out_part); }), dx) ==
            "");
    REQUIRE(bit_difference(in_both_orders([&] { return weight_gradient(fixed, in, s, DType::f32, DType::f32); }), dw) == "");
  }
}

TEST_CASE("linear: a gradient in fp32 beside factors in 16 bits gives the bits of fp32 on what they hold, rounded once") {
  const LinearShape s{2, 9, 40, 24};
  for (const DType t : {DType::bf16, DType::f16}) {
    LinearInputs in = inputs(s, t);
    in.dy = random_floats(s.rows() * s.out, 8);  // not rounded to t
    const LinearWay fixed{nullptr};
    const Array x(in.x, t), w(in.w, t), dy(in.dy, DType::f32), dx(Array::poison(s.rows() * s.in), t),
        dw(Array::poison(s.out * s.in), DType::f32);
    table().linear_input({dy.in(), w.in(), dx.out(), s.rows(), s.in, s.out, {}, {}}, stream());
    table().linear_weight(
        {.x = x.in(), .dy = dy.in(), .dw = dw.out(), .tokens = {s.sequences, s.tokens, {}}, .in = s.in, .out = s.out}, stream());
    REQUIRE(bit_difference(dx.read(), as_stored(input_gradient(fixed, in, s, DType::f32, DType::f32), t)) == "");
    REQUIRE(bit_difference(dw.read(), weight_gradient(fixed, in, s, DType::f32, DType::f32)) == "");
  }
}

TEST_CASE("linear: shares of the contraction, joined by the tree over ranks, have the bits of the whole") {
  const LinearShape s{1, 6, 64, 10};
  const LinearInputs in = inputs(s, DType::f32);
  const LinearWay fixed{nullptr};
  const Floats whole = forward(fixed, in, s, DType::f32, DType::f32, false);
  for (const int64_t ranks : {2, 4, 8, 16}) {
    std::vector<Floats> parts;
    const int64_t held = s.in / ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      LinearInputs mine = in;
      mine.x = columns_of(in.x, s.in, rank * held, (rank + 1) * held);
      mine.w = columns_of(in.w, s.in, rank * held, (rank + 1) * held);
      parts.push_back(
          forward(fixed, mine, {s.sequences, s.tokens, held, s.out}, DType::f32, DType::f32, false, {rank * held, s.in}));
    }
    REQUIRE(bit_difference(whole, tree_of(parts)) == "");
  }
}

}  // namespace shardlab::testing::of_linear
