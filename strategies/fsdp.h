#pragma once

namespace shardlab {

struct Draft;

void fsdp(Draft& draft);

}  // namespace shardlab
