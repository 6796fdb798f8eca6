// The verbs are where every folder meets: in `shardlab::cli` the names of all folders are seen without their folder's name, as in
// `shardlab::cases`. A name that two folders have must be qualified.
#pragma once

#include "cases/namespaces.h"

namespace shardlab::cli {
using namespace cases;
}  // namespace shardlab::cli
