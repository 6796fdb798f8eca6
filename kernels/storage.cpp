#include "kernels/storage.h"

#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "plan/base/check.h"

namespace shardlab::kernels {

#if defined(SHARDLAB_X86_VARIANTS)
namespace x86_64_v4 {
extern const StorageKernels storage_table;
}
namespace x86_64_v3 {
extern const StorageKernels storage_table;
}
#endif
namespace baseline {
extern const StorageKernels storage_table;
}

double largest_value(DType t) {
  switch (t) {
    case DType::f32: return static_cast<double>(std::numeric_limits<float>::max());
    case DType::bf16: return std::ldexp(255, 120);  // 1.1111111b * 2^127
    case DType::f16: return 65504;
    case DType::f8e4m3: return 448;
    case DType::f8e5m2: return 57344;
    default: SHARDLAB_CHECK(false, "{} is no floating-point storage", name_of(t));
  }
}

const StorageKernels& storage_kernels(const Kernels& k) {
#if defined(SHARDLAB_X86_VARIANTS)
  if (&k == all_variants()[0]) return x86_64_v4::storage_table;
  if (&k == all_variants()[1]) return x86_64_v3::storage_table;
#endif
  SHARDLAB_CHECK(&k == all_variants().back(), "`{}` is no variant of this program", k.name);
  return baseline::storage_table;
}

}  // namespace shardlab::kernels
