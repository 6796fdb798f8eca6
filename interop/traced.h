// What the forms of traces have in common: the ranks, the names of ops, and steps laid end to end.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// Takes a file's bytes as they are made.
using ByteSink = std::function<void(std::string_view bytes)>;

/// The ranks that a trace has events of, ascending: of a large mesh those that stand for others.
std::vector<int> traced_ranks(const Trace& trace);

/// Where each step begins when steps are laid end to end, each as long as its last rank takes; behind the last the end of all.
std::vector<double> step_starts(const Trace& trace);

/// "Memcpy DtoH" by the spaces that a copy goes between.
std::string_view copy_name(const Instruction& instruction);

/// "linear attn.qkv": kind and label of an op, the same for every layer and micro-batch; "alloc" or "free".
std::string op_name(const Instruction& instruction);

}  // namespace shardlab::interop
