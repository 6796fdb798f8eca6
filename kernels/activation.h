// Activations of the feed-forward layer: GELU (tanh form) and SwiGLU over alternating gate and up elements.
// Source: Hendrycks & Gimpel 2016; Shazeer 2020.
//
// Backward, elementwise, each product and sum rounded separately as the brackets say:
//   gelu:   u2 = u*u; t as forward; left = 0.5 * (1 + t); slope = 0.7978845608 * (1 + 0.134145 * u2);
//           right = ((0.5 * u) * (1 - t*t)) * slope; du = da * (left + right)
//   swiglu: e = exp(-g); q = 1 / (1 + e); dv = da * (g / (1 + e)); dg = (da * v) * (q * (1 + g * (1 - q)))
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// F. gelu: u[n] -> a[n]. swiglu: u[2n], a_i = silu(u_2i) * u_(2i+1) -> a[n]. Flops: gelu 8n + tanh, swiglu 4n + exp.
/// a may be u for gelu.
struct ActivationForward {
  const float* u = nullptr;
  float* a = nullptr;
  int64_t n = 0;  ///< elements of a
  bool swiglu = false;
};

/// I. da[n], u -> du (like u). du may be u, and for gelu da.
struct ActivationInput {
  const float* da = nullptr;
  const float* u = nullptr;
  float* du = nullptr;
  int64_t n = 0;  ///< elements of da
  bool swiglu = false;
};

}  // namespace shardlab::kernels
