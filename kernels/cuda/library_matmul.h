// Linear by cuBLASLt.
//
// The library counts columns first, so that our row-major y[rows,out] is its matrix [out,rows]:
//   F  y[rows,out] = x w^T    D = op(A) op(B), m = out, n = rows, k = in     A = w transposed, B = x
//   I  dx[rows,in] = dy w                      m = in,  n = rows, k = out    A = w,            B = dy
//   W  dw[out,in] = dy^T x                     m = in,  n = out,  k = rows   A = x,            B = dy transposed
#pragma once

#include <memory>

#include "kernels/cuda/kernels.h"

namespace shardlab::gpu {

class CublasLtApi;  // kernels/cuda/cublaslt_api.h

/// y[rows,width] += bias[width]: launched if the library cannot add a bias of its type.
using AddBias = void (*)(Output y, Input bias, int64_t rows, int64_t width, Stream s);

/// A Matmul on `library`, with a handle of its own on the calling thread's device. Null where that gives none, which `check` has
/// then been told. A product for which the library has no algorithm is told to the stream's check, by its shape, types, the
/// alignment of its arrays and the workspace lent, with what to do instead.
std::unique_ptr<Matmul> library_matmul(std::shared_ptr<CublasLtApi> library, const MatmulOptions& options, AddBias add_bias,
                                       LaunchCheck& check);
/// The products of the installed cuBLASLt.
std::unique_ptr<Matmul> library_matmul(const MatmulOptions& options, AddBias add_bias, LaunchCheck& check);

}  // namespace shardlab::gpu
