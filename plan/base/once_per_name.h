// What ships and is asked for again and again is read once.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "plan/base/result.h"

namespace shardlab {

template <class T>
class OncePerName {
 public:
  /// What `read` gives for `name`, which is called once unless it fails. Reading may ask for other names.
  template <class Read>
  Result<T> of(const std::string& name, const Read& read) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = known_.find(name); found != known_.end()) return found->second;
    }
    Result<T> value = read();
    if (value.ok()) {
      const std::lock_guard lock(mutex_);
      known_.emplace(name, *value);
    }
    return value;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, T> known_;
};

}  // namespace shardlab
