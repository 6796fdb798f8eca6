// A case is where plan, strategies, simulator and runtime meet: in `shardlab::cases` their names are seen without their folder's
// name. A name that two folders have must be qualified.
#pragma once

namespace shardlab {

namespace answers {}
namespace profiler {}
namespace reports {}
namespace runtime {}
namespace simulator {}
namespace strategies {}
namespace sweeps {}

namespace cases {
using namespace answers;
using namespace profiler;
using namespace reports;
using namespace runtime;
using namespace simulator;
using namespace strategies;
using namespace sweeps;
}  // namespace cases

}  // namespace shardlab
