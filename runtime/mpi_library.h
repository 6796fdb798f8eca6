// The calls of MPI that the mpi transport makes. The library is opened at run time, so that a build needs none and one program runs
// under Open MPI and under every library with MPICH's binary interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::runtime {

/// A request of either library: room for a pointer (Open MPI) or an int (MPICH).
struct MpiRequest {
  uint64_t handle = 0;
};

/// A non-zero code is an error, described by `describe`. Calls come from the one thread that has called `init`.
class Mpi {
 public:
  virtual ~Mpi() = default;
  virtual const std::string& file() const = 0;  ///< that was opened
  virtual std::string version() const = 0;      ///< in the library's own words, one line
  virtual std::string describe(int error) const = 0;
  virtual int init() = 0;  ///< for threads of which one calls; errors are returned from then on
  virtual int finalize() = 0;
  virtual int rank() = 0;
  virtual int size() = 0;
  /// At most `kMostPiece` bytes to or from a rank of all.
  virtual int send(const void* at, int64_t bytes, int to, int tag, MpiRequest& request) = 0;
  virtual int receive(void* at, int64_t bytes, int from, int tag, MpiRequest& request) = 0;
  /// Whether the request is done; it is free then.
  virtual int test(MpiRequest& request, bool& done) = 0;
  /// Of a receive: it is done soon, with a message or without.
  virtual int cancel(MpiRequest& request) = 0;

  static constexpr int64_t kMostPiece = int64_t{1} << 30;  ///< MPI counts in int
};

/// Names under which the libraries are installed: Open MPI's, and that of MPICH's binary interface (MPICH, Intel MPI, MVAPICH2, Cray MPICH).
std::vector<std::string> open_mpi_files();
std::vector<std::string> mpich_files();

/// Opens the first of `files` that is there. Which of the two binary interfaces it has is read from its symbols. Refuses
/// (ExitCode::kEnvironment) where none can be opened, and a library of another kind by its name.
Result<std::unique_ptr<Mpi>> open_mpi(std::span<const std::string> files);

}  // namespace shardlab::runtime
