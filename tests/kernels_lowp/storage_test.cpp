// Casts over every bit pattern of every format, against the formats' definitions in fp64.
#include <algorithm>
#include <bit>

#include "tests/kernels_lowp/packed.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

/// A format by its definition.
struct Format {
  DType type;
  int exponent_bits, mantissa_bits;
  bool infinity, saturates;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int codes() const { return 1 << (1 + exponent_bits + mantissa_bits); }
  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  /// The value of a code without its sign; NaN for NaN.
  double size_of(uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1) {
      if (infinity) return mantissa == 0 ? INFINITY : NAN;
      if (mantissa == (1 << mantissa_bits) - 1) return NAN;
    }
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias() - mantissa_bits)
                         : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias() - mantissa_bits);
  }
  double value_of(uint32_t code) const { return (code & sign()) != 0 ? -size_of(code & ~sign()) : size_of(code); }
  /// Codes of finite sizes, ascending: 0 .. finite() - 1.
  uint32_t finite() const {
    uint32_t n = 0;
    while (std::isfinite(size_of(n))) ++n;
    return n;
  }
};
const std::vector<Format> kFormats{{DType::bf16, 8, 7, true, false},
                                   {DType::f16, 5, 10, true, false},
                                   {DType::f8e4m3, 4, 3, false, true},
                                   {DType::f8e5m2, 5, 2, true, true}};

/// Codes as the kernels store them.
std::vector<uint32_t> narrow_codes(const kernels::StorageKernels& s, DType type, const Floats& x) {
  std::vector<uint8_t> bytes(static_cast<size_t>(bytes_of(type, static_cast<int64_t>(x.size()))));
  s.narrow({x.data(), static_cast<int64_t>(x.size()), type, bytes.data()});
  std::vector<uint32_t> codes(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    if (bits_of(type) == 8) {
      codes[i] = bytes[i];
    } else {
      uint16_t code;
      std::memcpy(&code, &bytes[2 * i], 2);
      codes[i] = code;
    }
  }
  return codes;
}

/// The code nearest to x by definition, ties to the even code.
uint32_t nearest(const Format& f, const std::vector<double>& sizes, double x) {
  const uint32_t sign = std::signbit(x) ? f.sign() : 0;
  const double size = std::abs(x);
  const auto last = static_cast<uint32_t>(sizes.size() - 1);
  const auto above = static_cast<uint32_t>(std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin());
  if (above > last) {
    // As if the next binade went on: halfway to its first value and beyond rounds up, to infinity or to the largest.
    const double beyond = sizes[last] + (sizes[last] - sizes[last - 1]);
    return sign | (f.saturates || size < (sizes[last] + beyond) / 2 ? last : last + 1);
  }
  if (sizes[above] == size) return sign | above;
  const double below = size - sizes[above - 1], gap = sizes[above] - sizes[above - 1];
  if (below != gap / 2) return sign | (below < gap / 2 ? above - 1 : above);
  return sign | (above % 2 == 0 ? above : above - 1);
}

std::vector<double> finite_sizes(const Format& f) {
  std::vector<double> sizes(f.finite());
  for (uint32_t c = 0; c < sizes.size(); ++c) sizes[c] = f.size_of(c);
  return sizes;
}

}  // namespace

TEST_CASE("storage: every code widens to its value and narrows back to itself") {
  for (const Format& f : kFormats)
    for (const kernels::Kernels* k : variants_here()) {
      INFO(name_of(f.type) << " on " << k->name);
      const kernels::StorageKernels& s = kernels::storage_kernels(*k);
      const auto n = static_cast<size_t>(f.codes());
      std::vector<uint8_t> bytes(n * static_cast<size_t>(bits_of(f.type)) / 8);
      for (size_t c = 0; c < n; ++c) {
        if (bits_of(f.type) == 8)
          bytes[c] = static_cast<uint8_t>(c);
        else
          bytes[2 * c] = static_cast<uint8_t>(c), bytes[2 * c + 1] = static_cast<uint8_t>(c >> 8);
      }
      Floats x = poisoned(static_cast<int64_t>(n));
      s.widen({bytes.data(), f.type, static_cast<int64_t>(n), x.data()});
      const auto back = narrow_codes(s, f.type, x);
      for (uint32_t c = 0; c < n; ++c) {
        const double want = f.value_of(c);
        if (std::isnan(want)) {
          if (!std::isnan(x[c])) FAIL("code " << c << " is not NaN but " << x[c]);
          if (!std::isnan(f.value_of(back[c])) || (back[c] & f.sign()) != (c & f.sign()))
            FAIL("NaN " << c << " became " << back[c]);
          continue;
        }
        if (x[c] != want || std::signbit(x[c]) != std::signbit(want))
          FAIL("code " << c << " is " << x[c] << " instead of " << want);
        if (std::isinf(want) && f.saturates) {
          REQUIRE(f.value_of(back[c]) == std::copysign(kernels::largest_value(f.type), want));
          continue;
        }
        if (back[c] != c) FAIL("code " << c << " came back as " << back[c]);
      }
      REQUIRE(finite_sizes(f).back() == kernels::largest_value(f.type));
    }
}

TEST_CASE("storage: rounding to nearest even at and around every midpoint, and at random") {
  for (const Format& f : kFormats) {
    const std::vector<double> sizes = finite_sizes(f);
    Floats x{0.0f, -0.0f, INFINITY, -INFINITY, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()};
    const auto around = [&](double at) {
      const float middle = static_cast<float>(at);
      for (const float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)})
        x.push_back(v), x.push_back(-v);
    };
    for (size_t c = 0; c + 1 < sizes.size(); ++c) {
      around(sizes[c]);
      around((sizes[c] + sizes[c + 1]) / 2);
    }
    around(sizes.back());
    around(sizes.back() + (sizes.back() - sizes[sizes.size() - 2]) / 2);
    const RandomKey key{.seed = 5};
    for (uint64_t i = 0; i < 200000; ++i)
      if (const float v = std::bit_cast<float>(random_bits(key, i)); !std::isnan(v)) x.push_back(v);
    for (const kernels::Kernels* k : variants_here()) {
      INFO(name_of(f.type) << " on " << k->name);
      const auto got = narrow_codes(kernels::storage_kernels(*k), f.type, x);
      for (size_t i = 0; i < x.size(); ++i) {
        const uint32_t want = std::isinf(x[i]) && !f.saturates ? static_cast<uint32_t>(sizes.size()) | (x[i] < 0 ? f.sign() : 0)
                                                               : nearest(f, sizes, static_cast<double>(x[i]));
        if (got[i] != want) FAIL(x[i] << " became code " << got[i] << " instead of " << want);
      }
    }
  }
}

TEST_CASE("storage: stochastic rounding goes up where fraction and random word reach 1, by logical element") {
  for (const Format& f : kFormats) {
    const std::vector<double> sizes = finite_sizes(f);
    const RandomKey key{.seed = 11, .use = RandomUse::kRounding, .tensor = 3, .step = 4};
    Floats x =
        joined({random_floats(3000, 1), random_floats(3000, 2, static_cast<float>(sizes[1] * 3)), Floats{0.0f, -0.0f, 1.0f}});
    constexpr uint64_t kFirst = 1234567;
    std::vector<std::vector<uint8_t>> all;
    for (const kernels::Kernels* k : variants_here()) {
      std::vector<uint8_t> bytes(static_cast<size_t>(bytes_of(f.type, static_cast<int64_t>(x.size()))));
      kernels::storage_kernels(*k).narrow_stochastic({x.data(), static_cast<int64_t>(x.size()), f.type, bytes.data(), key, kFirst});
      all.push_back(bytes);
      REQUIRE(all.back() == all.front());
      // A slice of the tensor on another rank gives the same numbers.
      std::vector<uint8_t> slice(static_cast<size_t>(bytes_of(f.type, 77)));
      kernels::storage_kernels(*k).narrow_stochastic({x.data() + 101, 77, f.type, slice.data(), key, kFirst + 101});
      REQUIRE(std::equal(slice.begin(), slice.end(), bytes.begin() + bytes_of(f.type, 101)));
    }
    Floats got(x.size());
    kernels::storage_kernels(kernels::kernels_for_this_processor()).widen({all[0].data(), f.type, static_cast<int64_t>(x.size()), got.data()});
    int up = 0, down = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double size = std::abs(static_cast<double>(x[i]));
      const size_t below = static_cast<size_t>(std::upper_bound(sizes.begin(), sizes.end(), size) - sizes.begin()) - 1;
      const double fraction = (size - sizes[below]) / (sizes[below + 1] - sizes[below]);
      const bool rises = fraction + random_bits(key, kFirst + i) * 0x1p-32 >= 1;
      if (fraction > 0) ++(rises ? up : down);
      const double want = std::copysign(sizes[below + (rises ? 1 : 0)], static_cast<double>(x[i]));
      if (got[i] != want) FAIL(name_of(f.type) << ": " << x[i] << " became " << got[i] << " instead of " << want);
    }
    REQUIRE(up > 1000);
    REQUIRE(down > 1000);
  }
}

TEST_CASE("storage: stochastic rounding of what no longer rounds") {
  for (const Format& f : kFormats) {
    const float largest = static_cast<float>(kernels::largest_value(f.type));
    Floats x{
        INFINITY, -INFINITY, NAN, largest, -largest, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()};
    std::vector<uint8_t> bytes(static_cast<size_t>(bytes_of(f.type, 7)));
    Floats got(7);
    for (const kernels::Kernels* k : variants_here()) {
      kernels::storage_kernels(*k).narrow_stochastic({x.data(), 7, f.type, bytes.data(), {.seed = 1}, 0});
      kernels::storage_kernels(*k).widen({bytes.data(), f.type, 7, got.data()});
      const float top = f.saturates ? largest : INFINITY;
      REQUIRE(got[0] == top);
      REQUIRE(got[1] == -top);
      REQUIRE(std::isnan(got[2]));
      REQUIRE(got[3] == largest);
      REQUIRE(got[4] == -largest);
      if (f.type != DType::bf16) REQUIRE(got[5] == top);
      REQUIRE(got[6] == 0);
    }
  }
}

TEST_CASE("storage: one-pass kernels, equal on every variant") {
  for (const int64_t n : {1, 7, 16, 33, 1000}) {
    Floats x = random_floats(n, 3), y = random_floats(n, 4);
    x[static_cast<size_t>(n / 2)] = -3.5f;
    double sum = 0;
    for (const float v : x) sum += std::abs(static_cast<double>(v));
    for (const kernels::Kernels* k : variants_here()) {
      const kernels::StorageKernels& s = kernels::storage_kernels(*k);
      REQUIRE(s.amax(x.data(), n) == 3.5f);
      REQUIRE(std::abs(s.absolute_sum(x.data(), n) - sum) < 1e-12 * sum);
      Floats scaled = poisoned(n), difference = poisoned(n), want_scaled, want_difference, want_signs;
      for (size_t i = 0; i < x.size(); ++i) {
        want_scaled.push_back(x[i] * 0.3f);
        want_difference.push_back(x[i] - 0.3f * y[i]);
        want_signs.push_back(x[i] < 0 ? -2.0f : 2.0f);
      }
      s.scale({x.data(), n, 0.3f, scaled.data()});
      s.subtract_scaled({x.data(), y.data(), n, 0.3f, difference.data()});
      REQUIRE(bit_difference(scaled, want_scaled) == "");
      REQUIRE(bit_difference(difference, want_difference) == "");
      std::vector<uint8_t> signs(static_cast<size_t>((n + 7) / 8), 0xff);
      Floats expanded = poisoned(n);
      s.pack_signs({x.data(), n, signs.data()});
      s.expand_signs({signs.data(), 0, n, 2.0f, expanded.data()});
      REQUIRE(bit_difference(expanded, want_signs) == "");
      if (n % 8 != 0) REQUIRE(signs.back() >> (n % 8) == 0);
      std::vector<uint32_t> words(static_cast<size_t>(n));
      s.random_words({{.seed = 9}, 5, n, words.data()});
      for (int64_t i = 0; i < n; ++i)
        REQUIRE(words[static_cast<size_t>(i)] == random_bits({.seed = 9}, static_cast<uint64_t>(5 + i)));
    }
  }
  for (const kernels::Kernels* k : variants_here()) {
    const Floats bad{1.0f, NAN, INFINITY}, worse{1.0f, -INFINITY, 2.0f};
    REQUIRE(std::isnan(kernels::storage_kernels(*k).amax(bad.data(), 3)));
    REQUIRE(kernels::storage_kernels(*k).amax(worse.data(), 3) == INFINITY);
    REQUIRE(kernels::storage_kernels(*k).amax(bad.data(), 0) == 0);
  }
}

TEST_CASE("storage: integers, 8 and 4 bits, to nearest even, held to their range") {
  const float scale = 0.5f;
  for (const int bits : {8, 4}) {
    const float most = bits == 8 ? 127.0f : 7.0f;
    Floats x, want;
    for (float v = -most - 2; v <= most + 2; v += 0.25f) {
      x.push_back(v * scale);
      want.push_back(std::clamp(std::nearbyint(v), -most, most) * scale);
    }
    for (const float v : {NAN, INFINITY, -INFINITY}) x.push_back(v);
    for (const float v : {0.0f, most * scale, -most * scale}) want.push_back(v);
    const auto n = static_cast<int64_t>(x.size());
    for (const kernels::Kernels* k : variants_here()) {
      std::vector<uint8_t> q(static_cast<size_t>((n * bits + 7) / 8), 0xff);
      Floats y = poisoned(n);
      kernels::storage_kernels(*k).quantise_int({x.data(), n, scale, bits, q.data()});
      kernels::storage_kernels(*k).dequantise_int({q.data(), n, scale, bits, y.data()});
      for (int64_t i = 0; i < n; ++i) REQUIRE(y[static_cast<size_t>(i)] == want[static_cast<size_t>(i)]);
      if (bits == 4 && n % 2 == 1) REQUIRE(q.back() >> 4 == 0);
      kernels::storage_kernels(*k).quantise_int({x.data(), n, 0.0f, bits, q.data()});
      REQUIRE(std::ranges::all_of(q, [](uint8_t b) { return b == 0; }));
    }
  }
}

}  // namespace shardlab::testing
