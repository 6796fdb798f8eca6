// One product three ways forward and back, by the fixed-order kernels or by a library's method, and what it should give.
#pragma once

#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Rows are the tokens of all sequences.
struct LinearShape {
  int64_t sequences, tokens, in, out;
  int64_t rows() const { return sequences * tokens; }
};
inline const LinearShape kLinearShapes[] = {{1, 1, 1, 1}, {2, 5, 7, 3}, {1, 70, 100, 66}, {4, 20, 32, 130}};

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

struct LinearInputs {
  Floats x, w, bias, dy;
};
inline LinearInputs inputs(const LinearShape& s, DType t) {
  return {as_stored(random_floats(s.rows() * s.in, 1), t), as_stored(random_floats(s.out * s.in, 2), t), random_floats(s.out, 3),
          as_stored(random_floats(s.rows() * s.out, 4), t)};
}

/// One of the two ways to multiply.
struct LinearWay {
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

inline Floats forward(const LinearWay& way, const LinearInputs& in, const LinearShape& s, DType t, DType result, bool bias,
                      gpu::Part part = {}) {
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
inline Floats input_gradient(const LinearWay& way, const LinearInputs& in, const LinearShape& s, DType t, DType result,
                             gpu::Part part = {}) {
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
inline Floats weight_gradient(const LinearWay& way, const LinearInputs& in, const LinearShape& s, DType t, DType result,
                              const Floats* old = nullptr) {
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

/// All three, with and without bias and accumulation, against fp64: factors of t, results as asked for.
inline void equals_fp64(const LinearWay& way, DType t, DType result) {
  for (const LinearShape& s : kLinearShapes) {
    INFO(name_of(t) << " to " << name_of(result) << " rows " << s.rows() << " in " << s.in << " out " << s.out);
    const LinearInputs in = inputs(s, t);
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

}  // namespace shardlab::testing
