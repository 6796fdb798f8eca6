#include "kernels/compress.h"

#include <array>
#include <bit>
#include <cmath>

#include "kernels/tree_of_rows.h"
#include "kernels/window.h"

namespace shardlab::kernels {

// ---- selection

namespace {

/// Selects the k largest of n keys, ties to the smaller index. A threshold is found by counting, digit by digit from the top.
/// `keys(body)` calls body(index, key) for every index in order; it is called once for each digit.
class Selection {
 public:
  template <class Keys>
  Selection(int64_t k, const Keys& keys) {
    std::array<int64_t, kMostDigits> counts;
    ties_ = k;
    for (const Digit d : kDigits) {
      counts.fill(0);
      keys([&](int64_t, uint32_t key) {
        if (above(key, d) == above(threshold_, d)) ++counts[(key >> d.shift) & ((1u << d.bits) - 1)];
      });
      uint32_t digit = (1u << d.bits) - 1;
      while (digit > 0 && counts[digit] < ties_) ties_ -= counts[digit--];
      threshold_ |= digit << d.shift;
    }
  }
  /// Whether the next key, in index order, is among the k.
  bool take(uint32_t key) { return key > threshold_ || (key == threshold_ && ties_-- > 0); }

 private:
  struct Digit {
    int shift, bits;
  };
  static constexpr std::array kDigits{Digit{21, 11}, Digit{10, 11}, Digit{0, 10}};
  static constexpr size_t kMostDigits = size_t{1} << 11;

  /// The bits of a key above a digit.
  static uint32_t above(uint32_t key, Digit d) { return static_cast<uint32_t>(static_cast<uint64_t>(key) >> (d.shift + d.bits)); }

  uint32_t threshold_ = 0;  ///< the k-th largest key
  int64_t ties_ = 0;        ///< how many of those equal to it are taken
};

void check_selection(int64_t n, int64_t k) {
  SHARDLAB_CHECK(k >= 0 && k <= n && n < (int64_t{1} << 31), "{} elements are selected of {}", k, n);
}

}  // namespace

void top_k(const MixedKernels& kernels, const TopK& a, Scratch& scratch) {
  Window x(kernels.storage(), a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  check_selection(a.n, a.k);
  const auto each = [&](const auto& body) {
    for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
      const float* block = x.read(first, n);
      for (int64_t i = 0; i < n; ++i) body(first + i, block[i]);
    });
  };
  const auto key_of = [](float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffffu; };  // sizes order as their bits
  if (a.k == 0) return;
  Selection selection(a.k, [&](const auto& body) { each([&](int64_t i, float value) { body(i, key_of(value)); }); });
  int64_t taken = 0;
  each([&](int64_t i, float value) {
    if (!selection.take(key_of(value))) return;
    a.values[taken] = value;
    a.indices[taken++] = static_cast<int32_t>(i);
  });
}

void random_k(const MixedKernels& kernels, const RandomK& a, Scratch& scratch) {
  Window x(kernels.storage(), a.x, kBlockElements, scratch);
  auto* words = scratch.take<uint32_t>(kBlockElements);
  if (scratch.counting()) return;
  check_selection(a.n, a.k);
  const auto each = [&](const auto& body) {
    for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
      kernels.storage().random_words({a.key, a.element + static_cast<uint64_t>(first), n, words});
      for (int64_t i = 0; i < n; ++i) body(first + i, ~words[i]);
    });
  };
  if (a.k == 0) return;
  Selection selection(a.k, each);
  int64_t taken = 0;
  each([&](int64_t i, uint32_t key) {
    if (selection.take(key)) a.indices[taken++] = static_cast<int32_t>(i);
  });
  for (int64_t i = 0; i < a.k; ++i) a.values[i] = *x.read(a.indices[i], 1);
}

void scatter(const MixedKernels& kernels, const Scatter& a, Scratch& scratch) {
  const int64_t block = rows_per_block(a.parts);
  auto* dense = scratch.take<float>(a.parts * block);
  auto* pointers = static_cast<const float**>(scratch.take_bytes(a.parts * static_cast<int64_t>(sizeof(float*))));
  auto* next = scratch.take<int64_t>(a.parts);  // per part, how many of its elements are placed
  Window y(kernels.storage(), a.y, block, scratch);
  if (scratch.counting()) return;
  for (int64_t p = 0; p < a.parts; ++p) {
    pointers[p] = dense + p * block;
    next[p] = 0;
  }
  for_blocks(a.n, block, [&](int64_t first, int64_t n) {
    for (int64_t p = 0; p < a.parts; ++p) {
      float* part = dense + p * block;
      std::fill_n(part, n, 0.0f);
      for (int64_t& i = next[p]; i < a.k && a.indices[p * a.k + i] < first + n; ++i) {
        const int64_t at = a.indices[p * a.k + i];
        SHARDLAB_CHECK(at >= first, "index {} of part {} is negative or not ascending", at, p);
        part[at - first] = a.values[p * a.k + i];
      }
    }
    kernels.fp32().tree_combine({pointers, static_cast<int>(a.parts), y.place(first, n), n});
    y.write();
  });
  for (int64_t p = 0; p < a.parts; ++p) SHARDLAB_CHECK(next[p] == a.k, "part {} has an index beyond {}", p, a.n);
}

void zero_selected(const ZeroSelected& a) {
  for (int64_t i = 0; i < a.k; ++i) a.x[a.indices[i]] = 0.0f;
}

// ---- signs

namespace {

/// Calls body(row, begin, n, scale) for the blocks of every row.
template <class Body>
void for_sign_blocks(const SignShape& s, const Body& body) {
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t b = 0; b < s.blocks; ++b) {
      const int64_t begin = std::min(s.columns, b * s.block()), end = std::min(s.columns, begin + s.block());
      body(row, begin, end - begin, row * s.blocks + b);
    }
}

}  // namespace

void sign_compress(const MixedKernels& kernels, const SignCompress& a, Scratch& scratch) {
  Window x(kernels.storage(), a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  const SignShape& s = a.shape;
  for_sign_blocks(s, [&](int64_t row, int64_t begin, int64_t count, int64_t scale) {
    double sum = 0;
    for_blocks(count, kBlockElements, [&](int64_t first, int64_t n) {
      sum += kernels.storage().absolute_sum(x.read(row * s.columns + begin + first, n), n);
    });
    a.scales[scale] = count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
  });
  for (int64_t row = 0; row < s.rows; ++row)
    for_blocks(s.columns, kBlockElements, [&](int64_t first, int64_t n) {
      kernels.storage().pack_signs({x.read(row * s.columns + first, n), n, a.signs + row * s.row_bytes() + first / 8});
    });
}

void sign_expand(const MixedKernels& kernels, const SignExpand& a, Scratch& scratch) {
  Window y(kernels.storage(), a.y, kBlockElements, scratch);
  if (scratch.counting()) return;
  const SignShape& s = a.shape;
  for_sign_blocks(s, [&](int64_t row, int64_t begin, int64_t count, int64_t scale) {
    for_blocks(count, kBlockElements, [&](int64_t first, int64_t n) {
      kernels.storage().expand_signs(
          {a.signs + row * s.row_bytes(), begin + first, n, a.scales[scale], y.place(row * s.columns + begin + first, n)});
      y.write();
    });
  });
}

void sign_expand_sum(const MixedKernels& kernels, const SignExpandSum& a, Scratch& scratch) {
  const SignShape& s = a.shape;
  tree_of_rows(kernels, s.rows, s.columns, a.y, scratch, [&](int64_t row, int64_t first, int64_t n, float* to) {
    for (int64_t i = 0; i < n;) {  // a run may touch several blocks
      const int64_t block = (first + i) / s.block();
      const int64_t run = std::min(n - i, (block + 1) * s.block() - (first + i));
      kernels.storage().expand_signs({a.signs + row * s.row_bytes(), first + i, run, a.scales[row * s.blocks + block], to + i});
      i += run;
    }
  });
}

// ---- low rank

namespace {

/// Columns of a matrix, each contiguous.
struct Columns {
  double* data;
  int64_t rows;
  double* operator[](int64_t c) const { return data + c * rows; }
  double dot(int64_t a, int64_t b) const {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += (*this)[a][i] * (*this)[b][i];
    return sum;
  }
};

/// Takes the span of the columns before `c` out of column c, twice (once leaves what rounding put back); returns the rest's norm.
double take_out(const Columns& q, int64_t c) {
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t b = 0; b < c; ++b) {
      const double share = q.dot(b, c);
      for (int64_t i = 0; i < q.rows; ++i) q[c][i] -= share * q[b][i];
    }
  return std::sqrt(q.dot(c, c));
}

/// Column c becomes a direction that the columns before it do not span: of the unit vectors' rests one has at least the mean
/// squared norm, (rows - c) / rows.
double fresh_direction(const Columns& q, int64_t c) {
  const double enough = std::sqrt(0.5 * static_cast<double>(q.rows - c) / static_cast<double>(q.rows));
  for (int64_t unit = 0; unit < q.rows; ++unit) {
    std::fill_n(q[c], q.rows, 0.0);
    q[c][unit] = 1;
    const double rest = take_out(q, c);
    if (rest >= enough) return rest;
  }
  SHARDLAB_CHECK(false, "{} orthonormal columns of {} rows leave no direction", c, q.rows);
}

}  // namespace

void orthogonalise(const Orthogonalise& a, Scratch& scratch) {
  const Columns q{scratch.take<double>(a.rows * a.columns), a.rows};
  if (scratch.counting()) return;
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t c = 0; c < a.columns; ++c) q[c][r] = static_cast<double>(a.p[r * a.columns + c]);
  for (int64_t c = 0; c < a.columns; ++c) {
    if (c >= a.rows) {
      std::fill_n(q[c], a.rows, 0.0);
      continue;
    }
    const double before = std::sqrt(q.dot(c, c));
    double rest = take_out(q, c);
    if (rest <= 1e-6 * before) rest = fresh_direction(q, c);
    for (int64_t i = 0; i < a.rows; ++i) q[c][i] /= rest;  // a NaN stays one
  }
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t c = 0; c < a.columns; ++c) a.q[r * a.columns + c] = static_cast<float>(q[c][r]);
}

void subtract_share(const MixedKernels& kernels, const SubtractShare& a, Scratch& scratch) {
  Window m(kernels.storage(), a.m, kBlockElements, scratch), error(kernels.storage(), a.error, kBlockElements, scratch);
  Window approximation(kernels.storage(), a.approximation, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    kernels.storage().subtract_scaled({m.read(first, n), approximation.read(first, n), n, a.share, error.place(first, n)});
    error.write();
  });
}

}  // namespace shardlab::kernels
