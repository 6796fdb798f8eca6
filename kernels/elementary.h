// Elementary functions in fp32. These scalar forms and the vector forms inside the kernels evaluate one
// formula (kernels/cpu/formulas.h) and give the same bits on every processor variant. Errors are below
// 2 ulp (tests/kernels/elementary_test.cpp).
#pragma once

namespace shardlab::elementary {

/// e^x. Over- and underflow as IEEE (inf, subnormals, +0); NaN gives NaN.
float exp(float x);
/// Natural logarithm. 0 gives -inf, negative NaN.
float log(float x);
float tanh(float x);
/// 1 / sqrt(x), both rounded.
float rsqrt(float x);
/// The rounded GELU (tanh form) and silu(g) * v as the activations compute them.
float gelu(float u);
float swiglu(float gate, float up);

}  // namespace shardlab::elementary
