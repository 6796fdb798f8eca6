// In `shardlab::testing` the names of all folders are seen without their folder's name. A name that two folders have must be qualified.
#pragma once

namespace shardlab {

namespace answers {}
namespace cases {}
namespace cli {}
namespace profiler {}
namespace reports {}
namespace runtime {}
namespace simulator {}
namespace strategies {}
namespace sweeps {}

namespace testing {
using namespace answers;
using namespace cases;
using namespace cli;
using namespace profiler;
using namespace reports;
using namespace runtime;
using namespace simulator;
using namespace strategies;
using namespace sweeps;
}  // namespace testing

}  // namespace shardlab
