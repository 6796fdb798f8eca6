// Activations, residual, positions, sums of two, fill, casts, rotary positions, dropout.
#include "kernels/cuda/elementwise.h"

#include <cmath>

#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

constexpr float kRootTwoOverPi = 0.7978845608f;

SHARDLAB_DEVICE float gelu_tanh(float u) { return ::tanhf(kRootTwoOverPi * (u + 0.044715f * ((u * u) * u))); }
SHARDLAB_DEVICE float gelu_slope(float u) {
  const float t = gelu_tanh(u);
  const float left = 0.5f * (1.0f + t);
  const float right = ((0.5f * u) * (1.0f - t * t)) * (kRootTwoOverPi * (1.0f + 0.134145f * (u * u)));
  return left + right;
}

template <class T>
struct GeluForward {
  const T* u;
  T* a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<N> x = values_at<N>(u + i);
#pragma unroll
    for (float& v : x.at) v = (0.5f * v) * (1.0f + gelu_tanh(v));
    put(a + i, x);
  }
};

template <class T>
struct GeluInput {
  const T* da;
  const T* u;
  T* du;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> x = values_at<N>(u + i);
    Values<N> d = values_at<N>(da + i);
#pragma unroll
    for (int j = 0; j < N; ++j) d.at[j] = d.at[j] * gelu_slope(x.at[j]);
    put(du + i, d);
  }
};

template <class T>
struct SwigluForward {
  const T* u;
  T* a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<2 * N> x = pairs_at<N>(u + 2 * i);
    Values<N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = x.at[2 * j];
      y.at[j] = (g / (1.0f + ::expf(-g))) * x.at[2 * j + 1];
    }
    put(a + i, y);
  }
};

template <class T>
struct SwigluInput {
  const T* da;
  const T* u;
  T* du;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<2 * N> x = pairs_at<N>(u + 2 * i);
    const Values<N> d = values_at<N>(da + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = x.at[2 * j], v = x.at[2 * j + 1], below = 1.0f + ::expf(-g), q = 1.0f / below;
      x.at[2 * j] = (d.at[j] * v) * (q * (1.0f + g * (1.0f - q)));
      x.at[2 * j + 1] = d.at[j] * (g / below);
    }
    put_pairs<N>(du + 2 * i, x);
  }
};

/// An operation on the elements of the rows that are there, of `width` elements each.
template <class Operation>
struct CountedElements {
  Operation operation;
  const int64_t* rows;
  int64_t width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    if (i < *rows * width) operation.template at<N>(i);
  }
};

/// y = x + (z + bias).
template <class T>
struct ResidualForwardRows {
  const T* x;
  const T* z;
  Input bias;
  T* y;
  int64_t width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> old = values_at<N>(x + i);
    Values<N> sum = values_at<N>(z + i);
    if (bias.data != nullptr) sum = sum + values_at<N>(bias, i % width);
    put(y + i, old + sum);
  }
};

/// y[rows,width] = y + bias, of any two types.
struct AddedBias {
  Output y;
  Input bias;
  int64_t width;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    put(y, i, values_at<N>(Input(y), i) + values_at<N>(bias, i % width));
  }
};

template <class T>
struct PositionsForwardRows {
  const T* x;
  Input table;
  T* y;
  int64_t sequence;  ///< elements of one sequence
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Values<N> position = values_at<N>(table, i % sequence);
    put(y + i, values_at<N>(x + i) + position);
  }
};

/// Rows of positions that the tokens bring.
template <class T>
struct PackedPositionsRows {
  PositionsForward a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const int64_t row = i / a.width, position = a.positions[row / a.tokens * a.positions_stride + row % a.tokens];
    Values<N> x = values_at<N>(static_cast<const T*>(a.x.data) + i);
    if (position >= 0 && position < a.table_rows) x = x + values_at<N>(a.table, position * a.width + i % a.width);
    put(static_cast<T*>(a.y.data) + i, x);
  }
};

/// Element i of the result is one of `from`, or the tree over the copies of one.
template <class T>
struct Regrouped {
  static constexpr int kCopyLevels = 5;  ///< of a tree over up to 16
  const T* from;
  T* to;
  int64_t sequences, tokens, parts, width;
  int64_t own, shared;  ///< elements of a part that no other part has, and those that are copies
  int copies;
  bool join;

  SHARDLAB_DEVICE int64_t group() const { return copies * own + shared; }
  SHARDLAB_DEVICE int64_t row() const { return parts / copies * group(); }
  SHARDLAB_DEVICE int64_t in_part(int64_t p, int64_t b, int64_t t) const { return ((p * tokens + t) * sequences + b) * width; }
  /// One at a time.
  template <int N>
  SHARDLAB_DEVICE void at(int64_t first) const {
    for (int64_t i = first; i < first + N; ++i) join ? joined(i) : split(i);
  }
  SHARDLAB_DEVICE void split(int64_t i) const {
    const int64_t c = i % width, b = i / width % sequences, t = i / width / sequences % tokens, p = i / width / sequences / tokens;
    const int64_t in_group = c < own ? p % copies * own + c : copies * own + c - own;
    to[i] = from[(b * tokens + t) * row() + p / copies * group() + in_group];
  }
  SHARDLAB_DEVICE void joined(int64_t i) const {
    const int64_t c = i % row(), t = i / row() % tokens, b = i / row() / tokens, g = c / group(), in_group = c % group();
    if (in_group < copies * own) {
      to[i] = from[in_part(g * copies + in_group / own, b, t) + in_group % own];
      return;
    }
    TreeCounter<float, kCopyLevels> sum;
    for (int k = 0; k < copies; ++k) sum.push(value_of(from[in_part(g * copies + k, b, t) + own + in_group - copies * own]));
    put(to + i, Values<1>{{sum.total(0.0f)}});
  }
};

/// One column of a table, over sequences.
template <class T>
struct PositionsWeightSum {
  const T* dx;
  Output dtable;
  int64_t sequences, stride;
  bool accumulate;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<N> total{};
    for (int j = 0; j < N; ++j) {
      TreeCounter<float, kSequenceLevels> sum;
      for (int64_t b = 0; b < sequences; ++b) sum.push(value_of(dx[b * stride + i + j]));
      total.at[j] = sum.total(0.0f) + 0.0f;
    }
    if (accumulate) total = values_at<N>(dtable, i) + total;
    put(dtable, i, total);
  }
};

template <class T>
struct Sum {
  const T* a;
  const T* b;
  T* c;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    const Vector<T, N> x = load<N>(a + i), y = load<N>(b + i);
    Vector<T, N> z;
#pragma unroll
    for (int j = 0; j < N; ++j) z.at[j] = rounded<T>(value_of(x.at[j]) + value_of(y.at[j]));
    store(c + i, z);
  }
};

template <class T>
struct Filled {
  T* x;
  float value;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Vector<T, N> v;
#pragma unroll
    for (T& e : v.at) e = rounded<T>(value);
    store(x + i, v);
  }
};

template <class From, class To>
struct Casted {
  const From* from;
  To* to;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    put(to + i, values_at<N>(from + i));
  }
};

/// Element i is a run of kVector pairs of one head that is rotated.
template <class T, int kVector>
struct Rotation {
  T* qkv;
  const float* table;
  int64_t tokens, width;
  int queries, groups, half;  ///< query heads of a group, groups, pairs of a head
  float sign;                 ///< of the sine: -1 rotates back
  const int32_t* positions;
  int64_t positions_stride, table_rows;

  /// The row of the table for a row of qkv.
  SHARDLAB_DEVICE int64_t row_of(int64_t row) const {
    if (positions == nullptr) return row % tokens;
    const int64_t position = positions[row / tokens * positions_stride + row % tokens];
    return position < 0 ? 0 : position < table_rows ? position : table_rows - 1;
  }
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    static_assert(N == 1);
    const int runs = half / kVector, pair = static_cast<int>(i % runs) * kVector;
    const int64_t head = i / runs % (groups * (queries + 1)), row = i / runs / (groups * (queries + 1));
    const int64_t in_group = head % (queries + 1);
    T* low = qkv + row * width + (head / (queries + 1) * (queries + 2) + in_group) * 2 * half + pair;
    const Values<2 * kVector> angle = pairs_at<kVector>(table + (row_of(row) * half + pair) * 2);
    const Values<kVector> a = values_at<kVector>(low), b = values_at<kVector>(low + half);
    Values<kVector> x, y;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float c = angle.at[2 * j], sine = sign * angle.at[2 * j + 1];
      x.at[j] = a.at[j] * c - b.at[j] * sine;
      y.at[j] = b.at[j] * c + a.at[j] * sine;
    }
    put(low, x);
    put(low + half, y);
  }
};

/// a + b where the three are of several types.
struct MixedSum {
  Input a, b;
  Output c;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    put(c, i, values_at<N>(a, i) + values_at<N>(b, i));
  }
};

struct Multiplied {
  gpu::Multiply a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<N> x = values_at<N>(a.x, i);
    const float factor = *a.factor;
#pragma unroll
    for (float& v : x.at) v = v * factor;
    put(a.y, i, x);
  }
};

struct Difference {
  gpu::Subtract a;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    Values<N> m = values_at<N>(a.m, i);
    const Values<N> b = values_at<N>(a.approximation, i);
#pragma unroll
    for (int j = 0; j < N; ++j) m.at[j] = m.at[j] - a.share * b.at[j];
    put(a.error, i, m);
  }
};

template <class T>
struct DropoutMask {
  gpu::Dropout a;
  uint32_t threshold;  ///< kept if bits >= threshold
  float scale;
  template <int N>
  SHARDLAB_DEVICE void at(int64_t i) const {
    // N divides the width: the N elements are one run of logical elements.
    const int64_t row = i / a.width, token = row % a.tokens;
    const uint64_t first =
        static_cast<uint64_t>(((a.sequence_begin + row / a.tokens) * a.tokens_total + a.token_begin + token) * a.width_total +
                              a.width_begin + i % a.width);
    T* to = static_cast<T*>(a.z.data) + i;
    Values<N> x = values_at<N>(to);
    std::array<uint32_t, 4> words{};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const uint64_t e = first + static_cast<uint64_t>(j);
      if (j == 0 || e % 4 == 0) {
        const uint64_t block = e / 4;
        words = philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                        (static_cast<uint32_t>(a.key.use) << 24) | a.key.tensor, a.key.step},
                       a.key.seed);
      }
      const uint32_t low = e % 2 == 0 ? words[0] : words[1], high = e % 2 == 0 ? words[2] : words[3];
      x.at[j] = (e % 4 < 2 ? low : high) >= threshold ? x.at[j] * scale : 0.0f;
    }
    put(to, x);
  }
};

}  // namespace

void activation_forward(const ActivationForward& a, Stream s) {
  expect_type(a.a.dtype, a.u.dtype, false, "activation: u and a are of one type");
  with_type(a.u.dtype, "activation: u is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto* u = static_cast<const T*>(a.u.data);
    auto* out = static_cast<T*>(a.a.data);
    const bool wide = aligned({u, out});
    if (a.swiglu) return elementwise<kVectorOf<T>>("activation_forward", SwigluForward<T>{u, out}, a.n, wide, s);
    elementwise<kVectorOf<T>>("activation_forward", GeluForward<T>{u, out}, a.n, wide, s);
  });
}

void activation_input(const ActivationInput& a, Stream s) {
  expect_type(a.da.dtype, a.u.dtype, false, "activation: da and u are of one type");
  expect_type(a.du.dtype, a.u.dtype, false, "activation: du and u are of one type");
  with_type(a.u.dtype, "activation: u is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto *u = static_cast<const T*>(a.u.data), *da = static_cast<const T*>(a.da.data);
    auto* du = static_cast<T*>(a.du.data);
    const bool wide = aligned({u, da, du});
    if (a.swiglu) return elementwise<kVectorOf<T>>("activation_input", SwigluInput<T>{da, u, du}, a.n, wide, s);
    elementwise<kVectorOf<T>>("activation_input", GeluInput<T>{da, u, du}, a.n, wide, s);
  });
}

void grouped_activation(const GroupedActivation& a, Stream s) {
  const int64_t *rows = count_rows(a.rows, a.scratch, s), n = a.rows.capacity * a.width;
  const bool back = a.da.data != nullptr;
  expect_type(a.to.dtype, a.u.dtype, false, "activation: operands are of one type");
  if (back) expect_type(a.da.dtype, a.u.dtype, false, "activation: da and u are of one type");
  with_type(a.u.dtype, "activation: u is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto *u = static_cast<const T*>(a.u.data), *da = static_cast<const T*>(a.da.data);
    auto* to = static_cast<T*>(a.to.data);
    const bool wide = aligned({u, da, to}) && a.width % kVectorOf<T> == 0;  // a vector is of one row
    const auto run = [&]<class Operation>(const char* name, const Operation& operation) {
      elementwise<kVectorOf<T>>(name, CountedElements<Operation>{operation, rows, a.width}, n, wide, s);
    };
    if (back)
      a.swiglu ? run("activation_input", SwigluInput<T>{da, u, to}) : run("activation_input", GeluInput<T>{da, u, to});
    else
      a.swiglu ? run("activation_forward", SwigluForward<T>{u, to}) : run("activation_forward", GeluForward<T>{u, to});
  });
}

void residual_forward(const ResidualForward& a, Stream s) {
  expect_type(a.z.dtype, a.x.dtype, false, "residual: x and z are of one type");
  expect_type(a.y.dtype, a.x.dtype, false, "residual: x and y are of one type");
  if (a.bias.data != nullptr) expect_type(a.bias.dtype, a.x.dtype, true, "residual: bias is f32 or of x's type");
  with_type(a.x.dtype, "residual: x is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto *x = static_cast<const T*>(a.x.data), *z = static_cast<const T*>(a.z.data);
    auto* y = static_cast<T*>(a.y.data);
    constexpr int kVector = kVectorOf<T>;
    const bool wide = aligned({x, z, a.bias.data, y}) && (a.bias.data == nullptr || a.width % kVector == 0);
    elementwise<kVector>("residual_forward", ResidualForwardRows<T>{x, z, a.bias, y, a.width}, a.rows * a.width, wide, s);
  });
}

void add_bias(Output y, Input bias, int64_t rows, int64_t width, Stream s) {
  const bool wide = aligned({y.data, bias.data}) && width % 4 == 0;
  elementwise<4>("linear_bias", AddedBias{y, bias, width}, rows * width, wide, s);
}

void positions_forward(const PositionsForward& a, Stream s) {
  expect_type(a.y.dtype, a.x.dtype, false, "positions: x and y are of one type");
  expect_type(a.table.dtype, a.x.dtype, true, "positions: table is f32 or of x's type");
  with_type(a.x.dtype, "positions: x is f32, bf16 or f16", [&]<class T>(Named<T>) {
    if (a.positions != nullptr) {
      const bool wide = aligned({a.x.data, a.table.data, a.y.data}) && a.width % kVectorOf<T> == 0;
      return elementwise<kVectorOf<T>>("positions_forward", PackedPositionsRows<T>{a}, a.sequences * a.tokens * a.width, wide, s);
    }
    const auto* x = static_cast<const T*>(a.x.data);
    auto* y = static_cast<T*>(a.y.data);
    const int64_t sequence = a.tokens * a.width;
    const bool wide = aligned({x, a.table.data, y}) && sequence % kVectorOf<T> == 0;
    elementwise<kVectorOf<T>>("positions_forward", PositionsForwardRows<T>{x, a.table, y, sequence}, a.sequences * sequence, wide,
                              s);
  });
}

void regroup(const gpu::Regroup& a, Stream s) {
  constexpr int64_t kMostCopies = 16;
  expect(a.copies >= 1 && a.copies <= kMostCopies && a.parts % a.copies == 0, "regroup: 1 to 16 copies divide the parts", a.copies);
  expect_type(a.to.dtype, a.from.dtype, false, "regroup: rows and parts are of one type");
  const int64_t shared = a.copies == 1 ? 0 : 2 * a.head_dim, own = a.width - shared;
  expect(own > 0, "regroup: a part has elements of its own", own);
  const int64_t rows = a.sequences * a.tokens, joined = a.parts / a.copies * (a.copies * own + shared);
  with_type(a.from.dtype, "regroup: f32, bf16 or f16", [&]<class T>(Named<T>) {
    const Regrouped<T> operation{static_cast<const T*>(a.from.data),
                                 static_cast<T*>(a.to.data),
                                 a.sequences,
                                 a.tokens,
                                 a.parts,
                                 a.width,
                                 own,
                                 shared,
                                 a.copies,
                                 a.join};
    elementwise<1>("regroup", operation, rows * (a.join ? joined : a.parts * a.width), false, s);
  });
}

void positions_weight(const PositionsWeight& a, Stream s) {
  expect(a.sequences >= 1 && a.sequences <= kMostSequences, "positions: 1 <= sequences < 32768", a.sequences);
  expect_type(a.dtable.dtype, a.dx.dtype, true, "positions: dtable is f32 or of dx's type");
  with_type(a.dx.dtype, "positions: dx is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const auto* dx = static_cast<const T*>(a.dx.data);
    const int64_t sequence = a.tokens * a.width, stride = a.stride != 0 ? a.stride : sequence;
    elementwise<2>("positions_weight", PositionsWeightSum<T>{dx, a.dtable, a.sequences, stride, a.accumulate}, sequence,
                   aligned({a.dtable.data}), s);
  });
}

static void expect_floats(std::initializer_list<DType> types, const char* rule) {
  for (const DType t : types) expect(is_activation_type(t), rule, static_cast<int64_t>(t));
}

void add(const Add& a, Stream s) {
  const bool wide = aligned({a.a.data, a.b.data, a.c.data});
  if (a.a.dtype != a.b.dtype || a.a.dtype != a.c.dtype) {
    expect_floats({a.a.dtype, a.b.dtype, a.c.dtype}, "add: operands of several types are f32, bf16 or f16");
    return elementwise<4>("add", MixedSum{a.a, a.b, a.c}, a.n, wide, s);
  }
  const auto run = [&]<class T>(Named<T>) {
    elementwise<kVectorOf<T>>(
        "add", Sum<T>{static_cast<const T*>(a.a.data), static_cast<const T*>(a.b.data), static_cast<T*>(a.c.data)}, a.n, wide, s);
  };
  if (a.a.dtype == DType::f64) return run(Named<double>{});
  with_type(a.a.dtype, "add: f32, bf16, f16 or f64", run);
}

void multiply(const Multiply& a, Stream s) {
  expect_floats({a.x.dtype, a.y.dtype}, "multiply: f32, bf16 or f16");
  elementwise<4>("multiply", Multiplied{a}, a.n, aligned({a.x.data, a.y.data}), s);
}

void subtract(const Subtract& a, Stream s) {
  expect_floats({a.m.dtype, a.approximation.dtype, a.error.dtype}, "subtract: f32, bf16 or f16");
  elementwise<4>("subtract", Difference{a}, a.n, aligned({a.m.data, a.approximation.data, a.error.data}), s);
}

void fill(const Fill& a, Stream s) {
  const auto run = [&]<class T>(Named<T>) {
    elementwise<kVectorOf<T>>("fill", Filled<T>{static_cast<T*>(a.x.data), a.value}, a.n, aligned({a.x.data}), s);
  };
  if (a.x.dtype == DType::f64) return run(Named<double>{});
  with_type(a.x.dtype, "fill: f32, bf16, f16 or f64", run);
}

void cast(const Cast& a, Stream s) {
  with_type(a.from.dtype, "cast: from f32, bf16 or f16", [&]<class From>(Named<From>) {
    with_type(a.to.dtype, "cast: to f32, bf16 or f16", [&]<class To>(Named<To>) {
      constexpr int kVector = sizeof(From) == 4 && sizeof(To) == 4 ? 4 : 8;
      elementwise<kVector>("cast", Casted<From, To>{static_cast<const From*>(a.from.data), static_cast<To*>(a.to.data)}, a.n,
                           aligned({a.from.data, a.to.data}), s);
    });
  });
}

void rope(const Rope& a, Stream s) {
  expect(a.head_dim > 0 && a.head_dim % 2 == 0, "rope: head_dim is even", a.head_dim);
  expect(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "rope: kv_heads divides heads; this is heads", a.heads);
  expect_present(a.table, "rope: a table of angles is given");
  expect(a.positions == nullptr || a.table_rows >= 1, "rope: the table has rows; this is rows", a.table_rows);
  const int queries = a.heads / a.kv_heads, half = a.head_dim / 2;
  const int64_t width = int64_t{a.heads + 2 * a.kv_heads} * a.head_dim, rows = a.sequences * a.tokens;
  with_type(a.qkv.dtype, "rope: qkv is f32, bf16 or f16", [&]<class T>(Named<T>) {
    with_vector<kVectorOf<T>>(aligned({a.qkv.data, a.table}) && half % kVectorOf<T> == 0, [&](auto vector) {
      const Rotation<T, vector.value> rotation{
          static_cast<T*>(a.qkv.data), a.table,     a.tokens,           width,       queries, a.kv_heads, half,
          a.backward ? -1.0f : 1.0f,   a.positions, a.positions_stride, a.table_rows};
      elementwise<1>("rope", rotation, rows * a.kv_heads * (queries + 1) * (half / vector.value), false, s);
    });
  });
}

void dropout(const gpu::Dropout& given, Stream s) {
  gpu::Dropout a = given;
  expect(a.p >= 0 && a.p < 1, "dropout: p is in [0, 1); this is p in millionths",
         static_cast<int64_t>(1e6 * static_cast<double>(a.p)));
  if (a.tokens_total == 0) a.tokens_total = a.tokens;
  if (a.width_total == 0) a.width_total = a.width;
  const double bound = static_cast<double>(a.p) * 4294967296.0;  // exact
  uint32_t threshold = static_cast<uint32_t>(bound);             // below 2^32, since p is at most 1 - 2^-24
  if (static_cast<double>(threshold) < bound) ++threshold;       // kept if bits >= bound
  with_type(a.z.dtype, "dropout: z is f32, bf16 or f16", [&]<class T>(Named<T>) {
    const bool wide = aligned({a.z.data}) && a.width % kVectorOf<T> == 0;
    elementwise<kVectorOf<T>>("dropout", DropoutMask<T>{a, threshold, 1.0f / (1.0f - a.p)}, a.sequences * a.tokens * a.width, wide,
                              s);
  });
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
