// Mixed storage: the ops whose rows, or elements, are independent of one another.
#include "kernels/window.h"
#include "plan/base/moment_codes.h"

namespace shardlab::kernels {

void MixedKernels::norm_forward(const MixedNormForward& a, Scratch& scratch) const {
  const int64_t width = a.width, block = rows_per_block(width);
  Window x(s_, a.x, block * width, scratch), y(s_, a.y, block * width, scratch);
  Window gamma(s_, a.gamma, width, scratch), beta(s_, a.rms ? Stored{} : a.beta, width, scratch);
  if (scratch.counting()) return;
  const float* weights = gamma.read(0, width);
  const float* biases = beta.read(0, width);
  for_blocks(a.rows, block, [&](int64_t first, int64_t rows) {
    k_.norm_forward({.x = x.read(first * width, rows * width),
                     .gamma = weights,
                     .beta = biases,
                     .y = y.place(first * width, rows * width),
                     .stats = a.stats + first * (a.rms ? 1 : 2),
                     .rows = rows,
                     .width = width,
                     .epsilon = a.epsilon,
                     .rms = a.rms});
    y.write();
  });
}

void MixedKernels::norm_input(const MixedNormInput& a, Scratch& scratch) const {
  const int64_t width = a.width, block = rows_per_block(width);
  Window dy(s_, a.dy, block * width, scratch), x(s_, a.x, block * width, scratch), dx(s_, a.dx, block * width, scratch);
  Window residual(s_, a.residual, block * width, scratch), gamma(s_, a.gamma, width, scratch);
  if (scratch.counting()) return;
  const float* weights = gamma.read(0, width);
  for_blocks(a.rows, block, [&](int64_t first, int64_t rows) {
    const int64_t at = first * width, n = rows * width;
    k_.norm_input({.dy = dy.read(at, n),
                   .x = x.read(at, n),
                   .gamma = weights,
                   .stats = a.stats + first * (a.rms ? 1 : 2),
                   .residual = residual.read(at, n),
                   .dx = dx.place(at, n),
                   .rows = rows,
                   .width = width,
                   .rms = a.rms});
    dx.write();
  });
}

void MixedKernels::rope(const MixedRope& a, Scratch& scratch) const {
  Rope r = a.rope;
  const int64_t width = int64_t{r.heads + 2 * r.kv_heads} * r.head_dim, block = rows_per_block(width);
  Window qkv(s_, a.qkv, block * width, scratch);
  if (scratch.counting()) return;
  SHARDLAB_CHECK(r.table != nullptr, "rope on {} wants its table", name_of(a.qkv.dtype));
  for (int64_t b = 0; b < a.rope.sequences; ++b)
    for_blocks(a.rope.tokens, block, [&](int64_t first, int64_t rows) {
      r.qkv = qkv.read((b * a.rope.tokens + first) * width, rows * width);
      r.sequences = 1;
      r.tokens = rows;
      r.position_begin = a.rope.position_begin + first;
      if (a.rope.positions == nullptr)
        r.table = a.rope.table + first * r.head_dim;
      else
        r.positions = a.rope.positions + b * a.rope.positions_stride + first;
      k_.rope(r);
      qkv.write();
    });
}

void MixedKernels::activation_forward(const MixedActivationForward& a, Scratch& scratch) const {
  const int64_t inputs = a.swiglu ? 2 : 1;
  Window u(s_, a.u, inputs * kBlockElements, scratch), result(s_, a.a, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    k_.activation_forward({u.read(inputs * first, inputs * n), result.place(first, n), n, a.swiglu});
    result.write();
  });
}

void MixedKernels::activation_input(const MixedActivationInput& a, Scratch& scratch) const {
  const int64_t inputs = a.swiglu ? 2 : 1;
  Window da(s_, a.da, kBlockElements, scratch), u(s_, a.u, inputs * kBlockElements, scratch);
  Window du(s_, a.du, inputs * kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    k_.activation_input({da.read(first, n), u.read(inputs * first, inputs * n), du.place(inputs * first, inputs * n), n, a.swiglu});
    du.write();
  });
}

void MixedKernels::residual_forward(const MixedResidualForward& a, Scratch& scratch) const {
  const int64_t width = a.width, block = rows_per_block(width);
  Window x(s_, a.x, block * width, scratch), z(s_, a.z, block * width, scratch), y(s_, a.y, block * width, scratch);
  Window bias(s_, a.bias, width, scratch);
  if (scratch.counting()) return;
  const float* biases = bias.read(0, width);
  for_blocks(a.rows, block, [&](int64_t first, int64_t rows) {
    const int64_t at = first * width, n = rows * width;
    k_.residual_forward(
        {.x = x.read(at, n), .z = z.read(at, n), .bias = biases, .y = y.place(at, n), .rows = rows, .width = width});
    y.write();
  });
}

void MixedKernels::dropout(const MixedDropout& a, Scratch& scratch) const {
  Dropout d = a.dropout;
  const int64_t tokens = a.dropout.tokens, width = d.width, block = rows_per_block(width);
  Window z(s_, a.z, block * width, scratch);
  if (scratch.counting()) return;
  d.tokens_total = d.tokens_total == 0 ? tokens : d.tokens_total;
  for (int64_t b = 0; b < a.dropout.sequences; ++b)
    for_blocks(tokens, block, [&](int64_t first, int64_t rows) {
      d.z = z.read((b * tokens + first) * width, rows * width);
      d.sequences = 1;
      d.tokens = rows;
      d.sequence_begin = a.dropout.sequence_begin + b;
      d.token_begin = a.dropout.token_begin + first;
      k_.dropout(d);
      z.write();
    });
}

void MixedKernels::embed_forward(const MixedEmbedForward& a, Scratch& scratch) const {
  Window table(s_, a.table, a.width, scratch), x(s_, a.x, a.width, scratch);
  if (scratch.counting()) return;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t held = a.ids[row] - a.row_begin;
    const bool here = held >= 0 && held < a.table_rows;
    k_.embed_forward({.ids = a.ids + row,
                      .table = here ? table.read(held * a.width, a.width) : nullptr,
                      .x = x.place(row * a.width, a.width),
                      .rows = 1,
                      .width = a.width,
                      .row_begin = a.ids[row],
                      .table_rows = here ? 1 : 0});
    x.write();
  }
}

void MixedKernels::positions_forward(const MixedPositionsForward& a, Scratch& scratch) const {
  const int64_t n = a.tokens * a.width;
  Window x(s_, a.x, kBlockElements, scratch), table(s_, a.table, kBlockElements, scratch), y(s_, a.y, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(n, kBlockElements, [&](int64_t first, int64_t count) {
    const float* positions = table.read(first, count);
    for (int64_t b = 0; b < a.sequences; ++b) {
      k_.add({x.read(b * n + first, count), positions, y.place(b * n + first, count), count});
      y.write();
    }
  });
}

void MixedKernels::add(const MixedAdd& a, Scratch& scratch) const {
  Window left(s_, a.a, kBlockElements, scratch), right(s_, a.b, kBlockElements, scratch), sum(s_, a.c, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    k_.add({left.read(first, n), right.read(first, n), sum.place(first, n), n});
    sum.write();
  });
}

void MixedKernels::copy(const MixedCopy& a, Scratch& scratch) const {
  const bool through = a.from.dtype != DType::f32 && a.to.dtype != DType::f32;
  float* block = through ? scratch.take<float>(kBlockElements) : nullptr;
  if (scratch.counting()) return;
  if (a.to.dtype == DType::f32) return s_.widen({a.from.data, a.from.dtype, a.n, static_cast<float*>(a.to.data)});
  if (!through) return s_.narrow({static_cast<const float*>(a.from.data), a.n, a.to.dtype, a.to.data});
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    s_.widen({static_cast<const char*>(a.from.data) + first * bytes_per_element(a.from.dtype), a.from.dtype, n, block});
    s_.narrow({block, n, a.to.dtype, static_cast<char*>(a.to.data) + first * bytes_per_element(a.to.dtype)});
  });
}

void MixedKernels::fill(const MixedFill& a, Scratch& scratch) const {
  Window x(s_, a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {
    k_.fill(x.place(first, n), n, a.value);
    x.write();
  });
}

void MixedKernels::squared_norm(const MixedSquaredNorm& a, Scratch& scratch) const {
  constexpr int kLanes = 16;
  Window x(s_, a.x, kBlockElements, scratch);
  if (scratch.counting()) return;
  double sum[kLanes] = {};
  for_blocks(a.n, kBlockElements, [&](int64_t first, int64_t n) {  // blocks are whole numbers of lanes, but for the last
    const float* block = x.read(first, n);
    for (int64_t i = 0; i < n; ++i) sum[i % kLanes] += static_cast<double>(block[i]) * static_cast<double>(block[i]);
  });
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int j = 0; j < width; ++j) sum[j] = sum[2 * j] + sum[2 * j + 1];
  *a.total = sum[0];
}

namespace {

/// Runs of a gradient times a factor.
class ScaledGradient {
 public:
  ScaledGradient(const StorageKernels& s, const Stored& grad, float factor, Scratch& scratch)
      : s_(s), factor_(factor), grad_(s, grad, kBlockElements, scratch) {
    if (factor != 1) scaled_ = scratch.take<float>(kBlockElements);
  }
  const float* read(int64_t first, int64_t n) {
    const float* g = grad_.read(first, n);
    if (factor_ == 1) return g;
    s_.scale({g, n, factor_, scaled_});
    return scaled_;
  }

 private:
  const StorageKernels& s_;
  float factor_;
  Window grad_;
  float* scaled_ = nullptr;
};

/// Elements [first, first + n) of `copy`, where there, from the new parameter's.
void write_copy(const StorageKernels& s, const Stored& copy, const float* param, int64_t first, int64_t n) {
  if (copy.data == nullptr) return;
  s.narrow({param, n, copy.dtype, static_cast<char*>(copy.data) + first * bytes_per_element(copy.dtype)});
}

}  // namespace

void MixedKernels::sgd(const MixedSgd& a, Scratch& scratch) const {
  ScaledGradient grad(s_, a.grad, a.factor, scratch);
  Window param(s_, a.param, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.sgd.n, kBlockElements, [&](int64_t first, int64_t n) {
    float* w = param.read(first, n);
    k_.sgd({grad.read(first, n), w, n, a.sgd.learning_rate, a.sgd.weight_decay});
    write_copy(s_, a.copy, w, first, n);
    param.write();
  });
}

void MixedKernels::adamw(const MixedAdamW& a, Scratch& scratch) const {
  ScaledGradient grad(s_, a.grad, a.factor, scratch);
  Window param(s_, a.param, kBlockElements, scratch);
  Window m(s_, a.m, kBlockElements, scratch), v(s_, a.v, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.adamw.n, kBlockElements, [&](int64_t first, int64_t n) {
    AdamW block = a.adamw;
    block.grad = grad.read(first, n);
    block.param = param.read(first, n);
    block.m = m.read(first, n);
    block.v = v.read(first, n);
    block.n = n;
    k_.adamw(block);
    write_copy(s_, a.copy, block.param, first, n);
    param.write();
    m.write();
    v.write();
  });
}

void MixedKernels::adamw8bit(const MixedAdamW8bit& a, Scratch& scratch) const {
  static_assert(kBlockElements % kMomentBlock == 0);
  ScaledGradient grad(s_, a.grad, a.factor, scratch);
  Window param(s_, a.param, kBlockElements, scratch);
  float* moments = scratch.take<float>(2 * kMomentBlock);
  if (scratch.counting()) return;
  for_blocks(a.adamw.n, kBlockElements, [&](int64_t first, int64_t n) {
    AdamW8bit block = a.adamw;
    block.grad = grad.read(first, n);
    block.param = param.read(first, n);
    block.m = a.m + first;
    block.v = a.v + first;
    block.m_scale = a.m_scale + first / kMomentBlock;
    block.v_scale = a.v_scale + first / kMomentBlock;
    block.scratch = moments;
    block.n = n;
    k_.adamw8bit(block);
    param.write();
  });
}

void MixedKernels::lion(const MixedLion& a, Scratch& scratch) const {
  ScaledGradient grad(s_, a.grad, a.factor, scratch);
  Window param(s_, a.param, kBlockElements, scratch), m(s_, a.m, kBlockElements, scratch);
  if (scratch.counting()) return;
  for_blocks(a.lion.n, kBlockElements, [&](int64_t first, int64_t n) {
    Lion block = a.lion;
    block.grad = grad.read(first, n);
    block.param = param.read(first, n);
    block.m = m.read(first, n);
    block.n = n;
    k_.lion(block);
    write_copy(s_, a.copy, block.param, first, n);
    param.write();
    m.write();
  });
}

}  // namespace shardlab::kernels
