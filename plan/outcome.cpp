#include "plan/outcome.h"

namespace shardlab {

std::string_view name_of(Status s) {
  switch (s) {
    case Status::kOk: return "ok";
    case Status::kRefused: return "refused";
    case Status::kOom: return "oom";
    case Status::kTimeout: return "timeout";
    case Status::kFailed: return "failed";
  }
  return "?";
}

}  // namespace shardlab
