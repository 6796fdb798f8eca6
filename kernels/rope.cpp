#include "kernels/rope.h"

#include <cmath>

#include "kernels/checks.h"

namespace shardlab::kernels {

void rope_table(int64_t begin, int64_t tokens, int head_dim, float theta, float* table, const TokenOrder& order, int64_t total) {
  expect(head_dim > 0 && head_dim % 2 == 0, "rope: head_dim is even", head_dim);
  const int pairs = head_dim / 2;
  for (int i = 0; i < pairs; ++i) {
    const double frequency = std::pow(static_cast<double>(theta), (-2.0 * i) / head_dim);
    for (int64_t t = 0; t < tokens; ++t) {
      const double angle = static_cast<double>(order.position(begin + t, total)) * frequency;
      table[(t * pairs + i) * 2] = static_cast<float>(std::cos(angle));
      table[(t * pairs + i) * 2 + 1] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace shardlab::kernels
