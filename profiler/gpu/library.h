// The status of NVIDIA's profiling libraries in this process. They are loaded at run time: the program links none of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardlab::profiler {

enum class LibraryState : uint8_t {
  kOk,
  kAbsent,           ///< the library is not installed, or this build was made without its headers
  kNoDriver,         ///< no NVIDIA driver, or no device that it knows
  kOtherSubscriber,  ///< another tool traces this process (one at a time may)
  kNoPrivilege,      ///< the driver keeps it for administrators
  kUnsupported,      ///< this device or its mode (MIG, virtual GPU, confidential computing) has no such thing
  kFailed,           ///< anything else; the message has the library's words
};

/// "ok", "absent", "no driver", "other subscriber", "no privilege", "unsupported", "failed".
std::string_view name_of(LibraryState state);

/// A state with what was seen and what to do about it; `remedy` is empty for kOk.
struct LibraryStatus {
  LibraryState state = LibraryState::kAbsent;
  std::string message;
  std::string remedy;

  bool ok() const { return state == LibraryState::kOk; }
};

/// A library opened at run time; closed with the object.
class SharedLibrary {
 public:
  SharedLibrary() = default;
  /// Opens the first of `names` that can be opened.
  template <class Names>
  explicit SharedLibrary(const Names& names) {
    for (const auto& name : names)
      if (open(std::string(name))) return;
  }
  ~SharedLibrary();
  SharedLibrary(SharedLibrary&& other) noexcept;
  SharedLibrary& operator=(SharedLibrary&& other) noexcept;

  bool is_open() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  /// Address of a symbol, null where the library lacks it.
  void* find(const char* symbol) const;
  /// Stores the address of a function; false where the library lacks it.
  template <class Function>
  bool find(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(find(symbol));
    return function != nullptr;
  }
  /// Never close it: some libraries leave threads or exit handlers behind.
  void keep() { handle_ = nullptr; }

 private:
  bool open(const std::string& name);
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace shardlab::profiler
