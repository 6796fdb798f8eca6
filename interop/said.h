// The account of an export: which settings of a case were said, left to a script, or cannot be said.
#pragma once

#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "interop/frameworks.h"
#include "plan/keys.h"

namespace shardlab::interop {

/// Collects what becomes of each key of a case. What was neither said nor refused at the end, and is not as it is where nothing is
/// asked for, is refused by `finish`: an export loses nothing.
class Account {
 public:
  Account(const Case& c, const Framework& framework) : case_(c), framework_(framework) {}

  /// The keys are in the files. A path that ends with '.' is a whole section.
  void say(std::initializer_list<std::string_view> paths);
  /// The training script sets the key: `how` says with what.
  void by_script(std::string_view path, std::string_view how);
  /// The framework cannot do it: why, and what to set instead.
  void refuse(std::string_view path, std::string why);
  /// Refuses unless `holds`; the key counts as said either way.
  void require(bool holds, std::string_view path, std::string why);
  void note(std::string text) { notes_.push_back(std::move(text)); }

  const Case& of() const { return case_; }
  const Framework& framework() const { return framework_; }
  /// The error with every refusal, if there is one.
  Result<void> finish();
  std::vector<std::string> take_script() { return std::move(script_); }
  std::vector<std::string> take_notes() { return std::move(notes_); }

 private:
  bool is_said(std::string_view path) const;

  const Case& case_;
  const Framework& framework_;
  std::set<std::string, std::less<>> said_;
  std::vector<std::string> problems_, script_, notes_;
};

/// Whether the key changes nothing in this case: the rank of a compression that is off, the scale of a precision that is not fp16.
bool is_inert(std::string_view path, const Case& c);

/// Whether somebody chose a size of buckets: one that is not what shardlab takes where none is given. Frameworks have sizes of their
/// own, which an export leaves as they are otherwise.
bool asks_for_buckets(const Case& c);

/// Optimizer steps of the run: the learning rate's whole course, or else the steps that are measured.
int64_t train_steps(const Case& c);

/// "4,4,4": layers of each part of the model, in order.
std::vector<int> layers_of_parts(const Case& c);

/// A list of labels of recompute: empty, or as the user gave it.
bool recomputes_attention_core(const Case& c);

/// The four parts that write the files of one framework each.
void write_megatron(Account& account, const ExportOptions& options, std::vector<File>& files);
void write_deepspeed(Account& account, const ExportOptions& options, std::vector<File>& files);
void write_torchtitan(Account& account, const ExportOptions& options, std::vector<File>& files);
void write_nanotron(Account& account, const ExportOptions& options, std::vector<File>& files);
void write_accelerate(Account& account, const ExportOptions& options, std::vector<File>& files);

/// A DeepSpeed configuration as text; marks what it says.
std::string deepspeed_json(Account& account);

/// "# Written by shardlab ...": one comment line for each fact of the stamp.
std::string stamp(const Account& account, const ExportOptions& options);

/// A launch script that runs `command` under torchrun on the case's devices, on one node or, under Slurm, on all.
File launch_script(const Account& account, const ExportOptions& options, const std::string& script, const std::string& arguments,
                   const std::string& environment = "");

/// Ranks of a node, and nodes, of the case's machine: as few nodes as hold all ranks.
struct Placement {
  int64_t nodes = 1, per_node = 1;
};
Placement placement_of(const Case& c);

}  // namespace shardlab::interop
