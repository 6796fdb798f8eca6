// A full-screen terminal program: draws styled lines, reads keys.
#pragma once

#include "cli/memory_screen.h"
#include "cli/namespaces.h"
#include "plan/base/result.h"

namespace shardlab::cli {

/// Shows `screen` until its user leaves or a signal asks for the end (`interrupt::asked`), and gives the terminal back as it was,
/// also where an exception passes. Refuses where input or output is no terminal, or its kind is unknown.
Result<void> show(MemoryScreen& screen);

}  // namespace shardlab::cli
