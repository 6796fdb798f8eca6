// The choice of a variant: every variant's table, and what the processor says about itself.
#include <dnnl.h>
#include <fmt/core.h>

#include <array>

#include "kernels/checks.h"
#include "kernels/kernels.h"
#include "kernels/library_product.h"
#include "kernels/linear_runs.h"
#include "plan/base/check.h"

namespace shardlab::kernels {

#if defined(SHARDLAB_X86_VARIANTS)
namespace x86_64_v4 {
extern const Kernels table;
void linear_weight_runs(const LinearWeightRuns& a);
}  // namespace x86_64_v4
namespace x86_64_v3 {
extern const Kernels table;
void linear_weight_runs(const LinearWeightRuns& a);
}  // namespace x86_64_v3
#endif
namespace baseline {
extern const Kernels table;
void linear_weight_runs(const LinearWeightRuns& a);
}  // namespace baseline

void argument_refused(const char* rule, int64_t value) {
  SHARDLAB_CHECK(false, "a kernel was called with {} against the rule \"{}\"", value, rule);
  __builtin_unreachable();
}

std::span<const Kernels* const> all_variants() {
#if defined(SHARDLAB_X86_VARIANTS)
  static constexpr std::array variants{&x86_64_v4::table, &x86_64_v3::table, &baseline::table};
#else
  static constexpr std::array variants{&baseline::table};
#endif
  return variants;
}

bool runs_here([[maybe_unused]] const Kernels& k) {
#if defined(SHARDLAB_X86_VARIANTS)
  // __builtin_cpu_supports asks the operating system too whether it keeps the wide registers.
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (&k == &x86_64_v4::table) return v4;
  if (&k == &x86_64_v3::table) return v3;
#endif
  return true;
}

void linear_weight_runs([[maybe_unused]] const Kernels& k, const LinearWeightRuns& a) {
#if defined(SHARDLAB_X86_VARIANTS)
  if (&k == &x86_64_v4::table) return x86_64_v4::linear_weight_runs(a);
  if (&k == &x86_64_v3::table) return x86_64_v3::linear_weight_runs(a);
#endif
  baseline::linear_weight_runs(a);
}

const Kernels& kernels_for_this_processor() {
  for (const Kernels* k : all_variants())
    if (runs_here(*k)) return *k;
  SHARDLAB_CHECK(false, "no variant of the kernels runs on this processor, not even the last");
}

std::string description(const Kernels& k) {
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("{} + oneDNN {}.{}.{}{}", k.name, v->major, v->minor, v->patch,
                     LibraryProduct::runs_here() ? " with bf16" : "");
}

}  // namespace shardlab::kernels
