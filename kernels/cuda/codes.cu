// Codes of 8, 4 and 1 bits with block scales, and sums over rows: what compressed collectives are made of.
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

/// The scale of one block of a row: block_x counts blocks of all rows.
template <int kBits>
struct BlockScale {
  static constexpr int kThreads = 256;
  struct Args {
    gpu::BlockShape shape;
    Input x;
    float* scales;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const int64_t row = t.block_x() / a.shape.blocks, block = a.shape.block();
    const int64_t from = t.block_x() % a.shape.blocks * block;
    const int64_t begin = from < a.shape.columns ? from : a.shape.columns;
    const int64_t end = begin + block < a.shape.columns ? begin + block : a.shape.columns;
    const int64_t first = row * a.shape.columns;
    if constexpr (kBits == 1) {
      double sum[1] = {0};
      for (int64_t i = begin + t.index(); i < end; i += kThreads)
        sum[0] = sum[0] + static_cast<double>(::fabsf(values_at<1>(a.x, first + i).at[0]));
      block_sums(t, sum, reinterpret_cast<double*>(t.shared()));
      if (t.index() == 0)
        a.scales[t.block_x()] = end == begin ? 0.0f : static_cast<float>(sum[0] / static_cast<double>(end - begin));
    } else {
      uint32_t most = 0;  // sizes compare as their bits do
      for (int64_t i = begin + t.index(); i < end; i += kThreads) {
        const uint32_t size = bits_of(values_at<1>(a.x, first + i).at[0]) & 0x7fffffffu;
        most = size > most ? size : most;
      }
#pragma unroll
      for (int mask = kWarp / 2; mask >= 1; mask /= 2) {
        const uint32_t other = t.shuffle_xor(most, mask);
        most = other > most ? other : most;
      }
      uint32_t* shared = reinterpret_cast<uint32_t*>(t.shared());
      if (t.lane() == 0) shared[t.warp()] = most;
      t.barrier();
      if (t.index() != 0) return;
      for (int w = 1; w < kThreads / kWarp; ++w) most = shared[w] > most ? shared[w] : most;
      a.scales[t.block_x()] = float_of(most) / (kBits == 8 ? 127.0f : 7.0f);
    }
  }
};

/// x / scale as a whole number in [-most, most]; NaN, and everything where the scale is 0, as 0.
SHARDLAB_DEVICE int32_t whole_number(float x, float scale, float most) {
  if (scale == 0) return 0;
  const float quotient = x / scale;
  if (quotient != quotient) return 0;
  const float held = quotient > most ? most : quotient < -most ? -most : quotient;
  constexpr float kShifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  return static_cast<int32_t>(bits_of(held + kShifter)) - static_cast<int32_t>(bits_of(kShifter));
}

/// A byte of codes a thread.
template <int kBits>
struct Encoded {
  gpu::BlockShape shape;
  Input x;
  uint8_t* codes;
  const float* scales;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    constexpr int kElements = 8 / kBits;
    const int64_t row = i / shape.row_bytes(), column = i % shape.row_bytes() * kElements;
    uint32_t byte = 0;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if (column + j >= shape.columns) break;
      const float v = values_at<1>(x, row * shape.columns + column + j).at[0];
      if constexpr (kBits == 1) {
        byte |= bits_of(v) >> 31 << j;
      } else {
        const float scale = scales[row * shape.blocks + (column + j) / shape.block()];
        byte |= (static_cast<uint32_t>(whole_number(v, scale, kBits == 8 ? 127.0f : 7.0f)) & ((1u << kBits) - 1)) << (kBits * j);
      }
    }
    codes[i] = static_cast<uint8_t>(byte);
  }
};

/// The value of one code.
struct Decoder {
  gpu::BlockShape shape;
  const uint8_t* codes;
  const float* scales;
  SHARDLAB_DEVICE float value(int64_t row, int64_t column) const {
    const float scale = scales[row * shape.blocks + column / shape.block()];
    const uint8_t* at = codes + row * shape.row_bytes() + column * shape.bits / 8;
    switch (shape.bits) {
      case 8: return static_cast<float>(static_cast<int8_t>(*at)) * scale;
      case 4: return static_cast<float>((((*at >> (column % 2 * 4)) & 15) ^ 8) - 8) * scale;
      default: return (*at >> (column % 8)) & 1 ? -scale : scale;
    }
  }
};

struct Decoded {
  Decoder code;
  Output y;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    put(y, i, Values<1>{{code.value(i / code.shape.columns, i % code.shape.columns)}});
  }
};

struct Stored {
  Input x;
  int64_t columns;
  SHARDLAB_DEVICE float value(int64_t row, int64_t column) const { return values_at<1>(x, row * columns + column).at[0]; }
};

constexpr int kRowLevels = 16;

/// The tree over rows, a column a thread.
template <class Source>
struct TreeOfRows {
  Source source;
  int64_t rows;
  Output y;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    TreeCounter<float, kRowLevels> sum;
    for (int64_t row = 0; row < rows; ++row) sum.push(source.value(row, i));
    put(y, i, Values<1>{{sum.total(0.0f)}});
  }
};

void check(const gpu::BlockShape& shape, DType values) {
  expect(shape.bits == 8 || shape.bits == 4 || shape.bits == 1, "codes: 8, 4 or 1 bits", shape.bits);
  expect(shape.blocks >= 1, "codes: a row has a block", shape.blocks);
  expect(is_activation_type(values), "codes: values are f32, bf16 or f16", static_cast<int64_t>(values));
}

/// Words of T a thread.
template <class T>
struct Swapped {
  const T* x;
  T* y;
  int64_t rows, columns, words;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const int64_t word = i % words, row = i / words % rows, column = i / words / rows;
    y[i] = x[(row * columns + column) * words + word];
  }
};

}  // namespace

void quantise(const gpu::Quantise& a, Stream s) {
  check(a.shape, a.x.dtype);
  const auto run = [&](auto bits) {
    constexpr int kBits = bits.value;
    const Geometry blocks{.x = a.shape.rows * a.shape.blocks, .threads = BlockScale<kBits>::kThreads, .shared = 8 * 8};
    launch<BlockScale<kBits>>("quantise", blocks, {a.shape, a.x, a.scales}, s);
    elementwise<1>("quantise", Encoded<kBits>{a.shape, a.x, static_cast<uint8_t*>(a.codes), a.scales},
                   a.shape.rows * a.shape.row_bytes(), false, s);
  };
  a.shape.bits == 8 ? run(Constant<8>{}) : a.shape.bits == 4 ? run(Constant<4>{}) : run(Constant<1>{});
}

void dequantise(const gpu::Dequantise& a, Stream s) {
  check(a.shape, a.y.dtype);
  elementwise<1>("dequantise", Decoded{{a.shape, static_cast<const uint8_t*>(a.codes), a.scales}, a.y},
                 a.shape.rows * a.shape.columns, false, s);
}

void dequantise_sum(const gpu::DequantiseSum& a, Stream s) {
  check(a.shape, a.y.dtype);
  expect(a.shape.rows < (1 << kRowLevels), "dequantise_sum: fewer than 2^16 rows", a.shape.rows);
  const Decoder code{a.shape, static_cast<const uint8_t*>(a.codes), a.scales};
  elementwise<1>("dequantise_sum", TreeOfRows<Decoder>{code, a.shape.rows, a.y}, a.shape.columns, false, s);
}

void sum_rows(const gpu::SumRows& a, Stream s) {
  expect(is_activation_type(a.x.dtype) && is_activation_type(a.y.dtype), "sum_rows: f32, bf16 or f16",
         static_cast<int64_t>(a.x.dtype));
  expect(a.rows < (1 << kRowLevels), "sum_rows: fewer than 2^16 rows", a.rows);
  elementwise<1>("sum_rows", TreeOfRows<Stored>{{a.x, a.columns}, a.rows, a.y}, a.columns, false, s);
}

void swap_leading(const gpu::SwapLeading& a, Stream s) {
  const auto run = [&]<class T>(Named<T>) {
    const int64_t words = a.bytes / static_cast<int64_t>(sizeof(T));
    elementwise<1>("swap_leading", Swapped<T>{static_cast<const T*>(a.x), static_cast<T*>(a.y), a.rows, a.columns, words},
                   a.rows * a.columns * words, false, s);
  };
  aligned({a.x, a.y}) && a.bytes % 4 == 0 ? run(Named<uint32_t>{}) : run(Named<uint8_t>{});
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
