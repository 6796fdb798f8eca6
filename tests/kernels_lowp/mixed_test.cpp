// The contract of kernels/mixed.h: every op on narrow operands is round(fp32 kernel(widened operands)), bit for bit.
#include <array>

#include "kernels/library_product.h"
#include "plan/base/moment_codes.h"
#include "tests/kernels_lowp/packed.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using kernels::MixedKernels;

/// Storage of (activations, parameters, gradients) to test: all alike, and mixtures.
struct Types {
  DType activation, parameter, gradient;
};
constexpr std::array<Types, 5> kTypes{{{DType::bf16, DType::bf16, DType::bf16},
                                       {DType::f16, DType::f16, DType::f16},
                                       {DType::bf16, DType::bf16, DType::f32},
                                       {DType::bf16, DType::f32, DType::f32},
                                       {DType::f32, DType::f32, DType::f32}}};

void for_types(const std::function<void(const Types&, const kernels::Kernels&)>& body) {
  for (const Types& t : kTypes)
    for (const kernels::Kernels* k : variants_here()) {
      INFO(name_of(t.activation) << ", parameters " << name_of(t.parameter) << ", gradients " << name_of(t.gradient) << ", "
                                 << k->name);
      body(t, *k);
    }
}

/// Widths: below a vector, several blocks of rows, and more than a block.
constexpr std::array<int64_t, 3> kWidths{5, 300, 4100};

}  // namespace

TEST_CASE("mixed: norms") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int64_t width : kWidths)
      for (const bool rms : {false, true}) {
        const kernels::Tokens tokens{2, 17, {}};
        const int64_t rows = tokens.rows(), n = rows * width, per_row = rms ? 1 : 2;
        Packed x = random_packed(t.activation, n, 1), dy = random_packed(t.activation, n, 2);
        Packed residual = random_packed(t.activation, n, 3), gamma = random_packed(t.parameter, width, 4);
        Packed beta = random_packed(t.parameter, width, 5), y(t.activation, n), dx(t.activation, n);
        const Floats xs = x.values(), dys = dy.values(), gs = gamma.values(), bs = beta.values(), rs = residual.values();
        Floats want = poisoned(n), want_stats = poisoned(rows * per_row), stats = poisoned(rows * per_row);
        k.norm_forward({.x = xs.data(),
                        .gamma = gs.data(),
                        .beta = bs.data(),
                        .y = want.data(),
                        .stats = want_stats.data(),
                        .rows = rows,
                        .width = width,
                        .rms = rms});
        run_mixed<kernels::MixedNormForward>(k, &MixedKernels::norm_forward,
                                             {.x = x.stored(),
                                              .gamma = gamma.stored(),
                                              .beta = beta.stored(),
                                              .y = y.stored(),
                                              .stats = stats.data(),
                                              .rows = rows,
                                              .width = width,
                                              .rms = rms});
        REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
        REQUIRE(bit_difference(stats, want_stats) == "");
        k.norm_input({.dy = dys.data(),
                      .x = xs.data(),
                      .gamma = gs.data(),
                      .stats = stats.data(),
                      .residual = rs.data(),
                      .dx = want.data(),
                      .rows = rows,
                      .width = width,
                      .rms = rms});
        run_mixed<kernels::MixedNormInput>(k, &MixedKernels::norm_input,
                                           {.dy = dy.stored(),
                                            .x = x.stored(),
                                            .gamma = gamma.stored(),
                                            .residual = residual.stored(),
                                            .dx = dx.stored(),
                                            .stats = stats.data(),
                                            .rows = rows,
                                            .width = width,
                                            .rms = rms});
        REQUIRE(bit_difference(dx.values(), dx.rounded(want)) == "");
        for (const bool accumulate : {false, true}) {
          Packed dgamma = random_packed(t.gradient, width, 6), dbeta = random_packed(t.gradient, width, 7);
          Floats want_gamma = dgamma.values(), want_beta = dbeta.values();
          k.norm_weight({dys.data(), xs.data(), stats.data(), want_gamma.data(), want_beta.data(), tokens, width, rms, accumulate});
          const Floats untouched = dbeta.values();
          run_mixed<kernels::MixedNormWeight>(k, &MixedKernels::norm_weight,
                                              {.dy = dy.stored(),
                                               .x = x.stored(),
                                               .dgamma = dgamma.stored(),
                                               .dbeta = dbeta.stored(),
                                               .stats = stats.data(),
                                               .tokens = tokens,
                                               .width = width,
                                               .rms = rms,
                                               .accumulate = accumulate});
          REQUIRE(bit_difference(dgamma.values(), dgamma.rounded(want_gamma)) == "");
          REQUIRE(bit_difference(dbeta.values(), rms ? untouched : dbeta.rounded(want_beta)) == "");
        }
      }
  });
}

namespace {

struct LinearSizes {
  int64_t sequences, tokens, in, out;
};
// Fewer than a block everywhere; and across the blocks of rows, of inputs and of outputs.
constexpr std::array<LinearSizes, 2> kLinears{{{2, 5, 19, 7}, {2, 70, 131, 150}}};

}  // namespace

TEST_CASE("mixed: Linear in canonical mode") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const LinearSizes& z : kLinears) {
      const kernels::Tokens tokens{z.sequences, z.tokens, {}};
      const int64_t rows = tokens.rows();
      Packed x = random_packed(t.activation, rows * z.in, 1), w = random_packed(t.parameter, z.out * z.in, 2);
      Packed bias = random_packed(t.parameter, z.out, 3), dy = random_packed(t.activation, rows * z.out, 4);
      Packed y(t.activation, rows * z.out), dx(t.activation, rows * z.in);
      const Floats xs = x.values(), ws = w.values(), bs = bias.values(), dys = dy.values();
      // The part of a contraction that a rank of two holds.
      const kernels::Part in_part{z.in, 2 * z.in}, out_part{0, 2 * z.out};
      kernels::LinearForward forward{
          .x = xs.data(), .w = ws.data(), .bias = bs.data(), .rows = rows, .in = z.in, .out = z.out, .in_part = in_part};
      forward.canonical = true;
      Scratch scratch(kernels::linear_scratch_bytes(forward));
      Floats want = poisoned(rows * z.out);
      forward.y = want.data();
      forward.scratch = scratch.data();
      k.linear_forward(forward);
      run_mixed<kernels::MixedLinearForward>(k, &MixedKernels::linear_forward,
                                             {.x = x.stored(),
                                              .w = w.stored(),
                                              .bias = bias.stored(),
                                              .y = y.stored(),
                                              .rows = rows,
                                              .in = z.in,
                                              .out = z.out,
                                              .in_part = in_part,
                                              .canonical = true});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");

      kernels::LinearInput input{
          .dy = dys.data(), .w = ws.data(), .rows = rows, .in = z.in, .out = z.out, .out_part = out_part, .canonical = true};
      Scratch input_scratch(kernels::linear_scratch_bytes(input));
      Floats want_dx = poisoned(rows * z.in);
      input.dx = want_dx.data();
      input.scratch = input_scratch.data();
      k.linear_input(input);
      run_mixed<kernels::MixedLinearInput>(k, &MixedKernels::linear_input,
                                           {.dy = dy.stored(),
                                            .w = w.stored(),
                                            .dx = dx.stored(),
                                            .rows = rows,
                                            .in = z.in,
                                            .out = z.out,
                                            .out_part = out_part,
                                            .canonical = true});
      REQUIRE(bit_difference(dx.values(), dx.rounded(want_dx)) == "");

      Packed dw(t.gradient, z.out * z.in), dbias(t.gradient, z.out);
      kernels::LinearWeight weight{.x = xs.data(), .dy = dys.data(), .tokens = tokens, .in = z.in, .out = z.out, .canonical = true};
      Scratch weight_scratch(kernels::linear_scratch_bytes(weight));
      Floats want_dw = poisoned(z.out * z.in), want_dbias = poisoned(z.out);
      weight.dw = want_dw.data();
      weight.dbias = want_dbias.data();
      weight.scratch = weight_scratch.data();
      k.linear_weight(weight);
      run_mixed<kernels::MixedLinearWeight>(k, &MixedKernels::linear_weight,
                                            {.x = x.stored(),
                                             .dy = dy.stored(),
                                             .dw = dw.stored(),
                                             .dbias = dbias.stored(),
                                             .tokens = tokens,
                                             .in = z.in,
                                             .out = z.out,
                                             .canonical = true});
      REQUIRE(bit_difference(dw.values(), dw.rounded(want_dw)) == "");
      REQUIRE(bit_difference(dbias.values(), dbias.rounded(want_dbias)) == "");
    }
  });
}

namespace {

/// c[m,n] = sum over k of a(m,k) b(k,n), + old, in fp64.
Doubles product(int64_t rows, int64_t columns, int64_t depth, const std::function<double(int64_t, int64_t)>& a,
                const std::function<double(int64_t, int64_t)>& b, Doubles c) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t p = 0; p < depth; ++p) c[static_cast<size_t>(i * columns + j)] += a(i, p) * b(p, j);
  return c;
}

/// A result in this storage is off by half a unit of its last place, and by what fp32 sums are.
double tolerance_of(DType t) { return t == DType::f32 ? kTolerance : t == DType::bf16 ? 0.0040 : 0.0006; }

}  // namespace

TEST_CASE("mixed: Linear in fast mode, by blocks and by the library's bf16 product") {
  for (const bool library : {false, true}) {
    if (library && !kernels::LibraryProduct::runs_here()) {
      WARN("this processor has no bf16 products: the library's are not tested");
      continue;
    }
    for_types([&](const Types& t, const kernels::Kernels& k) {
      if (library && (t.activation != DType::bf16 || t.parameter != DType::bf16)) return;
      if (&k != &kernels::kernels_for_this_processor()) return;  // the order is the library's: one variant is enough
      for (const LinearSizes& z : kLinears) {
        const kernels::Tokens tokens{z.sequences, z.tokens, {}};
        const int64_t rows = tokens.rows(), in = z.in, out = z.out;
        Packed x = random_packed(t.activation, rows * in, 1), w = random_packed(t.parameter, out * in, 2);
        Packed bias = random_packed(t.parameter, out, 3), dy = random_packed(t.activation, rows * out, 4);
        const Doubles xs = wide(x.values()), ws = wide(w.values()), bs = wide(bias.values()), dys = wide(dy.values());
        const auto x_at = [&](int64_t r, int64_t i) { return xs[static_cast<size_t>(r * in + i)]; };
        const auto w_at = [&](int64_t o, int64_t i) { return ws[static_cast<size_t>(o * in + i)]; };
        const auto dy_at = [&](int64_t r, int64_t o) { return dys[static_cast<size_t>(r * out + o)]; };
        using kernels::LibraryProduct;
        const auto made = [&](const LibraryProduct::Spec& spec) {
          auto product = library ? LibraryProduct::create(spec) : nullptr;
          REQUIRE((product != nullptr) == library);
          return product;
        };
        Packed y(t.activation, rows * out), dx(t.activation, rows * in);
        const auto forward = made({.rows = rows,
                                   .columns = out,
                                   .depth = in,
                                   .b_transposed = true,
                                   .result = t.activation,
                                   .bias = true,
                                   .bias_type = t.parameter});
        run_mixed<kernels::MixedLinearForward>(k, &MixedKernels::linear_forward,
                                               {.x = x.stored(),
                                                .w = w.stored(),
                                                .bias = bias.stored(),
                                                .y = y.stored(),
                                                .rows = rows,
                                                .in = in,
                                                .out = out,
                                                .product = forward.get()});
        Doubles start;
        for (int64_t r = 0; r < rows; ++r) start.insert(start.end(), bs.begin(), bs.end());
        const auto w_back = [&](int64_t i, int64_t o) { return w_at(o, i); };
        REQUIRE(difference(y.values(), product(rows, out, in, x_at, w_back, start), tolerance_of(t.activation)) == "");

        const auto input = made({.rows = rows, .columns = in, .depth = out, .result = t.activation});
        run_mixed<kernels::MixedLinearInput>(
            k, &MixedKernels::linear_input,
            {.dy = dy.stored(), .w = w.stored(), .dx = dx.stored(), .rows = rows, .in = in, .out = out, .product = input.get()});
        const Doubles zeros(static_cast<size_t>(rows * in));
        REQUIRE(difference(dx.values(), product(rows, in, out, dy_at, w_at, zeros), tolerance_of(t.activation)) == "");

        for (const bool accumulate : {false, true}) {
          Packed dw = random_packed(t.gradient, out * in, 5), dbias = random_packed(t.gradient, out, 6);
          const Doubles old = accumulate ? wide(dw.values()) : Doubles(static_cast<size_t>(out * in));
          const Doubles old_bias = accumulate ? wide(dbias.values()) : Doubles(static_cast<size_t>(out));
          const auto weight = made(
              {.rows = out, .columns = in, .depth = rows, .a_transposed = true, .result = t.gradient, .accumulate = accumulate});
          run_mixed<kernels::MixedLinearWeight>(k, &MixedKernels::linear_weight,
                                                {.x = x.stored(),
                                                 .dy = dy.stored(),
                                                 .dw = dw.stored(),
                                                 .dbias = dbias.stored(),
                                                 .tokens = tokens,
                                                 .in = in,
                                                 .out = out,
                                                 .accumulate = accumulate,
                                                 .product = weight.get()});
          const auto dy_back = [&](int64_t o, int64_t r) { return dy_at(r, o); };
          REQUIRE(difference(dw.values(), product(out, in, rows, dy_back, x_at, old), tolerance_of(t.gradient)) == "");
          const auto ones = [](int64_t, int64_t) { return 1.0; };
          REQUIRE(difference(dbias.values(), product(1, out, rows, ones, dy_at, old_bias), tolerance_of(t.gradient)) == "");
        }
      }
    });
  }
}

TEST_CASE("mixed: norms of heads") {
  constexpr int kHeads = 6, kKvHeads = 2;
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int head_dim : {5, 40, 600}) {
      const kernels::HeadNormShape shape{{2, 17, {}}, kHeads, kKvHeads, head_dim};
      const int64_t rows = shape.tokens.rows(), n = rows * (kHeads + 2 * kKvHeads) * head_dim, numbers = rows * (kHeads + kKvHeads);
      Packed qkv = random_packed(t.activation, n, 1), dy = random_packed(t.activation, n, 2), y(t.activation, n), dqkv = y;
      Packed gamma_q = random_packed(t.parameter, head_dim, 3), gamma_k = random_packed(t.parameter, head_dim, 4);
      const Floats x = qkv.values(), dys = dy.values(), gq = gamma_q.values(), gk = gamma_k.values();
      Floats want = poisoned(n), want_stats = poisoned(numbers), stats = want_stats;
      kernels::HeadNormForward forward{.shape = shape,
                                       .qkv = x.data(),
                                       .gamma_q = gq.data(),
                                       .gamma_k = gk.data(),
                                       .y = want.data(),
                                       .stats = want_stats.data()};
      kernels::head_norm_forward(k, forward);
      forward.stats = stats.data();
      run_mixed<kernels::MixedHeadNormForward>(k, &MixedKernels::head_norm_forward,
                                               {qkv.stored(), gamma_q.stored(), gamma_k.stored(), y.stored(), forward});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
      REQUIRE(bit_difference(stats, want_stats) == "");
      const kernels::HeadNormInput input{shape, dys.data(), x.data(), gq.data(), gk.data(), stats.data(), want.data()};
      kernels::head_norm_input(k, input);
      run_mixed<kernels::MixedHeadNormInput>(k, &MixedKernels::head_norm_input,
                                             {dy.stored(), qkv.stored(), gamma_q.stored(), gamma_k.stored(), dqkv.stored(), input});
      REQUIRE(bit_difference(dqkv.values(), dqkv.rounded(want)) == "");
      struct Form {
        bool accumulate;
        int64_t apart, sums;
      };
      for (const Form& form : {Form{false, 0, 1}, {true, 0, 1}, {false, 1, 2}, {false, 16, 32}}) {
        Packed dgamma_q = random_packed(t.gradient, form.sums * head_dim, 5),
               dgamma_k = random_packed(t.gradient, form.sums * head_dim, 6);
        Floats want_q = dgamma_q.values(), want_k = dgamma_k.values();
        kernels::HeadNormWeight weight{.shape = shape,
                                       .dy = dys.data(),
                                       .qkv = x.data(),
                                       .stats = stats.data(),
                                       .dgamma_q = want_q.data(),
                                       .dgamma_k = want_k.data(),
                                       .accumulate = form.accumulate,
                                       .apart = form.apart};
        Scratch lent(kernels::head_norm_scratch_bytes(shape));
        weight.scratch = lent.data();
        kernels::head_norm_weight(k, weight);
        run_mixed<kernels::MixedHeadNormWeight>(k, &MixedKernels::head_norm_weight,
                                                {dy.stored(), qkv.stored(), dgamma_q.stored(), dgamma_k.stored(), weight});
        REQUIRE(bit_difference(dgamma_q.values(), dgamma_q.rounded(want_q)) == "");
        REQUIRE(bit_difference(dgamma_k.values(), dgamma_k.rounded(want_k)) == "");
      }
    }
  });
}

TEST_CASE("mixed: attention and rope, with grouped-query heads") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int kv_heads : {1, 2, 4}) {
      const kernels::AttentionShape shape{2, 21, 4, kv_heads, 6};
      const int64_t rows = shape.sequences * shape.tokens, n = rows * shape.qkv_width(), m = rows * shape.out_width();
      Packed qkv = random_packed(t.activation, n, 1, 3.0f), dout = random_packed(t.activation, m, 2);
      Floats table(static_cast<size_t>(shape.tokens * shape.head_dim));
      kernels::rope_table(7, shape.tokens, shape.head_dim, 100.0f, table.data());
      for (const bool backward : {false, true}) {
        kernels::Rope rope{.sequences = shape.sequences,
                           .tokens = shape.tokens,
                           .heads = shape.heads,
                           .kv_heads = kv_heads,
                           .head_dim = shape.head_dim,
                           .position_begin = 7,
                           .backward = backward,
                           .table = table.data()};
        Floats want = qkv.values();
        Packed got = qkv;
        run_mixed<kernels::MixedRope>(k, &MixedKernels::rope, {got.stored(), rope});
        rope.qkv = want.data();
        k.rope(rope);
        REQUIRE(bit_difference(got.values(), got.rounded(want)) == "");
      }
      const Floats qkvs = qkv.values();
      Floats want = poisoned(m), want_lse = poisoned(rows * shape.heads), lse = want_lse;
      kernels::AttentionForward forward{.shape = shape, .qkv = qkvs.data(), .o = want.data(), .lse = want_lse.data()};
      Scratch scratch(kernels::attention_scratch_bytes(forward));
      forward.scratch = scratch.data();
      k.attention_forward(forward);
      Packed o(t.activation, m), dqkv(t.activation, n);
      run_mixed<kernels::MixedAttentionForward>(k, &MixedKernels::attention_forward, {shape, qkv.stored(), o.stored(), lse.data()});
      REQUIRE(bit_difference(o.values(), o.rounded(want)) == "");
      REQUIRE(bit_difference(lse, want_lse) == "");

      const Floats os = o.values(), douts = dout.values();
      Floats want_dqkv = poisoned(n);
      kernels::AttentionInput input{
          .shape = shape, .dout = douts.data(), .o = os.data(), .lse = lse.data(), .qkv = qkvs.data(), .dqkv = want_dqkv.data()};
      Scratch input_scratch(kernels::attention_scratch_bytes(input));
      input.scratch = input_scratch.data();
      k.attention_input(input);
      run_mixed<kernels::MixedAttentionInput>(
          k, &MixedKernels::attention_input,
          {.shape = shape, .dout = dout.stored(), .o = o.stored(), .qkv = qkv.stored(), .dqkv = dqkv.stored(), .lse = lse.data()});
      REQUIRE(bit_difference(dqkv.values(), dqkv.rounded(want_dqkv)) == "");
    }
  });
}

TEST_CASE("mixed: attention of a part of a sequence to a part, and what is put together of parts") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int kv_heads : {1, 2, 4})
      for (const bool partial : {false, true}) {
        const kernels::AttentionBlockShape shape{2, 16, 16, 4, kv_heads, 6, 64, 16, 16, {}, partial};
        const int64_t q_size = 2 * 16 * shape.q_width(), kv_size = 2 * 16 * shape.kv_width(), rows = 2 * 4 * 16;
        const int64_t dkv_size = partial ? 2 * q_size : kv_size;
        Packed q = random_packed(t.activation, q_size, 1, 3.0f), kv = random_packed(t.activation, kv_size, 2, 3.0f);
        Packed dout = random_packed(t.activation, q_size, 3), o = random_packed(t.activation, q_size, 4);
        const Floats qs = q.values(), kvs = kv.values(), douts = dout.values(), os = o.values();
        Floats want = random_packed(DType::f32, q_size, 5).values(), want_rows = random_packed(DType::f32, 2 * rows, 6).values();
        Floats got = want, got_rows = want_rows;
        kernels::AttentionBlockForward forward{
            .shape = shape, .q = qs.data(), .kv = kvs.data(), .o = want.data(), .carry = !partial};
        (partial ? forward.sums : forward.lse) = want_rows.data();
        Scratch scratch(kernels::attention_scratch_bytes(forward));
        forward.scratch = scratch.data();
        k.attention_block_forward(forward);
        REQUIRE(scratch.intact());
        run_mixed<kernels::MixedAttentionBlockForward>(k, &MixedKernels::attention_block_forward,
                                                       {.shape = shape,
                                                        .q = q.stored(),
                                                        .kv = kv.stored(),
                                                        .o = got.data(),
                                                        .lse = partial ? nullptr : got_rows.data(),
                                                        .sums = partial ? got_rows.data() : nullptr,
                                                        .carry = !partial});
        REQUIRE(bit_difference(got, want) == "");
        REQUIRE(bit_difference(got_rows, want_rows) == "");

        const Floats lse = random_packed(DType::f32, rows, 7).values();
        Packed dq = random_packed(t.activation, q_size, 8), dkv = random_packed(t.activation, dkv_size, 9);
        Floats want_dq = dq.values(), want_dkv = dkv.values();
        kernels::AttentionBlockInput input{.shape = shape,
                                           .dout = douts.data(),
                                           .o = os.data(),
                                           .lse = lse.data(),
                                           .q = qs.data(),
                                           .kv = kvs.data(),
                                           .dq = want_dq.data(),
                                           .dkv = want_dkv.data(),
                                           .carry = !partial,
                                           .carry_kv = !partial,
                                           .by_head = partial};
        Scratch input_scratch(kernels::attention_scratch_bytes(input));
        input.scratch = input_scratch.data();
        k.attention_block_input(input);
        REQUIRE(input_scratch.intact());
        run_mixed<kernels::MixedAttentionBlockInput>(k, &MixedKernels::attention_block_input,
                                                     {.shape = shape,
                                                      .dout = dout.stored(),
                                                      .o = o.stored(),
                                                      .q = q.stored(),
                                                      .kv = kv.stored(),
                                                      .dq = dq.stored(),
                                                      .dkv = dkv.stored(),
                                                      .lse = lse.data(),
                                                      .carry = !partial,
                                                      .carry_kv = !partial,
                                                      .by_head = partial});
        REQUIRE(bit_difference(dq.values(), dq.rounded(want_dq)) == "");
        REQUIRE(bit_difference(dkv.values(), dkv.rounded(want_dkv)) == "");

        Packed sum(t.activation, kv_size), merged(t.activation, q_size), whole(t.activation, q_size + kv_size),
            part(t.activation, q_size), keys(t.activation, kv_size);
        Floats want_sum = poisoned(kv_size), want_merged = poisoned(q_size), want_lse = poisoned(rows), got_lse = want_lse;
        const Floats gradients = random_packed(DType::f32, 2 * q_size, 10).values(),
                     more = random_packed(DType::f32, 2 * q_size, 11).values();
        kernels::AttentionMergeInput add{2 * 16, 4, kv_heads, 12, 2, {gradients.data(), more.data()}, want_sum.data()};
        k.attention_merge_input(add);
        run_mixed<kernels::MixedAttentionMergeInput>(k, &MixedKernels::attention_merge_input, {add, sum.stored()});
        REQUIRE(bit_difference(sum.values(), sum.rounded(want_sum)) == "");
        Floats sums = random_packed(DType::f32, 2 * rows, 12).values();
        for (size_t i = 1; i < sums.size(); i += 2) sums[i] = 1 + std::abs(sums[i]);
        kernels::AttentionMergeForward merge{
            2, 16, 4, 6, 2, {gradients.data(), more.data()}, {sums.data(), sums.data()}, want_merged.data(), want_lse.data()};
        k.attention_merge_forward(merge);
        merge.lse = got_lse.data();
        run_mixed<kernels::MixedAttentionMergeForward>(k, &MixedKernels::attention_merge_forward, {merge, merged.stored()});
        REQUIRE(bit_difference(merged.values(), merged.rounded(want_merged)) == "");
        REQUIRE(bit_difference(got_lse, want_lse) == "");

        // q and kv put together and taken apart again.
        const kernels::MixedSplitHeads join{whole.stored(), q.stored(), kv.stored(), 2 * 16, 4, kv_heads, 6, 6, true};
        run_mixed<kernels::MixedSplitHeads>(k, &MixedKernels::split_heads, join);
        run_mixed<kernels::MixedSplitHeads>(k, &MixedKernels::split_heads,
                                            {whole.stored(), part.stored(), keys.stored(), 2 * 16, 4, kv_heads, 6, 6, false});
        REQUIRE(bit_difference(part.values(), qs) == "");
        REQUIRE(bit_difference(keys.values(), kvs) == "");
      }
  });
}

TEST_CASE("mixed: activations, residual, dropout and what is elementwise") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int64_t n : {3, 4099})
      for (const bool swiglu : {false, true}) {
        const int64_t inputs = swiglu ? 2 * n : n;
        Packed u = random_packed(t.activation, inputs, 1, 4.0f), da = random_packed(t.activation, n, 2);
        Packed a(t.activation, n), du(t.activation, inputs);
        const Floats us = u.values(), das = da.values();
        Floats want = poisoned(n), want_du = poisoned(inputs);
        k.activation_forward({us.data(), want.data(), n, swiglu});
        k.activation_input({das.data(), us.data(), want_du.data(), n, swiglu});
        run_mixed<kernels::MixedActivationForward>(k, &MixedKernels::activation_forward, {u.stored(), a.stored(), n, swiglu});
        run_mixed<kernels::MixedActivationInput>(k, &MixedKernels::activation_input,
                                                 {da.stored(), u.stored(), du.stored(), n, swiglu});
        REQUIRE(bit_difference(a.values(), a.rounded(want)) == "");
        REQUIRE(bit_difference(du.values(), du.rounded(want_du)) == "");
      }
    for (const int64_t width : kWidths) {
      const kernels::Tokens tokens{2, 9, {}};
      const int64_t rows = tokens.rows(), n = rows * width;
      Packed x = random_packed(t.activation, n, 1), z = random_packed(t.activation, n, 2),
             bias = random_packed(t.parameter, width, 3);
      const Floats xs = x.values(), zs = z.values(), bs = bias.values();
      Packed y(t.activation, n), sum(t.gradient, n), copy(t.parameter, n), filled(t.gradient, n);
      Floats want = poisoned(n), want_sum = poisoned(n), want_drop = zs;
      k.residual_forward({xs.data(), zs.data(), bs.data(), want.data(), rows, width});
      run_mixed<kernels::MixedResidualForward>(k, &MixedKernels::residual_forward,
                                               {x.stored(), z.stored(), bias.stored(), y.stored(), rows, width});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
      k.residual_forward({.x = xs.data(), .z = zs.data(), .y = want.data(), .rows = rows, .width = width});
      run_mixed<kernels::MixedResidualForward>(k, &MixedKernels::residual_forward,
                                               {x.stored(), z.stored(), {}, y.stored(), rows, width});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
      k.add({xs.data(), zs.data(), want_sum.data(), n});
      run_mixed<kernels::MixedAdd>(k, &MixedKernels::add, {x.stored(), z.stored(), sum.stored(), n});
      REQUIRE(bit_difference(sum.values(), sum.rounded(want_sum)) == "");
      run_mixed<kernels::MixedCopy>(k, &MixedKernels::copy, {x.stored(), copy.stored(), n});
      REQUIRE(bit_difference(copy.values(), copy.rounded(xs)) == "");
      run_mixed<kernels::MixedFill>(k, &MixedKernels::fill, {filled.stored(), n, 0.3f});
      REQUIRE(bit_difference(filled.values(), filled.rounded(Floats(static_cast<size_t>(n), 0.3f))) == "");
      double total = -1;
      run_mixed<kernels::MixedSquaredNorm>(k, &MixedKernels::squared_norm, {x.stored(), n, &total});
      REQUIRE(total == k.squared_norm(xs.data(), n));
      REQUIRE(total > 0);
      kernels::Dropout drop{.sequences = 2,
                            .tokens = 9,
                            .width = width,
                            .sequence_begin = 3,
                            .token_begin = 9,
                            .tokens_total = 27,
                            .width_begin = 2,
                            .width_total = width + 4,
                            .p = 0.4f,
                            .key = {.seed = 3, .use = RandomUse::kDropout, .tensor = 1, .step = 2}};
      run_mixed<kernels::MixedDropout>(k, &MixedKernels::dropout, {z.stored(), drop});
      drop.z = want_drop.data();
      k.dropout(drop);
      REQUIRE(bit_difference(z.values(), z.rounded(want_drop)) == "");
      for (const bool accumulate : {false, true}) {
        Packed dbias = random_packed(t.gradient, width, 4);
        Floats want_bias = dbias.values();
        k.bias_weight({xs.data(), want_bias.data(), tokens, width, accumulate});
        run_mixed<kernels::MixedBiasWeight>(k, &MixedKernels::bias_weight, {x.stored(), dbias.stored(), tokens, width, accumulate});
        REQUIRE(bit_difference(dbias.values(), dbias.rounded(want_bias)) == "");
      }
    }
  });
}

TEST_CASE("mixed: embedding and positions") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int64_t width : {5, 130}) {
      // The rank holds rows 10 .. 39 of a vocabulary of 50: some ids are elsewhere.
      constexpr int64_t kSequences = 3, kTokens = 14, kRows = kSequences * kTokens, kBegin = 10, kHeld = 30;
      const auto ids = random_ids(kRows, 9, 50);
      Packed table = random_packed(t.parameter, kHeld * width, 1), x(t.activation, kRows * width);
      Packed dx = random_packed(t.activation, kRows * width, 2);
      const Floats tables = table.values(), dxs = dx.values();
      Floats want = poisoned(kRows * width);
      k.embed_forward({ids.data(), tables.data(), want.data(), kRows, width, kBegin, kHeld});
      run_mixed<kernels::MixedEmbedForward>(k, &MixedKernels::embed_forward,
                                            {ids.data(), table.stored(), x.stored(), kRows, width, kBegin, kHeld});
      REQUIRE(bit_difference(x.values(), x.rounded(want)) == "");

      Packed positions = random_packed(t.parameter, kTokens * width, 3), y(t.activation, kRows * width);
      const Floats xs = x.values(), ps = positions.values();
      k.positions_forward({xs.data(), ps.data(), want.data(), kSequences, kTokens, width});
      run_mixed<kernels::MixedPositionsForward>(k, &MixedKernels::positions_forward,
                                                {x.stored(), positions.stored(), y.stored(), kSequences, kTokens, width});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");

      for (const bool accumulate : {false, true}) {
        Packed dtable = random_packed(t.gradient, kHeld * width, 4), dpositions = random_packed(t.gradient, kTokens * width, 5);
        Floats want_table = dtable.values(), want_positions = dpositions.values();
        kernels::EmbedWeight embed{ids.data(), dxs.data(), want_table.data(), kSequences, kTokens, width,
                                   kBegin,     kHeld,      accumulate};
        Scratch scratch(kernels::embed_scratch_bytes(embed));
        embed.scratch = scratch.data();
        k.embed_weight(embed);
        run_mixed<kernels::MixedEmbedWeight>(
            k, &MixedKernels::embed_weight,
            {ids.data(), dx.stored(), dtable.stored(), kSequences, kTokens, width, kBegin, kHeld, accumulate});
        REQUIRE(bit_difference(dtable.values(), dtable.rounded(want_table)) == "");
        k.positions_weight({dxs.data(), want_positions.data(), kSequences, kTokens, width, accumulate});
        run_mixed<kernels::MixedPositionsWeight>(k, &MixedKernels::positions_weight,
                                                 {dx.stored(), dpositions.stored(), kSequences, kTokens, width, accumulate});
        REQUIRE(bit_difference(dpositions.values(), dpositions.rounded(want_positions)) == "");
      }
    }
  });
}

TEST_CASE("mixed: cross-entropy in every form") {
  using Form = kernels::MixedCrossEntropy::Form;
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const int64_t vocab : {11, 1500, 5000}) {
      const kernels::Tokens tokens{2, 19, {}};
      const int64_t rows = tokens.rows(), n = rows * vocab;
      const Packed logits = random_packed(t.activation, n, 1, 5.0f);
      const auto targets = random_ids(rows, 2, static_cast<int32_t>(vocab));
      const Floats whole = logits.values();
      Floats max(static_cast<size_t>(rows)), sums(static_cast<size_t>(2 * rows));
      const auto compare = [&](Form form, void (*const fp32)(const kernels::CrossEntropy&), bool gradient, bool loss) {
        Floats want = whole, want_nll = poisoned(2), nll = poisoned(2);
        Packed got = logits;
        kernels::CrossEntropy args{.targets = targets.data(),
                                   .nll = want_nll.data(),
                                   .max = max.data(),
                                   .sums = sums.data(),
                                   .tokens = tokens,
                                   .vocab = vocab,
                                   .loss_tokens = 40};
        args.logits = want.data();
        fp32(args);
        args.logits = nullptr;
        args.nll = nll.data();
        run_mixed<kernels::MixedCrossEntropy>(k, &MixedKernels::cross_entropy, {form, got.stored(), args});
        REQUIRE(bit_difference(got.values(), gradient ? got.rounded(want) : whole) == "");
        if (loss) REQUIRE(bit_difference(nll, want_nll) == "");
      };
      compare(Form::kFused, k.cross_entropy_fused, true, true);
      compare(Form::kLossOnly, k.cross_entropy_loss_only, false, true);
      Floats want_max = max;
      compare(Form::kMax, k.cross_entropy_max, false, false);
      Floats again = whole;
      want_max = poisoned(rows);
      Floats want_sums = poisoned(2 * rows);
      kernels::CrossEntropy args{
          .logits = again.data(), .targets = targets.data(), .max = want_max.data(), .tokens = tokens, .vocab = vocab};
      args.sums = want_sums.data();
      k.cross_entropy_max(args);
      k.cross_entropy_sum(args);
      REQUIRE(bit_difference(max, want_max) == "");
      compare(Form::kSum, k.cross_entropy_sum, false, false);
      REQUIRE(bit_difference(sums, want_sums) == "");
      compare(Form::kGrad, k.cross_entropy_grad, true, true);
    }
  });
}

TEST_CASE("mixed: optimizers on a master copy, with a gradient factor and a narrow parameter") {
  for_types([](const Types& t, const kernels::Kernels& k) {
    for (const float factor : {1.0f, 0.37f}) {
      const int64_t n = 4099;
      Packed grad = random_packed(t.gradient, n, 1), m = random_packed(t.parameter, n, 2, 0.1f), copy(t.activation, n);
      Packed v(t.parameter, Floats(static_cast<size_t>(n), 0.01f));
      Packed master = random_packed(DType::f32, n, 3);
      Floats g = grad.values(), want = master.values(), want_m = m.values(), want_v = v.values();
      if (factor != 1)
        for (float& e : g) e *= factor;
      kernels::AdamW adamw{.n = n, .step = 6, .learning_rate = 0.01f, .weight_decay = 0.1f};
      run_mixed<kernels::MixedAdamW>(k, &MixedKernels::adamw,
                                     {.grad = grad.stored(),
                                      .param = master.stored(),
                                      .m = m.stored(),
                                      .v = v.stored(),
                                      .copy = copy.stored(),
                                      .factor = factor,
                                      .adamw = adamw});
      adamw.grad = g.data();
      adamw.param = want.data();
      adamw.m = want_m.data();
      adamw.v = want_v.data();
      // run_mixed ran the kernel once: the counting call does nothing.
      k.adamw(adamw);
      REQUIRE(bit_difference(master.values(), want) == "");
      REQUIRE(bit_difference(m.values(), m.rounded(want_m)) == "");
      REQUIRE(bit_difference(v.values(), v.rounded(want_v)) == "");
      REQUIRE(bit_difference(copy.values(), copy.rounded(want)) == "");
      kernels::Sgd sgd{.n = n, .learning_rate = 0.5f, .weight_decay = 0.1f};
      run_mixed<kernels::MixedSgd>(
          k, &MixedKernels::sgd,
          {.grad = grad.stored(), .param = master.stored(), .copy = copy.stored(), .factor = factor, .sgd = sgd});
      k.sgd({g.data(), want.data(), n, 0.5f, 0.1f});
      REQUIRE(bit_difference(master.values(), want) == "");
      REQUIRE(bit_difference(copy.values(), copy.rounded(want)) == "");
      kernels::Lion lion{.n = n, .learning_rate = 0.01f, .weight_decay = 0.1f};
      want_m = m.values();
      run_mixed<kernels::MixedLion>(k, &MixedKernels::lion,
                                    {.grad = grad.stored(),
                                     .param = master.stored(),
                                     .m = m.stored(),
                                     .copy = copy.stored(),
                                     .factor = factor,
                                     .lion = lion});
      k.lion({g.data(), want.data(), want_m.data(), n, 0.01f, 0.9f, 0.99f, 0.1f});
      REQUIRE(bit_difference(master.values(), want) == "");
      REQUIRE(bit_difference(m.values(), m.rounded(want_m)) == "");
      REQUIRE(bit_difference(copy.values(), copy.rounded(want)) == "");
      // Codes of two blocks of 2048 and one of 3, the last beyond a window of 4096.
      const auto size = static_cast<size_t>(n);
      std::vector<uint8_t> m8(size, 200), v8(size, 100), want_m8 = m8, want_v8 = v8;
      Floats m_scale(3, 0.5f), v_scale(3, 0.25f), want_m_scale = m_scale, want_v_scale = v_scale, scratch(2 * kMomentBlock);
      kernels::AdamW8bit coded{.n = n, .step = 6, .learning_rate = 0.01f, .weight_decay = 0.1f};
      run_mixed<kernels::MixedAdamW8bit>(k, &MixedKernels::adamw8bit,
                                         {.grad = grad.stored(),
                                          .param = master.stored(),
                                          .m = m8.data(),
                                          .v = v8.data(),
                                          .m_scale = m_scale.data(),
                                          .v_scale = v_scale.data(),
                                          .factor = factor,
                                          .adamw = coded});
      coded.grad = g.data();
      coded.param = want.data();
      coded.m = want_m8.data();
      coded.v = want_v8.data();
      coded.m_scale = want_m_scale.data();
      coded.v_scale = want_v_scale.data();
      coded.scratch = scratch.data();
      k.adamw8bit(coded);
      REQUIRE(bit_difference(master.values(), want) == "");
      REQUIRE(m8 == want_m8);
      REQUIRE(v8 == want_v8);
      REQUIRE(bit_difference(m_scale, want_m_scale) == "");
      REQUIRE(bit_difference(v_scale, want_v_scale) == "");
    }
  });
}

}  // namespace shardlab::testing
