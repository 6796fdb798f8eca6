#include "tests/cuda_kernels/support.h"

namespace shardlab::testing {
namespace {

struct Shape {
  int64_t sequences, tokens, in, out;
  int64_t rows() const { return sequences * tokens; }
};
const Shape kShapes[] = {{1, 1, 1, 1}, {2, 5, 7, 3}, {1, 70, 100, 66}, {4, 20, 32, 130}};

/// c[i][j] = sum over k of a(i, k) b(j, k), in fp64.
template <class A, class B>
Doubles product(int64_t rows, int64_t columns, int64_t depth, const A& a, const B& b) {
  Doubles c;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += static_cast<double>(a(i, k)) * static_cast<double>(b(j, k));
      c.push_back(sum);
    }
  return c;
}

struct Inputs {
  Floats x, w, bias, dy;
};
Inputs inputs(const Shape& s, DType t) {
  return {as_stored(random_floats(s.rows() * s.in, 1), t), as_stored(random_floats(s.out * s.in, 2), t), random_floats(s.out, 3),
          as_stored(random_floats(s.rows() * s.out, 4), t)};
}

/// One of the two ways to multiply.
struct Way {
  gpu::Matmul* library;  ///< or null: the fixed order
  void forward(const gpu::LinearForward& a) const { library ? library->forward(a, stream()) : table().linear_forward(a, stream()); }
  void input(const gpu::LinearInput& a) const { library ? library->input(a, stream()) : table().linear_input(a, stream()); }
  void weight(const gpu::LinearWeight& a) const { library ? library->weight(a, stream()) : table().linear_weight(a, stream()); }
};

class NoFailure final : public gpu::LaunchCheck {
 public:
  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override {
    FAIL(fmt::format("{}: {} error {}: {}", kernel, library, code, text));
  }
};

Floats forward(const Way& way, const Inputs& in, const Shape& s, DType t, DType result, bool bias, gpu::Part part = {}) {
  const Array x(in.x, t), w(in.w, t), b(in.bias, DType::f32), y(Array::poison(s.rows() * s.out), result);
  const Lent workspace(1 << 20);
  way.forward({.x = x.in(),
               .w = w.in(),
               .bias = bias ? b.in() : gpu::Input{},
               .y = y.out(),
               .rows = s.rows(),
               .in = s.in,
               .out = s.out,
               .in_part = part,
               .scratch = workspace});
  return y.read();
}
Floats input_gradient(const Way& way, const Inputs& in, const Shape& s, DType t, DType result, gpu::Part part = {}) {
  const Array dy(in.dy, t), w(in.w, t), dx(Array::poison(s.rows() * s.in), result);
  const Lent workspace(1 << 20);
  way.input({.dy = dy.in(),
             .w = w.in(),
             .dx = dx.out(),
             .rows = s.rows(),
             .in = s.in,
             .out = s.out,
             .out_part = part,
             .scratch = workspace});
  return dx.read();
}
Floats weight_gradient(const Way& way, const Inputs& in, const Shape& s, DType t, DType result, const Floats* old = nullptr) {
  const Array x(in.x, t), dy(in.dy, t), dw(old != nullptr ? *old : Array::poison(s.out * s.in), result);
  const Lent workspace(1 << 20);
  way.weight({.x = x.in(),
              .dy = dy.in(),
              .dw = dw.out(),
              .tokens = {s.sequences, s.tokens, {}},
              .in = s.in,
              .out = s.out,
              .accumulate = old != nullptr,
              .scratch = workspace});
  return dw.read();
}

void equals_fp64(const Way& way, DType t, DType result) {
  for (const Shape& s : kShapes) {
    INFO(name_of(t) << " to " << name_of(result) << " rows " << s.rows() << " in " << s.in << " out " << s.out);
    const Inputs in = inputs(s, t);
    const auto x = [&](int64_t i, int64_t k) { return in.x[static_cast<size_t>(i * s.in + k)]; };
    const auto w = [&](int64_t i, int64_t k) { return in.w[static_cast<size_t>(i * s.in + k)]; };
    const auto dy = [&](int64_t i, int64_t k) { return in.dy[static_cast<size_t>(i * s.out + k)]; };
    Doubles y = product(s.rows(), s.out, s.in, x, w);
    const double off = tolerance(result);
    REQUIRE(difference(in_both_orders([&] { return forward(way, in, s, t, result, false); }), y, off) == "");
    for (size_t i = 0; i < y.size(); ++i) y[i] += in.bias[i % static_cast<size_t>(s.out)];
    REQUIRE(difference(in_both_orders([&] { return forward(way, in, s, t, result, true); }), y, 2 * off) == "");
    const Doubles dx = product(s.rows(), s.in, s.out, dy, [&](int64_t j, int64_t k) { return w(k, j); });
    REQUIRE(difference(in_both_orders([&] { return input_gradient(way, in, s, t, result); }), dx, off) == "");
    Doubles dw = product(
        s.out, s.in, s.rows(), [&](int64_t i, int64_t k) { return dy(k, i); }, [&](int64_t j, int64_t k) { return x(k, j); });
    REQUIRE(difference(in_both_orders([&] { return weight_gradient(way, in, s, t, result); }), dw, off) == "");
    const Floats old = as_stored(random_floats(s.out * s.in, 5), result);
    for (size_t i = 0; i < dw.size(); ++i) dw[i] += old[i];
    REQUIRE(difference(in_both_orders([&] { return weight_gradient(way, in, s, t, result, &old); }), dw, off) == "");
  }
}

}  // namespace

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
  const Kernels& cpu = kernels_for_this_processor();
  for (const Shape& s : {Shape{2, 5, 40, 24}, {1, 70, 100, 66}, {3, 33, 17, 5}, {1, 3, 9, 4}, {70, 2, 20, 6}}) {
    INFO("rows " << s.rows() << " in " << s.in << " out " << s.out);
    const Inputs in = inputs(s, DType::f32);
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
    const Way fixed{nullptr};
    REQUIRE(bit_difference(in_both_orders([&] { return forward(fixed, in, s, DType::f32, DType::f32, true, in_part); }), y) == "");
    REQUIRE(bit_difference(in_both_orders([&] { return input_gradient(fixed, in, s, DType::f32, DType::f32, out_part); }), dx) ==
            "");
    REQUIRE(bit_difference(in_both_orders([&] { return weight_gradient(fixed, in, s, DType::f32, DType::f32); }), dw) == "");
  }
}

TEST_CASE("linear: shares of the contraction, joined by the tree over ranks, have the bits of the whole") {
  const Shape s{1, 6, 64, 10};
  const Inputs in = inputs(s, DType::f32);
  const Way fixed{nullptr};
  const Floats whole = forward(fixed, in, s, DType::f32, DType::f32, false);
  for (const int64_t ranks : {2, 4, 8, 16}) {
    std::vector<Floats> parts;
    const int64_t held = s.in / ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Inputs mine = in;
      mine.x = columns_of(in.x, s.in, rank * held, (rank + 1) * held);
      mine.w = columns_of(in.w, s.in, rank * held, (rank + 1) * held);
      parts.push_back(
          forward(fixed, mine, {s.sequences, s.tokens, held, s.out}, DType::f32, DType::f32, false, {rank * held, s.in}));
    }
    REQUIRE(bit_difference(whole, tree_of(parts)) == "");
  }
}

}  // namespace shardlab::testing
