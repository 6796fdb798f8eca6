// The verbs are where every folder meets: in `shardlab::cli` the names of all folders are seen without their folder's name. A name
// that two folders have must be qualified.
#pragma once

namespace shardlab {

namespace answers {}
namespace cases {}
namespace profiler {}
namespace reports {}
namespace runtime {}
namespace simulator {}
namespace strategies {}
namespace sweeps {}

namespace cli {
using namespace answers;
using namespace cases;
using namespace profiler;
using namespace reports;
using namespace runtime;
using namespace simulator;
using namespace strategies;
using namespace sweeps;
}  // namespace cli

}  // namespace shardlab
