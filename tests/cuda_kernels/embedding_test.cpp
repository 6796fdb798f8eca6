#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_embedding {

TEST_CASE("embed: F copies rows, and gives +0 outside of the part held") {
  for (const DType t : kActivationTypes)
    for (const int64_t width : {3, 16}) {
      const int64_t rows = 9, held = 5, begin = 2;
      const Floats entries = as_stored(random_floats(held * width, 1), t);
      const std::vector<int32_t> ids{0, 2, 6, 7, 4, 3, 2, 5, 1000000};
      Floats want;
      for (const int32_t id : ids)
        for (int64_t c = 0; c < width; ++c)
          want.push_back(id >= begin && id < begin + held ? entries[static_cast<size_t>((id - begin) * width + c)] : 0.0f);
      for (const DType stored : {t, DType::f32})
        REQUIRE(bit_difference(in_both_orders([&] {
                                 const Array there(entries, stored), x(Array::poison(rows * width), t);
                                 const Numbers<int32_t> tokens(ids);
                                 table().embed_forward({tokens.data(), there.in(), x.out(), rows, width, begin, held}, stream());
                                 return x.read();
                               }),
                               want) == "");
    }
}

TEST_CASE("embed: W is the CPU's, bit by bit: tokens in order, tree over sequences; rows without a token are +0 or stay") {
  struct Shape {
    int64_t sequences, tokens, width;
    int32_t vocab;
    int64_t begin, held;
  };
  // The third needs several looks back and several lists; the last holds a part of the table.
  for (const Shape& s :
       {Shape{1, 1, 1, 4, 0, 4}, {3, 17, 20, 5, 0, 5}, {2, 1300, 3, 3, 0, 3}, {2, 40, 520, 9, 0, 9}, {2, 31, 8, 50, 10, 20}})
    for (const bool accumulate : {false, true}) {
      INFO("tokens " << s.tokens << " width " << s.width << " accumulate " << accumulate);
      const std::vector<int32_t> ids = random_ids(s.sequences * s.tokens, 1, s.vocab);
      const Floats dx = random_floats(s.sequences * s.tokens * s.width, 2), old = random_floats(s.held * s.width, 3);
      Floats want = accumulate ? old : poisoned(s.held * s.width);
      kernels::EmbedWeight cpu{ids.data(), dx.data(), want.data(), s.sequences, s.tokens,
                               s.width,    s.begin,   s.held,      accumulate,  nullptr};
      Scratch scratch(embed_scratch_bytes(cpu));
      cpu.scratch = scratch.data();
      kernels::kernels_for_this_processor().embed_weight(cpu);
      REQUIRE(bit_difference(in_both_orders([&] {
                               const Array d(dx, DType::f32), to(accumulate ? old : Array::poison(s.held * s.width), DType::f32);
                               const Numbers<int32_t> tokens(ids);
                               table().embed_weight(
                                   {tokens.data(), d.in(), to.out(), s.sequences, s.tokens, s.width, s.begin, s.held, accumulate},
                                   stream());
                               return to.read();
                             }),
                             want) == "");
    }
}

TEST_CASE("embed: W of two-byte gradients sums in fp32") {
  for (const DType t : {DType::bf16, DType::f16}) {
    const int64_t tokens = 50, width = 12;
    const std::vector<int32_t> ids = random_ids(tokens, 1, 4);
    const Floats dx = as_stored(random_floats(tokens * width, 2), t);
    Doubles want(4 * width);
    for (size_t i = 0; i < dx.size(); ++i) want[static_cast<size_t>(ids[i / width]) * width + i % width] += dx[i];
    const Array d(dx, t), to(Array::poison(4 * width), DType::f32);
    const Numbers<int32_t> there(ids);
    table().embed_weight({there.data(), d.in(), to.out(), 1, tokens, width, 0, 4, false}, stream());
    REQUIRE(difference(to.read(), want, kTolerance) == "");
  }
}

}  // namespace shardlab::testing::of_embedding
