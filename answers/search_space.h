// The words of `shardlab search` as a space of layouts, and layouts back as words.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "answers/namespaces.h"
#include "answers/surroundings.h"
#include "plan/base/result.h"
#include "simulator/estimator/search/search.h"
#include "sweeps/machines.h"

namespace shardlab::answers {

struct SearchFlags {
  std::string model, machine, machine_file, profile, assume, objective = "time", out, html, format;
  std::string devices, global_batch_tokens, seq_len, tokens, margin;
  std::vector<std::pair<std::string, std::string>> axes;  ///< key and values, in the words of the sweep file
  std::vector<std::string> set;  ///< "model.KEY=VALUE", "machine.KEY=VALUE", and what is trained: "train.lora_rank=16"
  int top = 10;
  double price_usd = 0, max_days = 0, site_overhead = 1.5, kg_co2_per_kwh = 0.4;
  Surroundings around;
};

/// What the flags ask for.
struct SearchTask {
  std::string model_name;
  Machine machine;  ///< with as many nodes as the largest number of devices needs
  int64_t parameters = 0;
  search::Space space;
  search::Options options;
  std::vector<search::Study> studies;
  double tokens = 0;  ///< of a whole training run; 0: not asked
  analytic::RunPrice price;
  std::string price_note;  ///< "$3.99 a device-hour (SOURCE, read DATE)"; empty where no price is known

  const search::Study& study_of(const search::Point& point) const;
};
Result<SearchTask> search_task(const SearchFlags& flags);

/// Every layout key of a point with its value, in the words of the command line and of sweep files.
std::vector<std::pair<std::string, std::string>> words_of(const search::Point& point);
/// A layout in a line, word by word: "dp8", "tp8", "pp4", "1f1b", "recompute-full", "mb2", "x16". Sizes of 1 and what is the
/// default are left out.
struct LayoutWord {
  std::string_view key;  ///< of the sweep file
  std::string word;
};
std::vector<LayoutWord> layout_parts(const search::Point& point);
/// The same as one text.
std::string layout_words(const search::Point& point);
/// "$3.99 a device-hour (SOURCE, read DATE)": the price that is given, else the machine's; empty where neither is.
std::string price_note(double given_usd, const Price& listed);
std::string offload_words(const search::Point& point);
/// The same layout as a sweep file with one point, and as options of another verb.
std::string sweep_of(const SearchFlags& flags, const SearchTask& task, const search::Point& point);
std::string options_of(const SearchFlags& flags, const search::Point& point);

}  // namespace shardlab::answers
