// In `shardlab::answers` the names of the folders that answer are seen without their folder's name. A name that two folders have must be
// qualified.
#pragma once

namespace shardlab {

namespace reports {}
namespace simulator {}
namespace strategies {}
namespace sweeps {}

namespace answers {
using namespace reports;
using namespace simulator;
using namespace strategies;
using namespace sweeps;
}  // namespace answers

}  // namespace shardlab
