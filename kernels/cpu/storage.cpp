// Casts, quantisation and the one-pass kernels of compression.
#include "kernels/storage.h"

#include "kernels/cpu/codes.h"
#include "kernels/cpu/random_words.h"
#include "kernels/cpu/sums.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

/// Calls body with the format of a narrow type.
template <class Body>
SHARDLAB_INLINE void with_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16: return body(Bf16{});
    case DType::f16: return body(F16{});
    case DType::f8e4m3: return body(F8E4M3{});
    case DType::f8e5m2: return body(F8E5M2{});
    default: expect(false, "storage: the type is bf16, f16, f8e4m3 or f8e5m2; this is its number", static_cast<int64_t>(dtype));
  }
}

void widen(const Widen& a) {
  if (a.dtype == DType::f32) {
    std::memmove(a.to, a.from, sizeof(float) * static_cast<size_t>(a.n));
    return;
  }
  with_format(a.dtype, [&]<class F>(F) {
    const auto* from = static_cast<const typename F::Code*>(a.from);
    for_vectors(a.n, [=, to = a.to](int64_t i, int n) {
      WordPiece codes[kPieces];
      load_codes<F>(from + i, n, codes);
      Floats x;
      for (int p = 0; p < kPieces; ++p) x.piece[p] = decode<F>(codes[p]);
      store_some(to + i, x, n);
    });
  });
}

void narrow(const Narrow& a) {
  if (a.dtype == DType::f32) {
    std::memmove(a.to, a.from, sizeof(float) * static_cast<size_t>(a.n));
    return;
  }
  with_format(a.dtype, [&]<class F>(F) {
    auto* to = static_cast<typename F::Code*>(a.to);
    for_vectors(a.n, [=, from = a.from](int64_t i, int n) {
      const Floats x = load_some(from + i, n);
      WordPiece codes[kPieces];
      for (int p = 0; p < kPieces; ++p) codes[p] = encode<F>(x.piece[p]);
      store_codes<F>(to + i, n, codes);
    });
  });
}

void narrow_stochastic(const NarrowStochastic& a) {
  with_format(a.dtype, [&]<class F>(F) {
    auto* to = static_cast<typename F::Code*>(a.to);
    for_random_words(a.key, a.element, a.n, [=, from = a.from](int64_t done, const uint32_t* words, int64_t here) {
      for (int64_t i = 0; i < here; ++i)
        to[done + i] = static_cast<typename F::Code>(encode_stochastic<F>(from[done + i], words[i]));
    });
  });
}

/// Sixteen quotients as whole numbers in [-most, most], NaN as 0.
SHARDLAB_INLINE Ints whole_numbers(const Floats& x, const Floats& scale, float most) {
  const Floats shifter = floats(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats quotient = x / scale, top = floats(most), bottom = floats(-most);
  const Floats real = select(quotient == quotient, quotient, zeros());
  const Floats held = select(top < real, top, select(real < bottom, bottom, real));
  return minus(bits(held + shifter), bits(shifter));
}

void quantise_int(const QuantiseInt& a) {
  expect(a.bits == 8 || a.bits == 4, "quantise: bits is 8 or 4", a.bits);
  auto* to = static_cast<uint8_t*>(a.to);
  if (a.scale == 0) {
    std::memset(to, 0, static_cast<size_t>((a.n * a.bits + 7) / 8));
    return;
  }
  const Floats scale = floats(a.scale);
  for_vectors(a.n, [=, from = a.from, bits = a.bits](int64_t i, int n) {
    const Ints q = whole_numbers(load_some(from + i, n), scale, bits == 8 ? 127.0f : 7.0f);
    int32_t lanes[kLanes];
    for (int p = 0; p < kPieces; ++p) std::memcpy(lanes + p * kPieceLanes, &q.piece[p], sizeof(IntPiece));
    if (bits == 8) {
      for (int j = 0; j < n; ++j) to[i + j] = static_cast<uint8_t>(lanes[j]);
      return;
    }
    for (int j = n; j < kLanes; ++j) lanes[j] = 0;
    for (int j = 0; j < n; j += 2) to[(i + j) / 2] = static_cast<uint8_t>((lanes[j] & 15) | ((lanes[j + 1] & 15) << 4));
  });
}

void dequantise_int(const DequantiseInt& a) {
  expect(a.bits == 8 || a.bits == 4, "dequantise: bits is 8 or 4", a.bits);
  if (a.bits == 8) {
    const auto* from = static_cast<const int8_t*>(a.from);
    for (int64_t i = 0; i < a.n; ++i) a.to[i] = static_cast<float>(from[i]) * a.scale;
    return;
  }
  const auto* from = static_cast<const uint8_t*>(a.from);
  for (int64_t i = 0; i < a.n; ++i) {
    const int half = (from[i / 2] >> (i % 2 * 4)) & 15;
    a.to[i] = static_cast<float>((half ^ 8) - 8) * a.scale;
  }
}

void scale(const Scale& a) {
  const Floats factor = floats(a.factor);
  for_vectors(a.n, [=, x = a.x, y = a.y](int64_t i, int n) { store_some(y + i, load_some(x + i, n) * factor, n); });
}

void subtract_scaled(const SubtractScaled& a) {
  const Floats factor = floats(a.factor);
  for_vectors(a.n, [&](int64_t i, int n) { store_some(a.c + i, load_some(a.a + i, n) - factor * load_some(a.b + i, n), n); });
}

void pack_signs(const PackSigns& a) {
  for (int64_t i = 0; i < a.n; i += 8) {
    uint32_t byte = 0;
    for (int64_t j = 0; j < 8 && i + j < a.n; ++j) byte |= static_cast<uint32_t>(bits(a.from[i + j])) >> 31 << j;
    a.to[i / 8] = static_cast<uint8_t>(byte);
  }
}

void expand_signs(const ExpandSigns& a) {
  for (int64_t i = 0; i < a.n; ++i) {
    const int64_t at = a.first + i;
    a.to[i] = (a.from[at / 8] >> (at % 8)) & 1 ? -a.scale : a.scale;
  }
}

void random_words(const RandomWords& a) {
  for_random_words(a.key, a.element, a.n, [to = a.to](int64_t done, const uint32_t* words, int64_t here) {
    std::memcpy(to + done, words, sizeof(uint32_t) * static_cast<size_t>(here));
  });
}

float amax(const float* x, int64_t n) { return largest_size(x, n); }

double absolute_sum(const float* x, int64_t n) {
  double sum[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) sum[j] += static_cast<double>(__builtin_fabsf(x[i + j]));
  for (int j = 0; i < n; ++i, ++j) sum[j] += static_cast<double>(__builtin_fabsf(x[i]));
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) sum[j] = sum[2 * j] + sum[2 * j + 1];
  return sum[0];
}

}  // namespace

extern const StorageKernels storage_table;
const StorageKernels storage_table = {
    .widen = widen,
    .narrow = narrow,
    .narrow_stochastic = narrow_stochastic,
    .quantise_int = quantise_int,
    .dequantise_int = dequantise_int,
    .scale = scale,
    .subtract_scaled = subtract_scaled,
    .pack_signs = pack_signs,
    .expand_signs = expand_signs,
    .random_words = random_words,
    .amax = amax,
    .absolute_sum = absolute_sum,
};

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
