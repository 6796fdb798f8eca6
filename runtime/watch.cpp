#include "runtime/watch.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "runtime/crew.h"

namespace shardlab::runtime {

void Watch::enter(const Crew& crew) {
  const std::lock_guard lock(mutex_);
  crews_.push_back(&crew);
}

void Watch::leave(const Crew& crew) {
  const std::lock_guard lock(mutex_);
  std::erase(crews_, &crew);
}

std::string Watch::picture(double seconds) const {
  const std::lock_guard lock(mutex_);  // no crew ends meanwhile
  std::vector<std::vector<Crew::Place>> before;
  for (const Crew* crew : crews_) before.push_back(crew->places());
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::string text = fmt::format("the process {}", phase_.load());
  if (const int64_t steps = steps_.load(); steps > 0) text += fmt::format(", step {} of {}", step_.load() + 1, steps);
  for (size_t i = 0; i < crews_.size(); ++i)
    if (const std::string still = crews_[i]->standstill(before[i]); !still.empty()) return text + ": " + still;
  return text + (crews_.empty() ? "" : ", and no rank stands still");
}

}  // namespace shardlab::runtime
