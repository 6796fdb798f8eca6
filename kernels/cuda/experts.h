// Arguments of the kernels of mixtures of experts. Shapes, and what a choice below 0 means, are those of kernels/experts.h; arrays of T are
// one type a launch. Nothing is read on the host: the kernels find rows and counts in device memory.
#pragma once

#include "kernels/cuda/operands.h"
#include "kernels/experts.h"

namespace shardlab::gpu {

using kernels::RowCounts;

/// F and I of a router, fp32: kernels::RouteForward (which needs no scratch here), kernels::RouteInput. At most 1024 experts.
using kernels::RouteForward;
using kernels::RouteInput;
/// kernels::ExpertLoad.
using kernels::ExpertLoad;

/// As kernels::UpdateRouterBias; `rate` f32[1].
struct UpdateRouterBias {
  const float* load = nullptr;
  float* bias = nullptr;
  const float* rate = nullptr;
  int64_t experts = 1;
};

/// As kernels::fit_rows: counts[n] -> fitted[n], apart. `overflow` becomes 1 where some are cut off, and else stays.
struct FitRows {
  const int32_t* counts = nullptr;
  int32_t* fitted = nullptr;
  int32_t* overflow = nullptr;
  int64_t n = 0, room = 0;
};

/// As kernels::Dispatch, of T.
struct Dispatch {
  Input from;
  Output to;
  const int32_t* choice = nullptr;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  bool back = false;
  Scratch scratch;
};

/// As kernels::CombineForward: rows and y of T, weights f32.
struct CombineForward {
  Input rows;
  const float* weights = nullptr;
  const int32_t* choice = nullptr;
  Output y;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  Scratch scratch;
};
/// As kernels::CombineInput: dy, rows and drows of T, weights and dweights f32.
struct CombineInput {
  Input dy, rows;
  const float* weights = nullptr;
  const int32_t* choice = nullptr;
  Output drows;
  float* dweights = nullptr;
  int64_t tokens = 0, top_k = 1, experts = 1, width = 0;
  Scratch scratch;
};

/// As kernels::GateForward and kernels::GateInput: x, y, dy and dx of T, gate and dgate f32 or T.
struct GateForward {
  Input x, gate;
  Output y;
  int64_t tokens = 0, width = 0;
};
struct GateInput {
  Input dy, x, gate;
  Output dx, dgate;
  int64_t tokens = 0, width = 0;
};

/// As kernels::GroupedLinear, in the fixed order of LinearForward and LinearInput: x, w of T, y of T or f32. Blocks are launched for as many
/// rows as the buffer has room for; those without a row end at once.
struct GroupedLinear {
  RowCounts rows;
  Input x, w;
  Output y;
  int64_t in = 0, out = 0;
  kernels::Part part;
  bool back = false;
  Scratch scratch;
};
/// As kernels::GroupedLinearWeight in canonical mode, whose leaves are the parts of tokens by which rows are counted: x, dy of T, dw of T or
/// f32. `accumulate`: old + new.
struct GroupedLinearWeight {
  RowCounts rows;
  Input x, dy;
  Output dw;
  int64_t in = 0, out = 0;
  bool accumulate = false;
  Scratch scratch;
};

/// As kernels::GroupedActivation, of T; da.data null: forward.
struct GroupedActivation {
  RowCounts rows;
  Input u, da;
  Output to;
  int64_t width = 0;
  bool swiglu = false;
  Scratch scratch;
};

int64_t scratch_bytes(const RouteInput& a);
int64_t scratch_bytes(const Dispatch& a);
int64_t scratch_bytes(const CombineForward& a);
int64_t scratch_bytes(const CombineInput& a);
int64_t scratch_bytes(const GroupedLinear& a);
int64_t scratch_bytes(const GroupedLinearWeight& a);
int64_t scratch_bytes(const GroupedActivation& a);

}  // namespace shardlab::gpu
