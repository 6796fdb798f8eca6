// The machine as a kernel's body sees it: one thread of a block. On the device every method is an instruction; on the host it is a
// fiber of kernels/cuda/emulate. Kernel bodies use nothing else of CUDA, so that one text serves both.
//
// All 32 lanes of a warp call warp operations together; all threads of a block call barriers together.
#pragma once

#include "kernels/cuda/number.h"
#ifndef __CUDACC__
#include "kernels/cuda/emulate/lanes.h"
#endif

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

inline constexpr int kWarp = 32;

#ifdef __CUDACC__

class Thread {
 public:
  SHARDLAB_DEVICE int index() const { return static_cast<int>(threadIdx.x); }
  SHARDLAB_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  SHARDLAB_DEVICE int64_t block_x() const { return blockIdx.x; }
  SHARDLAB_DEVICE int64_t block_y() const { return blockIdx.y; }
  SHARDLAB_DEVICE int64_t block_z() const { return blockIdx.z; }
  SHARDLAB_DEVICE int64_t blocks_x() const { return gridDim.x; }
  SHARDLAB_DEVICE int lane() const { return index() % kWarp; }
  SHARDLAB_DEVICE int warp() const { return index() / kWarp; }

  /// Dynamic shared memory, aligned to 16.
  SHARDLAB_DEVICE unsigned char* shared() const {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
  }
  SHARDLAB_DEVICE void barrier() const { __syncthreads(); }
  /// Orders this warp's accesses to shared memory.
  SHARDLAB_DEVICE void sync_warp() const { __syncwarp(); }

  template <class T>
  SHARDLAB_DEVICE T shuffle_xor(T x, int mask) const {
    return __shfl_xor_sync(0xffffffffu, x, mask);
  }
  template <class T>
  SHARDLAB_DEVICE T shuffle(T x, int lane) const {
    return __shfl_sync(0xffffffffu, x, lane);
  }
  SHARDLAB_DEVICE uint32_t ballot(bool holds) const { return __ballot_sync(0xffffffffu, holds); }
  SHARDLAB_DEVICE static int ones(uint32_t x) { return __popc(x); }

  /// Copies 16 bytes from device to shared memory later, or zeros where `holds` is not; committed in groups.
  SHARDLAB_DEVICE void copy_later(void* to, const void* from, bool holds) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(to)), "l"(__cvta_generic_to_global(from)),
                 "r"(holds ? 16 : 0)
                 : "memory");
  }
  SHARDLAB_DEVICE void commit_copies() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  /// Waits until at most kInFlight of this thread's groups are under way.
  template <int kInFlight>
  SHARDLAB_DEVICE void wait_copies() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
  }

  /// Four 8 x 8 matrices of 2-byte elements from shared memory: lane l gives the address of row l % 8 of matrix l / 8, and gets, of
  /// matrix i, elements 2(l % 4) and 2(l % 4) + 1 of row l / 4 (`transposed`: rows 2(l % 4) and 2(l % 4) + 1 of column l / 4).
  template <bool kTransposed>
  SHARDLAB_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) const {
    if constexpr (kTransposed)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address_of(row))
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address_of(row))
                   : "memory");
  }

  /// c[16,8] += a[16,16] b[16,8] with fp32 sums; fragments as PTX's mma.m16n8k16 lays them out.
  template <class T>
  SHARDLAB_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const;

 private:
  SHARDLAB_DEVICE static uint32_t address_of(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }
};

#define SHARDLAB_MMA(type)                                                                                                         \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <>
SHARDLAB_DEVICE void Thread::multiply_add<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const {
  SHARDLAB_MMA("bf16");
}
template <>
SHARDLAB_DEVICE void Thread::multiply_add<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const {
  SHARDLAB_MMA("f16");
}
#undef SHARDLAB_MMA

#else

class Thread {
 public:
  explicit Thread(emulate::Lane& lane) : lane_(lane) {}
  int index() const { return lane_.thread(); }
  int threads() const { return lane_.threads(); }
  int64_t block_x() const { return lane_.block_x(); }
  int64_t block_y() const { return lane_.block_y(); }
  int64_t block_z() const { return lane_.block_z(); }
  int64_t blocks_x() const { return lane_.geometry().x; }
  int lane() const { return index() % kWarp; }
  int warp() const { return index() / kWarp; }
  unsigned char* shared() const { return lane_.shared(); }
  void barrier() const { lane_.barrier(); }
  void sync_warp() const { lane_.exchange(emulate::WarpOp::kSync, nullptr, 0); }

  template <class T>
  T shuffle(T x, int from) const {
    const auto& given = lane_.exchange(emulate::WarpOp::kShuffle, &x, sizeof(T));
    std::memcpy(&x, given.bytes[from % kWarp], sizeof(T));
    return x;
  }
  template <class T>
  T shuffle_xor(T x, int mask) const {
    return shuffle(x, lane() ^ mask);
  }
  uint32_t ballot(bool holds) const {
    const auto& given = lane_.exchange(emulate::WarpOp::kBallot, &holds, 1);
    uint32_t all = 0;
    for (int i = 0; i < kWarp; ++i) all |= static_cast<uint32_t>(given.bytes[i][0]) << i;
    return all;
  }
  static int ones(uint32_t x) { return __builtin_popcount(x); }

  void copy_later(void* to, const void* from, bool holds) const { lane_.copy_later(to, holds ? from : nullptr); }
  void commit_copies() const { lane_.commit_copies(); }
  template <int kInFlight>
  void wait_copies() const {
    lane_.wait_copies(kInFlight);
  }

  template <bool kTransposed>
  void load_matrices(uint32_t (&r)[4], const void* row) const {
    const auto& given = lane_.exchange(emulate::WarpOp::kMatrixLoad, &row, sizeof row);
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int i = 0; i < 2; ++i) {
        const int across = lane() / 4, along = lane() % 4 * 2 + i;
        const unsigned char* from;
        std::memcpy(&from, given.bytes[8 * matrix + (kTransposed ? along : across)], sizeof from);
        uint16_t element;
        std::memcpy(&element, from + 2 * (kTransposed ? across : along), 2);
        r[matrix] = i == 0 ? element : r[matrix] | static_cast<uint32_t>(element) << 16;
      }
  }

  template <class T>
  void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) const {
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto& given = lane_.exchange(emulate::WarpOp::kMatrixProduct, mine, sizeof mine);
    const auto element = [&](int of_lane, int word, int half) {
      uint16_t bits;
      std::memcpy(&bits, given.bytes[of_lane] + 4 * word + 2 * half, 2);
      return value_of(T{bits});
    };
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) * element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      c[i] += sum;
    }
  }

 private:
  emulate::Lane& lane_;
};

#endif

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
