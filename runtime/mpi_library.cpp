#include "runtime/mpi_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

namespace shardlab::runtime {

namespace {

constexpr int kThreadFunneled = 1;  // MPI_THREAD_FUNNELED in both
constexpr int kMostVersion = 8192;  // at least MPI_MAX_LIBRARY_VERSION_STRING and MPI_MAX_ERROR_STRING of both

/// Handles are addresses of objects that the library exports. Source: mpi.h of Open MPI 4.
struct OpenMpiAbi {
  using Handle = void*;
  Handle world = nullptr, byte = nullptr, errors_return = nullptr;
  static void* ignored_status() { return nullptr; }
  bool find(void* library) {
    world = dlsym(library, "ompi_mpi_comm_world");
    byte = dlsym(library, "ompi_mpi_byte");
    errors_return = dlsym(library, "ompi_mpi_errors_return");
    return world != nullptr && byte != nullptr && errors_return != nullptr;
  }
};

/// Handles are numbers. Source: mpi.h of MPICH 4, fixed by the MPICH ABI compatibility initiative.
struct MpichAbi {
  using Handle = int;
  Handle world = 0x44000000, byte = 0x4c00010d, errors_return = 0x54000001;
  static void* ignored_status() { return reinterpret_cast<void*>(intptr_t{1}); }
  /// A function that mpi.h itself names, so that every library with the interface has it.
  static bool find(void* library) { return dlsym(library, "MPIR_Dup_fn") != nullptr; }
};

template <class Abi>
class MpiOf final : public Mpi {
 public:
  MpiOf(std::string file, Abi abi) : file_(std::move(file)), abi_(abi) {}

  /// The name of a symbol that the library lacks; empty when it has all.
  std::string open(void* library) {
    std::string missing;
    const auto find = [&](const char* symbol, auto*& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && missing.empty()) missing = symbol;
    };
    find("MPI_Get_library_version", version_);
    find("MPI_Error_string", error_string_);
    find("MPI_Init_thread", init_);
    find("MPI_Finalize", finalize_);
    find("MPI_Comm_set_errhandler", set_errhandler_);
    find("MPI_Comm_rank", rank_);
    find("MPI_Comm_size", size_);
    find("MPI_Isend", send_);
    find("MPI_Irecv", receive_);
    find("MPI_Test", test_);
    find("MPI_Cancel", cancel_);
    return missing;
  }

  const std::string& file() const override { return file_; }
  std::string version() const override {
    return text_of([&](char* text, int* length) { return version_(text, length); });
  }
  std::string describe(int error) const override {
    return text_of([&](char* text, int* length) { return error_string_(error, text, length); });
  }
  int init() override {
    int provided = 0;
    const int error = init_(nullptr, nullptr, kThreadFunneled, &provided);
    return error != 0 ? error : set_errhandler_(abi_.world, abi_.errors_return);
  }
  int finalize() override { return finalize_(); }
  int rank() override { return number_of(rank_); }
  int size() override { return number_of(size_); }

  int send(const void* at, int64_t bytes, int to, int tag, MpiRequest& request) override {
    Handle handle{};
    const int error = send_(at, static_cast<int>(bytes), abi_.byte, to, tag, abi_.world, &handle);
    keep(handle, request);
    return error;
  }
  int receive(void* at, int64_t bytes, int from, int tag, MpiRequest& request) override {
    Handle handle{};
    const int error = receive_(at, static_cast<int>(bytes), abi_.byte, from, tag, abi_.world, &handle);
    keep(handle, request);
    return error;
  }
  int test(MpiRequest& request, bool& done) override {
    Handle handle = handle_of(request);
    int flag = 0;
    const int error = test_(&handle, &flag, Abi::ignored_status());
    keep(handle, request);
    done = flag != 0;
    return error;
  }
  int cancel(MpiRequest& request) override {
    Handle handle = handle_of(request);
    return cancel_(&handle);
  }

 private:
  using Handle = typename Abi::Handle;

  static void keep(Handle handle, MpiRequest& request) {
    request.handle = 0;
    std::memcpy(&request.handle, &handle, sizeof handle);
  }
  static Handle handle_of(const MpiRequest& request) {
    Handle handle{};
    std::memcpy(&handle, &request.handle, sizeof handle);
    return handle;
  }
  template <class Call>
  static std::string text_of(const Call& call) {
    std::array<char, kMostVersion> text{};
    int length = 0;
    if (call(text.data(), &length) != 0) return "unknown";
    const std::string_view all(text.data(), static_cast<size_t>(std::clamp(length, 0, kMostVersion - 1)));
    return std::string(all.substr(0, all.find_first_of(std::string_view("\n\0", 2))));
  }
  int number_of(int (*call)(Handle, int*)) const {
    int number = -1;
    return call(abi_.world, &number) == 0 ? number : -1;
  }

  const std::string file_;
  const Abi abi_;
  int (*version_)(char*, int*) = nullptr;
  int (*error_string_)(int, char*, int*) = nullptr;
  int (*init_)(int*, char***, int, int*) = nullptr;
  int (*finalize_)() = nullptr;
  int (*set_errhandler_)(Handle, Handle) = nullptr;
  int (*rank_)(Handle, int*) = nullptr;
  int (*size_)(Handle, int*) = nullptr;
  int (*send_)(const void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*receive_)(void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*test_)(Handle*, int*, void*) = nullptr;
  int (*cancel_)(Handle*) = nullptr;
};

template <class Abi>
Result<std::unique_ptr<Mpi>> open_as(const std::string& file, void* library, const Abi& abi) {
  auto mpi = std::make_unique<MpiOf<Abi>>(file, abi);
  if (const std::string missing = mpi->open(library); !missing.empty())
    return Error{ExitCode::kEnvironment, fmt::format("{} has no {}", file, missing), "install MPI 3 or later", ""};
  return std::unique_ptr<Mpi>(std::move(mpi));
}

}  // namespace

std::vector<std::string> open_mpi_files() { return {"libmpi.so.40"}; }
std::vector<std::string> mpich_files() { return {"libmpich.so.12", "libmpi.so.12"}; }

Result<std::unique_ptr<Mpi>> open_mpi(std::span<const std::string> files) {
  std::string tried;
  for (const std::string& file : files) {
    // Open MPI's own parts look for its symbols among those of the program. The library stays: it keeps threads and exit handlers.
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
    tried += (tried.empty() ? "" : ", ") + file;
    if (library == nullptr) continue;
    if (OpenMpiAbi abi; abi.find(library)) return open_as(file, library, abi);
    if (MpichAbi::find(library)) return open_as(file, library, MpichAbi());
    return Error{ExitCode::kEnvironment, fmt::format("{} is neither Open MPI nor a library with MPICH's binary interface", file),
                 "name another with SHARDLAB_MPI", ""};
  }
  return Error{ExitCode::kEnvironment, fmt::format("no MPI library is found: looked for {}", tried),
               "apt-get install openmpi-bin, or mpich; or name the library with SHARDLAB_MPI", ""};
}

}  // namespace shardlab::runtime
