// Dropout and initialisation: functions of the logical element.
#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_random {
namespace {

const RandomKey kKey{.seed = 123456789012345, .use = RandomUse::kDropout, .tensor = 7, .step = 3};

}  // namespace

TEST_CASE("dropout: each element follows random_bits, and kept ones are scaled") {
  for (const float p : {0.0f, 0.1f, 0.5f, 0.999f})
    for (const int64_t width : {1, 3, 17, 64, 131}) {
      const int64_t sequences = 2, tokens = 5;
      const Floats z = random_floats(sequences * tokens * width, 1);
      Floats want;
      for (size_t i = 0; i < z.size(); ++i) {
        const bool kept = static_cast<double>(random_bits(kKey, i)) >= static_cast<double>(p) * 4294967296.0;
        want.push_back(kept ? z[i] * (1.0f / (1.0f - p)) : 0.0f);
      }
      REQUIRE(bit_difference(
                  on_every_variant([&](const kernels::Kernels& k) {
                    Floats out = z;
                    k.dropout({.z = out.data(), .sequences = sequences, .tokens = tokens, .width = width, .p = p, .key = kKey});
                    return out;
                  }),
                  want) == "");
    }
}

TEST_CASE("dropout: the share of kept elements is 1 - p") {
  const int64_t n = 200000;
  const Floats z = random_floats(n, 2);
  Floats out = z;
  kernels::kernels_for_this_processor().dropout({.z = out.data(), .tokens = 1, .width = n, .p = 0.25f, .key = kKey});
  int64_t kept = 0;
  for (const float v : out) kept += v != 0;
  REQUIRE(std::abs(static_cast<double>(kept) / n - 0.75) < 0.005);  // five standard deviations
}

TEST_CASE("dropout: masks do not depend on the cut over sequences, tokens and columns") {
  const int64_t sequences = 4, tokens = 6, width = 22;
  const Floats z = random_floats(sequences * tokens * width, 3);
  for (const kernels::Kernels* k : variants_here()) {
    Floats whole = z, pieces = z;
    k->dropout({.z = whole.data(), .sequences = sequences, .tokens = tokens, .width = width, .p = 0.4f, .key = kKey});
    for (const int64_t b0 : {0, 2})
      for (const int64_t t0 : {0, 3})
        for (const int64_t c0 : {0, 11}) {
          Floats mine;
          for (int64_t b = b0; b < b0 + 2; ++b)
            for (int64_t t = t0; t < t0 + 3; ++t)
              for (int64_t c = c0; c < c0 + 11; ++c) mine.push_back(z[(b * tokens + t) * width + c]);
          k->dropout({.z = mine.data(),
                      .sequences = 2,
                      .tokens = 3,
                      .width = 11,
                      .sequence_begin = b0,
                      .token_begin = t0,
                      .tokens_total = tokens,
                      .width_begin = c0,
                      .width_total = width,
                      .p = 0.4f,
                      .key = kKey});
          size_t at = 0;
          for (int64_t b = b0; b < b0 + 2; ++b)
            for (int64_t t = t0; t < t0 + 3; ++t)
              for (int64_t c = c0; c < c0 + 11; ++c) pieces[(b * tokens + t) * width + c] = mine[at++];
        }
    REQUIRE(bit_difference(pieces, whole) == "");
  }
}

TEST_CASE("initialise: normal values of the stated deviation that do not depend on the cut") {
  const std::vector<int64_t> shape{37, 5, 123};
  const int64_t n = 37 * 5 * 123;
  const RandomKey key{.seed = 9, .tensor = 4};
  const auto block = [&](std::vector<int64_t> origin, std::vector<int64_t> extent) {
    Floats values = poisoned(extent[0] * extent[1] * extent[2]);
    kernels::initialise_normal(
        {.shape = shape, .origin = origin, .extent = extent, .deviation = 0.02, .key = key, .values = values.data()});
    return values;
  };
  const Floats whole = block({0, 0, 0}, shape);
  double sum = 0, squares = 0, fourth = 0;
  for (const float v : whole) {
    const double z = v / 0.02;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
  }
  REQUIRE(std::abs(sum / n) < 0.03);
  REQUIRE(std::abs(squares / n - 1) < 0.04);
  REQUIRE(std::abs(fourth / n - 3) < 0.3);
  // A block of 2^18 elements and more, whose rows threads share out.
  const std::vector<int64_t> large{700, 5, 123}, cut{697, 4, 120};
  Floats alone, together;
  for (const int threads : {1, 3, 64}) {
    Floats& values = threads == 1 ? alone : together;
    values = poisoned(cut[0] * cut[1] * cut[2]);
    kernels::initialise_normal({.shape = large,
                                .origin = std::vector<int64_t>{2, 1, 3},
                                .extent = cut,
                                .deviation = 0.02,
                                .key = key,
                                .values = values.data(),
                                .threads = threads});
    if (threads > 1) REQUIRE(bit_difference(together, alone) == "");
  }
  for (const std::vector<int64_t>& origin : {std::vector<int64_t>{0, 0, 0}, {3, 1, 61}, {36, 4, 122}}) {
    const std::vector<int64_t> extent{37 - origin[0], 5 - origin[1], 123 - origin[2]};
    const Floats mine = block(origin, extent);
    Floats want;
    for (int64_t i = origin[0]; i < 37; ++i)
      for (int64_t j = origin[1]; j < 5; ++j)
        for (int64_t c = origin[2]; c < 123; ++c) want.push_back(whole[(i * 5 + j) * 123 + c]);
    REQUIRE(bit_difference(mine, want) == "");
  }
}

}  // namespace shardlab::testing::of_random
