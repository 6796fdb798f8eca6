// The library libshardlab_c: what a question comes to, behind C.
#include "answers/shardlab.h"

#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <utility>

#include "answers/told.h"
#include "plan/base/world_error.h"

struct shardlab_answer {
  int status = SHARDLAB_YES;
  std::string json;
};

namespace {

using shardlab::Error;
using shardlab::ExitCode;
using shardlab::answers::Told;

/// What is left to say where there is no memory to say it in.
shardlab_answer& without_memory() {
  static shardlab_answer answer{SHARDLAB_ENVIRONMENT, R"({"error": "out of memory", "hint": "ask for less at once"})"};
  return answer;
}

template <class Tell>
Told guarded(const Tell& tell) {
  try {
    return tell();
  } catch (const shardlab::WorldError& error) {
    return shardlab::answers::told(Error{ExitCode::kEnvironment, error.what(), error.hint(), {}});
  } catch (const std::filesystem::filesystem_error& error) {
    return shardlab::answers::told(Error{ExitCode::kEnvironment, error.what(), "check the path and its permissions", {}});
  } catch (const std::bad_alloc&) { throw; } catch (const std::exception& error) {
    return shardlab::answers::told(
        Error{ExitCode::kBug, error.what(), "this is a bug of shardlab's: please report the question", {}});
  }
}

template <class Tell>
shardlab_answer* answer(const Tell& tell) noexcept {
  try {
    Told result = guarded(tell);
    return new shardlab_answer{static_cast<int>(result.code), std::move(result.json)};
  } catch (...) { return &without_memory(); }
}

template <class Tell>
shardlab_answer* answer(const char* question, const Tell& tell) noexcept {
  return answer([&] {
    return question != nullptr ? tell(question)
                               : shardlab::answers::told(shardlab::refusal("the question is null", "give a JSON object"));
  });
}

}  // namespace

const char* shardlab_version(void) { return SHARDLAB_VERSION; }

shardlab_answer* shardlab_memory(const char* question) { return answer(question, shardlab::answers::tell_memory_json); }

shardlab_answer* shardlab_search(const char* question) { return answer(question, shardlab::answers::tell_search_json); }

shardlab_answer* shardlab_names(void) { return answer(shardlab::answers::tell_names_json); }

int shardlab_status(const shardlab_answer* answer) { return answer != nullptr ? answer->status : SHARDLAB_REFUSED; }

const char* shardlab_json(const shardlab_answer* answer) { return answer != nullptr ? answer->json.c_str() : ""; }

void shardlab_free(shardlab_answer* answer) {
  if (answer != &without_memory()) delete answer;
}
