// A case as the files of a framework that can train it, and such files as settings of a case.
//
//   auto exported = export_case(config, "megatron", {.program = version_line()});   files, or what Megatron-LM cannot express, by name
//   auto imported = import_file(text, "ds_config.json", "deepspeed");              settings in the words of the sweep file
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab::interop {

/// A framework whose files are written. Its keys were read in the sources of exactly this version.
struct Framework {
  std::string_view id;        ///< as `--to` says it
  std::string_view name;      ///< as people say it
  std::string_view version;   ///< tag, or version in its own words
  std::string_view commit;    ///< of that version, with its date
  std::string_view settings;  ///< the file of an export that holds the settings
  bool imports = false;       ///< whether its files are read too
};
std::span<const Framework> frameworks();
const Framework* find_framework(std::string_view id);

struct File {
  std::string name;  ///< relative to the folder of the export
  std::string text;
  bool executable = false;
};

struct ExportOptions {
  std::string program;        ///< "shardlab 0.1.0 (commit)": for the stamp
  std::string case_id;        ///< for the stamp
  std::string entry_point;    ///< the training script that is launched; empty: the framework's own, or train.py
  std::string slurm_account;  ///< of the job script
  bool slurm = false;         ///< a job script for Slurm beside the others
};

struct Exported {
  std::vector<File> files;
  /// What the framework leaves to the training script, as "train.seq_len=4096: ...".
  std::vector<std::string> by_script;
  std::vector<std::string> notes;
};

/// The files with which `framework` trains the case. Every setting of model, layout and training is written, left to the training
/// script with a line in EXPORT.md, or refused by name with what to set instead; none is dropped. Refuses a layout that the framework
/// does not have. Settings of shardlab's own executor (`execution`, `measure`, `checkpoint`) mean nothing there.
Result<Exported> export_case(const Case& c, std::string_view framework, const ExportOptions& options = {});

/// Settings of a file of a framework, in the words of the sweep file.
struct Imported {
  std::vector<std::pair<std::string, std::string>> settings;  ///< canonical path and value
  std::vector<std::string> unread;                            ///< keys of the file that no case has, with why they do not matter
  std::vector<std::string> differs;                           ///< keys that the nearest word of a case says, with what differs
  std::string profile;                                        ///< the framework's profile
};

/// Reads a DeepSpeed config.json, Megatron-LM arguments (a launch script, or its arguments alone) or a torchtitan TOML file. The error
/// lists every key whose meaning no case can say, by name. `devices` is the number of ranks where the file does not say it; 0: not known.
Result<Imported> import_file(std::string_view text, const std::string& name, std::string_view framework, int64_t devices = 0);

/// What a launch script of an export starts.
struct Launch {
  std::string_view framework;  ///< its id
  std::string_view settings;   ///< the file beside the script that holds the settings
  int64_t devices = 0;         ///< ranks that the script starts; 0: the script does not say
};

/// The launch of a script that an export wrote, by its stamp; nothing for any other text.
std::optional<Launch> launch_of(std::string_view script);

/// A model's config.json as transformers reads it.
std::string hugging_face_config(const Model& model);

/// The settings as a case file. `more` stands at its head: lines as "machine: {preset: hgx-h100-ndr}".
std::string case_text(const Imported& imported, const std::string& more);

}  // namespace shardlab::interop
