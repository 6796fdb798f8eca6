// Every kernel against the reference's operation, bit for bit: both were written from docs/canonical-order.md, apart from one
// another.
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/ops.h"
#include "tests/numerics/reference/order.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Values = reference::Tensor<float>;

Values normal(int64_t n, uint32_t name, double deviation = 1.0) {
  Values v;
  for (int64_t i = 0; i < n; ++i)
    v.push_back(reference::initial_normal({11, RandomUse::kInitialise, name, 0}, static_cast<uint64_t>(i), deviation));
  return v;
}

/// Room for a result, full of what no result is.
Values poisoned(int64_t n) { return Values(static_cast<size_t>(n), std::nanf("")); }

/// Where two tensors differ in a bit.
std::string difference(const Values& reference, const Values& kernel) {
  if (reference.size() != kernel.size()) return fmt::format("{} elements, not {}", kernel.size(), reference.size());
  for (size_t i = 0; i < reference.size(); ++i)
    if (std::bit_cast<uint32_t>(reference[i]) != std::bit_cast<uint32_t>(kernel[i]))
      return fmt::format("element {}: kernel {:.9g}, reference {:.9g}", i, kernel[i], reference[i]);
  return "";
}
#define REQUIRE_SAME(reference, kernel) REQUIRE(difference(reference, kernel) == "")

/// Sequence `i` of a batch whose sequences have `n` elements.
Values part(const Values& v, int64_t i, int64_t n) { return Values(v.begin() + i * n, v.begin() + (i + 1) * n); }
void append(Values& to, const Values& from) { to.insert(to.end(), from.begin(), from.end()); }

/// tree over the sequences' contributions.
template <class Contribution>
Values tree_of(int64_t sequences, const Contribution& contribution) {
  return tree_sum(0, sequences, contribution, [](Values a, const Values& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  });
}

/// Kernels that run here, each in turn.
template <class Test>
void each_variant(const Test& test) {
  for (const kernels::Kernels* k : kernels::all_variants()) {
    if (!kernels::runs_here(*k)) continue;
    INFO(k->name);
    test(*k);
  }
}

/// Scratch of a kernel call, aligned as kernels ask.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(std::aligned_alloc(64, static_cast<size_t>(bytes / 64 + 1) * 64)) {}
  void* memory() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
};

struct Size {
  int64_t sequences, tokens, in, out;
};
const std::vector<Size> kSizes{{1, 1, 1, 1}, {1, 5, 7, 3}, {3, 17, 33, 20}, {4, 24, 48, 112}, {2, 40, 130, 65}};

}  // namespace

TEST_CASE("linear: F, I, W and the bias's gradient") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, in, out] : kSizes) {
      INFO(fmt::format("b{} s{} in{} out{}", b, s, in, out));
      const Values x = normal(b * s * in, 1), w = normal(out * in, 2), bias = normal(out, 3), dy = normal(b * s * out, 4);
      Values y = poisoned(b * s * out), dx = poisoned(b * s * in), dw = poisoned(out * in), dbias = poisoned(out);
      kernels::LinearForward f{x.data(), w.data(), bias.data(), y.data(), b * s, in, out, {}, true, nullptr};
      kernels::LinearInput i{dy.data(), w.data(), dx.data(), b * s, in, out, {}, true, nullptr};
      kernels::LinearWeight g{x.data(), dy.data(), dw.data(), dbias.data(), {b, s, {}}, in, out, false, true, nullptr};
      const Scratch f_scratch(linear_scratch_bytes(f)), i_scratch(linear_scratch_bytes(i)), g_scratch(linear_scratch_bytes(g));
      f.scratch = f_scratch.memory(), i.scratch = i_scratch.memory(), g.scratch = g_scratch.memory();
      k.linear_forward(f);
      k.linear_input(i);
      k.linear_weight(g);
      REQUIRE_SAME(reference::linear(x, w, &bias, b * s, in, out), y);
      REQUIRE_SAME(reference::linear_input(dy, w, b * s, in, out), dx);
      REQUIRE_SAME(
          tree_of(b, [&, s = s, in = in, out = out](
                         int64_t n) { return reference::linear_weight(part(x, n, s * in), part(dy, n, s * out), s, in, out); }),
          dw);
      REQUIRE_SAME(tree_of(b, [&, s = s, out = out](int64_t n) { return reference::bias_gradient(part(dy, n, s * out), s, out); }),
                   dbias);
    }
  });
}

TEST_CASE("norm: F, I and W of LayerNorm and RMSNorm") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, h, unused] : kSizes)
      for (const bool rms : {false, true}) {
        INFO(fmt::format("b{} s{} h{} rms {}", b, s, h, rms));
        const int64_t columns = rms ? 1 : 2;
        const Values x = normal(b * s * h, 1), gamma = normal(h, 2), beta = normal(h, 3), dy = normal(b * s * h, 4),
                     residual = normal(b * s * h, 5);
        Values y = poisoned(b * s * h), stats = poisoned(b * s * columns), dx = poisoned(b * s * h), dgamma = poisoned(h),
               dbeta = poisoned(h);
        k.norm_forward({x.data(), gamma.data(), rms ? nullptr : beta.data(), y.data(), stats.data(), b * s, h, 1e-5f, rms});
        k.norm_input({dy.data(), x.data(), gamma.data(), stats.data(), residual.data(), dx.data(), b * s, h, rms});
        k.norm_weight({dy.data(), x.data(), stats.data(), dgamma.data(), rms ? nullptr : dbeta.data(), {b, s, {}}, h, rms, false});

        const auto want = reference::norm(x, gamma, rms ? nullptr : &beta, 1e-5f, b * s, h);
        REQUIRE_SAME(want.y, y);
        Values want_stats;
        for (size_t t = 0; t < want.mean.size(); ++t) {
          if (!rms) want_stats.push_back(want.mean[t]);
          want_stats.push_back(want.inverse[t]);
        }
        REQUIRE_SAME(want_stats, stats);
        Values want_dx = reference::norm_input(dy, x, gamma, want, !rms, b * s, h);
        for (size_t i = 0; i < want_dx.size(); ++i) want_dx[i] = residual[i] + want_dx[i];
        REQUIRE_SAME(want_dx, dx);
        REQUIRE_SAME(tree_of(b,
                             [&](int64_t n) {
                               const reference::Normed<float> one{{}, part(want.mean, n, s), part(want.inverse, n, s)};
                               return reference::norm_weight(part(dy, n, s * h), part(x, n, s * h), one, s, h);
                             }),
                     dgamma);
        if (!rms) REQUIRE_SAME(tree_of(b, [&](int64_t n) { return reference::bias_gradient(part(dy, n, s * h), s, h); }), dbeta);
      }
  });
}

TEST_CASE("rope and attention, grouped queries included") {
  each_variant([](const kernels::Kernels& k) {
    for (const reference::Heads heads : {reference::Heads{1, 1, 2}, {4, 4, 8}, {8, 4, 6}, {6, 2, 16}, {3, 1, 34}})
      for (const int64_t s : {1, 5, 24, 37}) {
        const int64_t b = 2, width = heads.width(), inner = heads.heads * heads.dim;
        INFO(fmt::format("heads {} kv {} dim {} s {}", heads.heads, heads.kv_heads, heads.dim, s));
        const Values qkv = normal(b * s * width, 1), dout = normal(b * s * inner, 2);
        const int q = static_cast<int>(heads.heads), kv = static_cast<int>(heads.kv_heads), d = static_cast<int>(heads.dim);
        for (const bool backward : {false, true}) {
          Values turned = qkv, want;
          k.rope({turned.data(), b, s, q, kv, d, 0, 10000.0f, backward, nullptr});
          for (int64_t n = 0; n < b; ++n) {
            Values one = part(qkv, n, s * width);
            reference::rope(one, heads, 10000.0f, backward ? -1 : 1, s);
            append(want, one);
          }
          REQUIRE_SAME(want, turned);
        }
        Values o = poisoned(b * s * inner), lse = poisoned(b * heads.heads * s), dqkv = poisoned(b * s * width);
        kernels::AttentionForward f{{b, s, q, kv, d}, qkv.data(), o.data(), lse.data(), nullptr};
        const Scratch f_scratch(attention_scratch_bytes(f));
        f.scratch = f_scratch.memory();
        k.attention_forward(f);
        kernels::AttentionInput i{{b, s, q, kv, d}, dout.data(), o.data(), lse.data(), qkv.data(), dqkv.data(), nullptr};
        const Scratch i_scratch(attention_scratch_bytes(i));
        i.scratch = i_scratch.memory();
        k.attention_input(i);
        Values want_o, want_lse, want_dqkv;
        for (int64_t n = 0; n < b; ++n) {
          const Values one = part(qkv, n, s * width);
          const auto want = reference::attention(one, heads, s);
          append(want_o, want.o);
          append(want_lse, want.lse);
          append(want_dqkv, reference::attention_input(part(dout, n, s * inner), want, one, heads, s));
        }
        REQUIRE_SAME(want_o, o);
        REQUIRE_SAME(want_lse, lse);
        REQUIRE_SAME(want_dqkv, dqkv);
      }
  });
}

TEST_CASE("activations, residual and dropout") {
  each_variant([](const kernels::Kernels& k) {
    for (const int64_t n : {1, 16, 37, 200}) {
      INFO("n " << n);
      for (const bool swiglu : {false, true}) {
        const Values u = normal(swiglu ? 2 * n : n, 1, 3.0), da = normal(n, 2);
        Values a = poisoned(n), du = poisoned(static_cast<int64_t>(u.size()));
        k.activation_forward({u.data(), a.data(), n, swiglu});
        k.activation_input({da.data(), u.data(), du.data(), n, swiglu});
        REQUIRE_SAME(reference::activation(u, swiglu), a);
        REQUIRE_SAME(reference::activation_input(da, u, swiglu), du);
      }
      const Values x = normal(3 * n, 3), z = normal(3 * n, 4), bias = normal(n, 5);
      Values y = poisoned(3 * n), want(static_cast<size_t>(3 * n));
      k.residual_forward({x.data(), z.data(), bias.data(), y.data(), 3, n});
      for (size_t i = 0; i < want.size(); ++i) want[i] = x[i] + (z[i] + bias[i % static_cast<size_t>(n)]);
      REQUIRE_SAME(want, y);
      for (const float p : {0.0f, 0.1f, 0.25f, 0.5f, 0.9f}) {
        const RandomKey key{5, RandomUse::kDropout, 6, 3};
        Values dropped = x, kept = x;
        k.dropout({dropped.data(), 1, 3, n, 2, 0, 0, 0, 0, p, key});
        reference::dropout(kept, p, key, static_cast<uint64_t>(2 * 3 * n));
        REQUIRE_SAME(kept, dropped);
      }
    }
  });
}

TEST_CASE("embedding, positions and their gradients") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, h, vocab] : kSizes) {
      INFO(fmt::format("b{} s{} h{} V{}", b, s, h, vocab));
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < b * s; ++i)
        ids.push_back(static_cast<int32_t>(random_bits({1, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) %
                                           static_cast<uint64_t>(vocab)));
      const Values dx = normal(b * s * h, 1);
      Values dtable = poisoned(vocab * h), dpositions = poisoned(s * h);
      kernels::EmbedWeight w{ids.data(), dx.data(), dtable.data(), b, s, h, 0, vocab, false, nullptr};
      const Scratch scratch(embed_scratch_bytes(w));
      w.scratch = scratch.memory();
      k.embed_weight(w);
      k.positions_weight({dx.data(), dpositions.data(), b, s, h, false});
      REQUIRE_SAME(tree_of(b,
                           [&](int64_t n) {
                             Values sum(static_cast<size_t>(vocab * h), 0.0f);
                             for (int64_t t = 0; t < s; ++t)
                               for (int64_t i = 0; i < h; ++i)
                                 sum[static_cast<size_t>(ids[static_cast<size_t>(n * s + t)] * h + i)] +=
                                     dx[static_cast<size_t>((n * s + t) * h + i)];
                             return sum;
                           }),
                   dtable);
      REQUIRE_SAME(tree_of(b, [&](int64_t n) { return part(dx, n, s * h); }), dpositions);
    }
  });
}

TEST_CASE("optimizers, with and without weight decay, over several steps") {
  each_variant([](const kernels::Kernels& k) {
    for (const float decay : {0.0f, 0.1f}) {
      const int64_t n = 77;
      Values w = normal(n, 1), want_w = w, sgd_w = w, want_sgd = w;
      Values m(w.size(), 0.0f), v = m, want_m = m, want_v = m;
      for (int64_t step = 0; step < 4; ++step) {
        INFO("step " << step << " decay " << decay);
        const Values g = normal(n, 2 + static_cast<uint32_t>(step), 0.1);
        k.sgd({g.data(), sgd_w.data(), n, 0.3f, decay});
        reference::sgd(want_sgd, g, 0.3f, decay);
        REQUIRE_SAME(want_sgd, sgd_w);
        k.adamw({g.data(), w.data(), m.data(), v.data(), n, step, 0.01f, 0.9f, 0.95f, 1e-8f, decay});
        reference::adamw(want_w, want_m, want_v, g, step, {0.01f, 0.9f, 0.95f, 1e-8f, decay});
        REQUIRE_SAME(want_w, w);
        REQUIRE_SAME(want_m, m);
        REQUIRE_SAME(want_v, v);
      }
    }
  });
}

TEST_CASE("cross-entropy") {
  each_variant([](const kernels::Kernels& k) {
    for (const auto& [b, s, unused, vocab] : kSizes) {
      INFO(fmt::format("b{} s{} V{}", b, s, vocab));
      const Values logits = normal(b * s * vocab, 1, 4.0);
      std::vector<int32_t> targets;
      for (int64_t i = 0; i < b * s; ++i)
        targets.push_back(static_cast<int32_t>(random_bits({2, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) %
                                               static_cast<uint64_t>(vocab)));
      Values dlogits = logits, nll = poisoned(b), want_dlogits, want_nll;
      kernels::CrossEntropy c;
      c.logits = dlogits.data();
      c.targets = targets.data();
      c.nll = nll.data();
      c.tokens = {b, s, {}};
      c.vocab = vocab;
      c.loss_tokens = 3 * b * s;
      k.cross_entropy_fused(c);
      for (int64_t n = 0; n < b; ++n) {
        const auto want = reference::cross_entropy(part(logits, n, s * vocab), targets.data() + n * s, 3 * b * s, s, vocab);
        append(want_dlogits, want.dlogits);
        want_nll.push_back(want.nll);
      }
      REQUIRE_SAME(want_dlogits, dlogits);
      REQUIRE_SAME(want_nll, nll);
    }
  });
}

}  // namespace shardlab::testing
