// The sweep and case file as JSON Schema, for editors: made of the tables that the loader reads.
#pragma once

#include <string>

namespace shardlab::cli {

enum class SchemaOf { kSweep, kCase };

/// JSON Schema (draft 7, which yaml-language-server reads) of a sweep or case file: every key with its meaning, form, words and range.
/// What spans several keys, and what an expression says, is the loader's to check.
std::string file_schema(SchemaOf what);

}  // namespace shardlab::cli
