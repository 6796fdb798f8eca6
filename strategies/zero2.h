#pragma once

namespace shardlab {

struct Draft;

void zero2(Draft& draft);

}  // namespace shardlab
