// Updates that may be left out: whether a step's gradients are to be trusted, agreed by all ranks before the first of them updates.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// Appends calls of one op each over numbers of a stage.
class StageNumbers {
 public:
  StageNumbers(Draft& draft, StageDraft& stage, std::string_view strategy) : draft_(draft), stage_(stage), strategy_(strategy) {}

  /// One number of class `other`, the same on every rank, for the step or, where it is persistent, for good.
  BufferId number(std::string name, DType dtype = DType::f32, bool persistent = false) const;
  /// The call of an op over `buffers`; `reads` and `writes` are indices into them. If `when` is given, the op runs only where
  /// `when` is not 0.
  Event call(std::string name, std::vector<BufferId> buffers, Work work, const std::vector<int>& reads,
             const std::vector<int>& writes, BufferId when = {}) const;
  void append(std::string name, std::vector<BufferId> buffers, Work work, const std::vector<int>& reads,
              const std::vector<int>& writes, BufferId when = {}) const {
    stage_.events.push_back(call(std::move(name), std::move(buffers), std::move(work), reads, writes, when));
  }
  /// A kernel by name; its results have the types that they are declared with.

  /// 1 on every rank where some rank found an infinity or a NaN in a gradient that it updates with, else 0: the greatest over all
  /// ranks that hold a slice, or another stage. A metric called `where`, unless that is empty, has this rank's first bad gradient:
  /// its number among the op's reads plus 1, or 0.
  BufferId found_inf(std::string where = {}) const;

 private:
  Draft& draft_;
  StageDraft& stage_;
  std::string_view strategy_;
};

/// See skipped_update.cpp.
void skip_updates(Draft& draft);

}  // namespace shardlab::strategies
