// From settings to a case: sources, overrides, derived values.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sweeps/expression.h"
#include "sweeps/resolution.h"
#include "sweeps/settings.h"
#include "sweeps/sweep.h"

namespace shardlab::sweeps {

/// A case as far as settings say it.
struct Draft {
  Case config;
  std::vector<std::pair<std::string, std::string>> unheld;  ///< keys whose value no case of this version can hold, with that value
  std::shared_ptr<ModelConfig> model;                       ///< Point::model

  /// The value of a key for expressions; no value for a derived key that `given` does not set (pass null for a complete case).
  ExpressionValue lookup(std::string_view word, const Settings* given) const;
};

/// Model and machine of the settings' sources, then every key in the order of the table. Derived values are not filled in.
Draft draft_of(const Settings& settings, const Sources& sources);

/// Fills in what is not given:
///   seq_len              the model's max_positions, at most 4096
///   schedule             none for pp = 1; above 1f1b, or interleaved with vpp above 1
///   precision            bf16 on a described machine whose device multiplies in it, fp32 on a local one
///   dp                   devices of the machine / (tp pp cp)
///   bucket_bytes         25 MiB where buckets of gradients travel between data-parallel ranks, else 0 (plan/automatic.h)
///   grad_accumulation    global_batch_tokens / (seq_len micro_batch dp), or 1 where no global batch is given
///   global_batch_tokens  seq_len micro_batch grad_accumulation dp
/// Refuses what does not divide.
Result<void> derive(Case& c, const Settings& given);

/// Refuses what cannot be had whatever the plan: more ranks than devices, measuring what is not this machine; and, unless the point
/// is only estimated (kAnalytic), values and models that no case can hold.
Result<void> check_point(const Draft& draft, Mode mode, Resolution resolution);

}  // namespace shardlab::sweeps
