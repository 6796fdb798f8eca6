// The emulation itself: barriers, warp operations, matrix fragments, asynchronous copies, number formats.
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/cuda/thread.h"
#include "tests/test.h"

namespace shardlab::gpu::emulated {
namespace {

using Body = std::function<void(const Thread&)>;

void run(const Geometry& g, const Body& body, bool reversed = false) {
  emulate::Settings settings{.reversed = reversed};
  emulate::run_grid(
      "test", g, &settings, [](const void* b, emulate::Lane& lane) { (*static_cast<const Body*>(b))(Thread(lane)); }, &body);
}

}  // namespace

TEST_CASE("emulation: a barrier separates writes from reads, whatever the order of threads") {
  for (const bool reversed : {false, true}) {
    std::vector<int> seen(2 * 96);
    run(
        {.x = 2, .threads = 96, .shared = 96 * 4},
        [&](const Thread& t) {
          int* shared = reinterpret_cast<int*>(t.shared());
          shared[t.index()] = t.index() * 10;
          t.barrier();
          seen[static_cast<size_t>(t.block_x() * 96 + t.index())] = shared[(t.index() + 41) % 96];
        },
        reversed);
    for (int i = 0; i < 2 * 96; ++i) REQUIRE(seen[static_cast<size_t>(i)] == (i % 96 + 41) % 96 * 10);
  }
}

TEST_CASE("emulation: without a barrier the order of threads shows") {
  const auto last_writer = [](bool reversed) {
    int last = -1;
    run(
        {.threads = 64}, [&](const Thread& t) { last = t.index(); }, reversed);
    return last;
  };
  REQUIRE(last_writer(false) == 63);
  REQUIRE(last_writer(true) == 0);
}

TEST_CASE("emulation: shuffles and ballots are the warp's own") {
  std::vector<float> sum(64);
  std::vector<uint32_t> votes(64);
  run({.threads = 64}, [&](const Thread& t) {
    float x = static_cast<float>(t.index());
    for (int mask = 16; mask >= 1; mask /= 2) x += t.shuffle_xor(x, mask);
    sum[static_cast<size_t>(t.index())] = x;
    votes[static_cast<size_t>(t.index())] = t.ballot(t.index() % 3 == 0);
  });
  for (size_t i = 0; i < 64; ++i) REQUIRE(sum[i] == (i < 32 ? 496.0f : 1520.0f));
  uint32_t low = 0, high = 0;
  for (int i = 0; i < 32; ++i) {
    low |= (i % 3 == 0 ? 1u : 0u) << i;
    high |= ((i + 32) % 3 == 0 ? 1u : 0u) << i;
  }
  REQUIRE(votes[5] == low);
  REQUIRE(votes[40] == high);
}

TEST_CASE("emulation: matrix loads and products multiply 16 x 16 by 16 x 8 as the fragments' layout says") {
  // a[16][16], b[8][16] (rows of k) and b again as [16][8] for the transposed load: both must give a b^T.
  struct Shared {
    bf16 a[16][16], b[16][16], b_rows[16][16];
  };
  std::vector<float> straight(16 * 16), transposed(16 * 16);
  const auto a_at = [](int i, int k) { return static_cast<float>(i - 3 * (k % 5)); };
  const auto b_at = [](int n, int k) { return static_cast<float>((n * 7 + k) % 11 - 4); };
  run({.threads = 32, .shared = sizeof(Shared)}, [&](const Thread& t) {
    Shared& s = *reinterpret_cast<Shared*>(t.shared());
    if (t.index() == 0)
      for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k) {
          s.a[i][k] = rounded<bf16>(a_at(i, k));
          s.b[i][k] = rounded<bf16>(b_at(i, k));
          s.b_rows[k][i] = rounded<bf16>(b_at(i, k));
        }
    t.sync_warp();
    const int lane = t.lane();
    uint32_t left[4], right[4], across[4];
    t.load_matrices<false>(left, &s.a[lane % 16][lane / 16 * 8]);
    t.load_matrices<false>(right, &s.b[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    t.load_matrices<true>(across, &s.b_rows[lane % 16][lane / 16 * 8]);
    for (int block = 0; block < 2; ++block) {
      float c[4] = {}, d[4] = {};
      t.multiply_add<bf16>(c, left, right[2 * block], right[2 * block + 1]);
      t.multiply_add<bf16>(d, left, across[2 * block], across[2 * block + 1]);
      for (int e = 0; e < 4; ++e) {
        const size_t at = static_cast<size_t>((lane / 4 + e / 2 * 8) * 16 + block * 8 + lane % 4 * 2 + e % 2);
        straight[at] = c[e];
        transposed[at] = d[e];
      }
    }
  });
  for (int i = 0; i < 16; ++i)
    for (int n = 0; n < 16; ++n) {
      float want = 0;
      for (int k = 0; k < 16; ++k) want += a_at(i, k) * b_at(n, k);
      REQUIRE(straight[static_cast<size_t>(i * 16 + n)] == want);
      REQUIRE(transposed[static_cast<size_t>(i * 16 + n)] == want);
    }
}

TEST_CASE("emulation: an asynchronous copy lands when it is waited for") {
  const float source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  run({.threads = 32, .shared = 32}, [&](const Thread& t) {
    if (t.index() != 0) return;
    float* shared = reinterpret_cast<float*>(t.shared());
    t.copy_later(shared, source, true);
    t.commit_copies();
    t.copy_later(shared + 4, source + 4, false);
    t.commit_copies();
    REQUIRE(std::isnan(shared[0]));
    t.wait_copies<1>();
    REQUIRE(shared[3] == 4);
    REQUIRE(std::isnan(shared[4]));
    t.wait_copies<0>();
    REQUIRE(shared[4] == 0);
  });
}

TEST_CASE("numbers: every f16 value survives a round trip, and values between two go to the nearer, to the even when halfway") {
  float before = -INFINITY;
  for (int step = 0; step < 2 * 0x7c01; ++step) {
    // From -infinity up to infinity; the two zeros are one.
    const bool negative = step < 0x7c01;
    const auto bits = static_cast<uint16_t>(negative ? 0x8000 + 0x7c00 - step : step - 0x7c01);
    const float x = value_of(f16{bits});
    REQUIRE(rounded<f16>(x).bits == bits);
    if (step > 0 && x != before) {
      REQUIRE(x > before);
      if (std::isfinite(before) && std::isfinite(x)) {
        const float middle = before + (x - before) / 2;  // exact
        const auto even = static_cast<uint16_t>(bits % 2 == 0 ? bits : (negative ? bits + 1 : bits - 1));
        REQUIRE(value_of(f16{rounded<f16>(middle).bits}) == value_of(f16{even}));
        REQUIRE(value_of(rounded<f16>(std::nextafterf(middle, INFINITY))) == x);
        REQUIRE(value_of(rounded<f16>(std::nextafterf(middle, -INFINITY))) == before);
      }
    }
    before = x;
  }
  REQUIRE(std::isinf(value_of(rounded<f16>(65520.0f))));
  REQUIRE(value_of(rounded<f16>(65519.0f)) == 65504.0f);
  REQUIRE(std::isnan(value_of(rounded<f16>(NAN))));
}

TEST_CASE("numbers: bf16 rounds to nearest even") {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float x = value_of(bf16{static_cast<uint16_t>(bits)}), next = value_of(bf16{static_cast<uint16_t>(bits + 1)});
    REQUIRE(rounded<bf16>(x).bits == bits);
    REQUIRE(rounded<bf16>(-x).bits == (bits | 0x8000));
    if (!std::isfinite(next)) continue;
    const float middle = x + (next - x) / 2;
    REQUIRE(rounded<bf16>(middle).bits == bits + bits % 2);
    if (bits > 0) REQUIRE(rounded<bf16>(std::nextafterf(middle, 0)).bits == bits);
    REQUIRE(rounded<bf16>(std::nextafterf(middle, INFINITY)).bits == bits + 1);
  }
  REQUIRE(std::isinf(value_of(rounded<bf16>(3.4e38f))));
  REQUIRE(std::isnan(value_of(rounded<bf16>(NAN))));
}

}  // namespace shardlab::gpu::emulated
