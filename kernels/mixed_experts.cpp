// Mixed storage: mixtures of experts, a token's rows or an expert's at a time.
#include "kernels/expert_rows.h"
#include "kernels/linear_runs.h"
#include "kernels/window.h"

namespace shardlab::kernels {

namespace {

/// Columns of dy and of x in a block of a product's phase W, and rows in fast mode.
constexpr int64_t kOutColumns = 64, kInColumns = 128, kFastRows = 1024;

/// The matrix [rows, columns] behind `before` others of that size, with its own scales: no block has elements of two of them.
Stored matrix_behind(Stored s, int64_t before, int64_t rows, int64_t columns) {
  if (s.data == nullptr) return s;
  s.data = static_cast<char*>(s.data) + before * rows * columns * bytes_per_element(s.dtype);
  const auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
  if (s.scales.values != nullptr)
    s.scales.values += before * blocks(rows, s.scales.block_rows) * blocks(columns, s.scales.block_columns);
  return s;
}

/// Rows of one token, those that were not dropped, dense in scratch and by expert, as a kernel of one token finds them. `places`: where
/// each lies among the rows of all tokens, by choice.
class TokenRows {
 public:
  TokenRows(const StorageKernels& s, const Stored& rows, int64_t top_k, int64_t width, Scratch& scratch)
      : row_(s, rows, width, scratch), top_k_(top_k), width_(width), dense_(scratch.take<float>(top_k * width)) {}
  const float* read(const int32_t* places) {
    each(places, [&](int64_t at, float* to) { std::copy_n(row_.read(at, width_), width_, to); });
    return dense_;
  }
  float* place() { return dense_; }
  void write(const int32_t* places) {
    each(places, [&](int64_t at, const float* from) {
      float* to = row_.place(at, width_);
      std::copy_n(from, width_, to);
      row_.write();
    });
  }

 private:
  template <class Body>
  void each(const int32_t* places, const Body& body) {
    for (int64_t j = 0; j < top_k_; ++j) {
      if (places[j] < 0) continue;
      // Choices need not be in the order of the experts' places.
      const auto before = std::count_if(places, places + top_k_, [&](int32_t other) { return other >= 0 && other < places[j]; });
      body(places[j] * width_, dense_ + before * width_);
    }
  }

  Window row_;
  int64_t top_k_, width_;
  float* dense_;
};

/// Scratch for the places of all tokens' rows, and for those of one that an fp32 kernel is given.
struct PlacesScratch {
  void *all, *one;
  PlacesScratch(int64_t tokens, int64_t top_k, int64_t experts, Scratch& scratch)
      : all(scratch.take_bytes(places_scratch_bytes(tokens, top_k, experts))),
        one(scratch.take_bytes(places_scratch_bytes(1, top_k, experts))) {}
};

}  // namespace

void MixedKernels::dispatch(const MixedDispatch& a, Scratch& scratch) const {
  Dispatch one = a.dispatch;
  const PlacesScratch lent(one.tokens, one.top_k, one.experts, scratch);
  TokenRows rows(s_, one.back ? a.from : a.to, one.top_k, one.width, scratch);
  Window token(s_, one.back ? a.to : a.from, one.width, scratch);
  if (scratch.counting()) return;
  const int64_t tokens = std::exchange(one.tokens, 1), width = one.width;
  const int32_t* places = places_of(one.choice, tokens, one.top_k, one.experts, lent.all);
  one.scratch = lent.one;
  for (int64_t t = 0; t < tokens; ++t, places += one.top_k, one.choice += one.top_k) {
    one.from = one.back ? rows.read(places) : token.read(t * width, width);
    one.to = one.back ? token.place(t * width, width) : rows.place();
    kernels::dispatch(one);
    one.back ? token.write() : rows.write(places);
  }
}

void MixedKernels::combine_forward(const MixedCombineForward& a, Scratch& scratch) const {
  CombineForward one = a.combine;
  const PlacesScratch lent(one.tokens, one.top_k, one.experts, scratch);
  TokenRows rows(s_, a.rows, one.top_k, one.width, scratch);
  Window y(s_, a.y, one.width, scratch);
  if (scratch.counting()) return;
  const int64_t tokens = std::exchange(one.tokens, 1), width = one.width;
  const int32_t* places = places_of(one.choice, tokens, one.top_k, one.experts, lent.all);
  one.scratch = lent.one;
  for (int64_t t = 0; t < tokens; ++t, places += one.top_k, one.choice += one.top_k, one.weights += one.top_k) {
    one.rows = rows.read(places);
    one.y = y.place(t * width, width);
    kernels::combine_forward(one);
    y.write();
  }
}

void MixedKernels::combine_input(const MixedCombineInput& a, Scratch& scratch) const {
  CombineInput one = a.combine;
  const PlacesScratch lent(one.tokens, one.top_k, one.experts, scratch);
  TokenRows rows(s_, a.rows, one.top_k, one.width, scratch), drows(s_, a.drows, one.top_k, one.width, scratch);
  Window dy(s_, a.dy, one.width, scratch);
  if (scratch.counting()) return;
  const int64_t tokens = std::exchange(one.tokens, 1), width = one.width;
  const int32_t* places = places_of(one.choice, tokens, one.top_k, one.experts, lent.all);
  one.scratch = lent.one;
  for (int64_t t = 0; t < tokens; ++t) {
    one.dy = dy.read(t * width, width);
    one.rows = rows.read(places);
    one.drows = drows.place();
    kernels::combine_input(one);
    drows.write(places);
    places += one.top_k, one.choice += one.top_k, one.weights += one.top_k, one.dweights += one.top_k;
  }
}

void MixedKernels::gate_forward(const MixedGateForward& a, Scratch& scratch) const {
  const int64_t width = a.width, block = rows_per_block(width);
  Window x(s_, a.x, block * width, scratch), gate(s_, a.gate, block, scratch), y(s_, a.y, block * width, scratch);
  if (scratch.counting()) return;
  for_blocks(a.tokens, block, [&](int64_t first, int64_t rows) {
    kernels::gate_forward(k_, {.x = x.read(first * width, rows * width),
                               .gate = gate.read(first, rows),
                               .y = y.place(first * width, rows * width),
                               .tokens = rows,
                               .width = width});
    y.write();
  });
}

void MixedKernels::gate_input(const MixedGateInput& a, Scratch& scratch) const {
  const int64_t width = a.width, block = rows_per_block(width);
  Window dy(s_, a.dy, block * width, scratch), x(s_, a.x, block * width, scratch), gate(s_, a.gate, block, scratch),
      dx(s_, a.dx, block * width, scratch), dgate(s_, a.dgate, block, scratch);
  if (scratch.counting()) return;
  for_blocks(a.tokens, block, [&](int64_t first, int64_t rows) {
    kernels::gate_input(k_, {.dy = dy.read(first * width, rows * width),
                             .x = x.read(first * width, rows * width),
                             .gate = gate.read(first, rows),
                             .dx = dx.place(first * width, rows * width),
                             .dgate = dgate.place(first, rows),
                             .tokens = rows,
                             .width = width});
    dx.write();
    dgate.write();
  });
}

void MixedKernels::grouped_linear(const MixedGroupedLinear& a, Scratch& scratch) const {
  const GroupedLinear& p = a.product;
  const int64_t from = p.back ? p.out : p.in, to = p.back ? p.in : p.out;
  const auto multiply = [&](int64_t expert, int64_t first, int64_t rows, Scratch& lent) {
    const Stored x = matrix_behind(a.x, first, 1, from), w = matrix_behind(a.w, expert, p.out, p.in),
                 y = matrix_behind(a.y, first, 1, to);
    if (p.back)
      linear_input({.dy = x, .w = w, .dx = y, .rows = rows, .in = p.in, .out = p.out, .out_part = p.part, .canonical = p.canonical},
                   lent);
    else
      linear_forward(
          {.x = x, .w = w, .bias = {}, .y = y, .rows = rows, .in = p.in, .out = p.out, .in_part = p.part, .canonical = p.canonical},
          lent);
  };
  Scratch most = Scratch::counter();
  multiply(0, 0, p.rows.capacity, most);
  const Scratch lent = scratch;
  scratch.take_bytes(most.used());
  if (scratch.counting()) return;
  for_groups(p.rows, [&](int64_t expert, int64_t first, int64_t rows) {
    Scratch again = lent;  // every expert uses the same
    multiply(expert, first, rows, again);
  });
}

void MixedKernels::grouped_linear_weight(const MixedGroupedLinearWeight& a, Scratch& scratch) const {
  const GroupedLinearWeight& p = a.product;
  const RowCounts& r = p.rows;
  expect(!p.accumulate || !p.canonical, "grouped linear: canonical mode does not accumulate; plan Add ops", p.accumulate);
  void* begins = scratch.take_bytes(ExpertRuns::bytes(r));
  int64_t* ends = p.canonical ? scratch.take<int64_t>(r.leaves + 1) : nullptr;
  const int64_t most = p.canonical ? r.capacity : std::min(r.capacity, kFastRows);
  const int64_t outs = std::min(p.out, kOutColumns), ins = std::min(p.in, kInColumns);
  Panel dy(s_, a.dy, p.out, {most, outs}, scratch), x(s_, a.x, p.in, {most, ins}, scratch),
      dw(s_, a.dw, p.in, {outs, ins}, scratch);
  void* packed = scratch.take_bytes(p.canonical ? product_bytes_up_to(r.capacity) : 0);
  if (scratch.counting()) return;
  const ExpertRuns all(r, begins);
  // Rows of an expert lie apart by source: blocks of them are put together, in the order of the sources.
  const auto block = [&](int64_t expert, int64_t out, int64_t m, int64_t in, int64_t n, float* to) {
    bool more = p.accumulate;
    int64_t held = 0;
    for (int source = 0; source < r.sources; ++source)
      for_blocks(all.rows(source, expert), most, [&](int64_t row, int64_t rows) {
        const int64_t first = all.begin(source, expert) + row;
        dy.read_at(held * m, first * p.out + out, {rows, m});
        x.read_at(held * n, first * p.in + in, {rows, n});
        held += rows;
        if (p.canonical) return;
        k_.linear_weight(
            {.x = x.place(0, {}), .dy = dy.place(0, {}), .dw = to, .tokens = {1, rows, {}}, .in = n, .out = m, .accumulate = more});
        more = true;
        held = 0;
      });
    if (!p.canonical) return;
    const RowRun run{0, held};
    linear_weight_runs(k_, {.x = x.place(0, {}),
                            .dy = dy.place(0, {}),
                            .dw = to,
                            .runs = &run,
                            .run_count = 1,
                            .leaf_ends = ends,
                            .leaves = r.leaves,
                            .in = n,
                            .out = m,
                            .scratch = packed});
  };
  for (int64_t e = 0; e < r.experts; ++e) {
    const int64_t rows = all.rows(e);
    if (rows == 0 && p.accumulate) continue;
    if (p.canonical) all.leaf_ends(e, ends);
    for_blocks(p.out, outs, [&](int64_t out, int64_t m) {
      for_blocks(p.in, ins, [&](int64_t in, int64_t n) {
        const int64_t at = (e * p.out + out) * p.in + in;
        float* to = p.accumulate ? dw.read(at, {m, n}) : dw.place(at, {m, n});
        if (rows == 0)
          std::fill_n(to, m * n, 0.0f);
        else
          block(e, out, m, in, n, to);
        dw.write();
      });
    });
  }
}

void MixedKernels::grouped_activation(const MixedGroupedActivation& a, Scratch& scratch) const {
  int64_t rows = 0;
  for (int64_t i = 0; i < a.rows.leaves * a.rows.experts && !scratch.counting(); ++i) rows += a.rows.counts[i];
  expect(rows <= a.rows.capacity, "activation: rows that are counted fit the buffer; rows", rows);
  const int64_t n = (scratch.counting() ? a.rows.capacity : rows) * a.width;
  if (a.da.data == nullptr)
    activation_forward({a.u, a.to, n, a.swiglu}, scratch);
  else
    activation_input({a.da, a.u, a.to, n, a.swiglu}, scratch);
}

}  // namespace shardlab::kernels
