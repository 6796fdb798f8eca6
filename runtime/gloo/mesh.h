// Gloo's connections between processes, as the gloo transport uses them. What stands behind is built only where Gloo's headers are, into a
// library of its own (runtime/gloo/mesh.cpp) that is opened at run time: the program itself needs no Gloo.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardlab::runtime {

/// Every process connected to every other. Calls come from any thread.
class GlooMesh {
 public:
  virtual ~GlooMesh() = default;
  /// Sends bytes, or receives them, in the order of calls with one slot to or from one process. Returns when Gloo is done with the bytes.
  /// False: `close` was called for the slot, or the process has gone.
  virtual bool send(int process, uint64_t slot, const std::byte* at, int64_t bytes) = 0;
  virtual bool receive(int process, uint64_t slot, std::byte* at, int64_t bytes) = 0;
  /// Calls with this slot return false, those under way too.
  virtual void close(uint64_t slot) = 0;
};

struct GlooWish {
  int process = 0, processes = 1;
  std::string host;      ///< this machine, as the others reach it
  double timeout_s = 0;  ///< of connecting
  /// Gives where this process can be reached by each process, gets the same of every process.
  std::function<std::vector<std::vector<std::string>>(const std::vector<std::string>&)> exchange;
};

/// What the library has under `kGlooConnect`. Null: `error` says why. Throws what `exchange` throws.
using GlooConnect = GlooMesh*(const GlooWish& wish, std::string& error);
inline constexpr const char* kGlooConnect = "shardlab_gloo_connect_1";  ///< counted up with every change of this file
inline constexpr const char* kGlooFile = "libshardlab_gloo.so";         ///< beside the program

}  // namespace shardlab::runtime
