#include "profiler/gpu/library.h"

#include <dlfcn.h>

#include <utility>

namespace shardlab::profiler {

std::string_view name_of(LibraryState state) {
  switch (state) {
    case LibraryState::kOk: return "ok";
    case LibraryState::kAbsent: return "absent";
    case LibraryState::kNoDriver: return "no driver";
    case LibraryState::kOtherSubscriber: return "other subscriber";
    case LibraryState::kNoPrivilege: return "no privilege";
    case LibraryState::kUnsupported: return "unsupported";
    case LibraryState::kFailed: return "failed";
  }
  return "failed";
}

bool SharedLibrary::open(const std::string& name) {
  // Stays mapped when the handle is closed: what such a library allocated for itself is reached from its own globals alone.
  handle_ = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
  if (handle_ != nullptr) name_ = name;
  return handle_ != nullptr;
}

SharedLibrary::~SharedLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

SharedLibrary::SharedLibrary(SharedLibrary&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), name_(std::move(other.name_)) {}

SharedLibrary& SharedLibrary::operator=(SharedLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(name_, other.name_);
  return *this;
}

void* SharedLibrary::find(const char* symbol) const { return handle_ == nullptr ? nullptr : dlsym(handle_, symbol); }

}  // namespace shardlab::profiler
