// The scalar elementary functions: the kernels' formulas with T = float.
#define SHARDLAB_VARIANT scalar_forms
#include "kernels/elementary.h"

#include "kernels/cpu/formulas.h"

namespace shardlab::elementary {

namespace formulas = kernels::scalar_forms;

float exp(float x) { return formulas::exp_formula(x); }
float log(float x) { return formulas::log_formula(x); }
float tanh(float x) { return formulas::tanh_formula(x); }
float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
float gelu(float u) { return formulas::gelu_formula(u); }
float swiglu(float gate, float up) { return formulas::swiglu_formula(gate, up); }

}  // namespace shardlab::elementary
