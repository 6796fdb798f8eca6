#include "tests/verify/exam.h"

#include <fstream>
#include <sstream>

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

const std::vector<std::string>& exam_subjects() {
  static const std::vector<std::string> subjects{
      "activation-offload",
      "cpu-adam",
      "dualpipe",
      "fp16-skip",
      "fsdp",
      "gathered-attention",
      "interleaved-1f1b",
      "merged-ring-attention",
      "moe-dropless",
      "nvme-adam",
      "parameter-server",
      "powersgd",
      "selective-recompute",
      "sequence-parallel",
      "ulysses",
      "zb-v",
      "zigzag-ring-attention",
  };
  return subjects;
}

std::string exam_text(const std::string& subject) {
  const std::string path = testing::source_dir() + "/tests/verify/exam/" + subject + ".plan";
  std::ifstream file(path);
  INFO(path);
  REQUIRE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace shardlab::testing
