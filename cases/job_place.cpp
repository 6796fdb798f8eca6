#include "cases/job_place.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>

#include "cases/case_process.h"
#include "plan/base/hash.h"

namespace shardlab::cases {
namespace {

constexpr int kPort = 29500;                       ///< torchrun's
constexpr int kFirstPort = 20000, kPorts = 10000;  ///< for jobs that name none: below the ports that systems give to connections

/// What a launcher calls things. Several names: the first that is set. In this order: mpirun within an allocation of Slurm starts its
/// processes beside Slurm's variables, and those are of mpirun's own steps.
struct Launcher {
  const char* name;
  std::array<const char*, 2> rank, world_size, local_rank, local_size, node, nodes;
  const char* only_with;           ///< a variable without which the others are those of a whole job; null: none
  std::array<const char*, 3> job;  ///< what tells jobs apart, the same in every process
};
constexpr std::array kLaunchers{Launcher{"torchrun",
                                         {"RANK"},
                                         {"WORLD_SIZE"},
                                         {"LOCAL_RANK"},
                                         {"LOCAL_WORLD_SIZE"},
                                         {"GROUP_RANK"},
                                         {"GROUP_WORLD_SIZE"},
                                         nullptr,
                                         {"TORCHELASTIC_RUN_ID"}},
                                Launcher{"Open MPI",
                                         {"OMPI_COMM_WORLD_RANK"},
                                         {"OMPI_COMM_WORLD_SIZE"},
                                         {"OMPI_COMM_WORLD_LOCAL_RANK"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE"},
                                         {},
                                         {},
                                         nullptr,
                                         {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"}},
                                Launcher{"Slurm",
                                         {"SLURM_PROCID"},
                                         {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
                                         {"SLURM_LOCALID"},
                                         {},
                                         {"SLURM_NODEID"},
                                         {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"},
                                         "SLURM_STEP_ID",
                                         {"SLURM_JOB_ID", "SLURM_JOBID"}},
                                Launcher{"PMI",
                                         {"PMI_RANK"},
                                         {"PMI_SIZE"},
                                         {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
                                         {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
                                         {},
                                         {},
                                         nullptr,
                                         {"PMI_JOBID", "PMI_KVSNAME"}},
                                Launcher{"PMIx", {"PMIX_RANK"}, {}, {}, {}, {}, {}, nullptr, {"PMIX_NAMESPACE"}}};

std::optional<int> number_of(const std::string& text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && value >= 0 ? std::optional(value) : std::nullopt;
}

class Finder {
 public:
  Finder(const JobPlaceFlags& flags, const Environment& environment) : flags_(flags), environment_(environment) {}

  Result<std::optional<JobPlace>> find() {
    const Launcher* launcher = nullptr;
    for (const Launcher& l : kLaunchers)
      if (!launcher && speaks(l)) launcher = &l;
    if (!launcher && !flags_.any()) return std::optional<JobPlace>();
    JobPlace p;
    int local_size = -1;
    if (launcher != nullptr) {
      SHARDLAB_TRY(read(launcher->rank, p.rank));
      SHARDLAB_TRY(read(launcher->world_size, p.world_size));
      SHARDLAB_TRY(read(launcher->local_rank, p.local_rank));
      SHARDLAB_TRY(read(launcher->local_size, local_size));
      SHARDLAB_TRY(read(launcher->node, p.node));
      SHARDLAB_TRY(read(launcher->nodes, p.nodes));
      p.by = fmt::format("{} ({})", launcher->name, launcher->rank[0]);
    } else if (flags_.rank < 0 || flags_.world_size < 0) {
      return refusal(flags_.rank < 0 ? "--world-size without --rank" : "--rank without --world-size",
                     "give both, or start with torchrun, srun or mpirun");
    }
    if (flags_.rank >= 0) p.rank = flags_.rank, p.by = "flags";
    if (flags_.world_size >= 0) p.world_size = flags_.world_size, p.by = "flags";
    if (flags_.local_rank >= 0) p.local_rank = flags_.local_rank;
    if (flags_.node >= 0) p.node = flags_.node;
    if (p.world_size < 1 || p.rank >= p.world_size)
      return refusal(fmt::format("process {} of {}, by {}", p.rank, p.world_size, p.by),
                     "ranks count from 0 to the world size less 1");
    p.together = p.world_size == 1 || p.nodes == 1 || local_size == p.world_size;
    SHARDLAB_TRY(find_master(p, launcher));
    const char* token = environment_(kGroupToken);
    p.token = token != nullptr ? token : "shardlab " + job(launcher);
    return std::optional(std::move(p));
  }

 private:
  template <size_t N>
  const char* first_of(const std::array<const char*, N>& names) const {
    for (const char* name : names)
      if (name != nullptr && environment_(name) != nullptr) return environment_(name);
    return nullptr;
  }
  bool speaks(const Launcher& l) const {
    if (first_of(l.rank) == nullptr || (first_of(l.world_size) == nullptr && flags_.world_size < 0)) return false;
    if (l.only_with == nullptr) return true;
    // A step has a number; a batch script has none, and an interactive shell one of the highest, which Slurm keeps for itself.
    const char* step = environment_(l.only_with);
    return step != nullptr && number_of(step).has_value();
  }
  template <size_t N>
  Result<void> read(const std::array<const char*, N>& names, int& value) const {
    for (const char* name : names) {
      if (name == nullptr || environment_(name) == nullptr) continue;
      const auto number = number_of(environment_(name));
      if (!number)
        return refusal(fmt::format("{}={} is no number from 0 on", name, environment_(name)), "see what started the process");
      value = *number;
      return {};
    }
    return {};
  }
  std::string job(const Launcher* launcher) const {
    const char* name = launcher == nullptr ? nullptr : first_of(launcher->job);
    return name == nullptr ? "" : name;
  }

  Result<void> find_master(JobPlace& p, const Launcher* launcher) const {
    const bool slurm = launcher != nullptr && std::string_view(launcher->name) == "Slurm";
    const char* address = environment_("MASTER_ADDR");
    if (!flags_.master_addr.empty()) {
      p.master.host = flags_.master_addr;
    } else if (address != nullptr && *address != 0) {
      p.master.host = address;
    } else if (slurm) {
      const char* list = environment_("SLURM_STEP_NODELIST");
      if (list == nullptr) list = environment_("SLURM_JOB_NODELIST");
      if (list != nullptr) p.master.host = first_host(list);
    } else if (!p.together) {
      return refusal(fmt::format("{} processes, by {}, and nobody says on which host the first is", p.world_size, p.by),
                     launcher != nullptr && std::string_view(launcher->name) == "Open MPI"
                         ? "mpirun -x MASTER_ADDR=HOST ..., or --master-addr HOST"
                         : "set MASTER_ADDR, or --master-addr HOST");
    }
    if (flags_.master_port >= 0) {
      p.master.port = flags_.master_port;
      return {};
    }
    if (const char* port = environment_("MASTER_PORT"); port != nullptr) {
      const auto number = number_of(port);
      if (!number || *number < 1 || *number > 65534)
        return refusal(fmt::format("MASTER_PORT={} is no port", port), "set it from 1 to 65534");
      // torchrun itself listens at its port where it keeps the store of its workers.
      const char* taken = environment_("TORCHELASTIC_USE_AGENT_STORE");
      p.master.port = *number + (taken != nullptr && std::string_view(taken) == "True" ? 1 : 0);
      return {};
    }
    const char* reserved = slurm ? environment_("SLURM_STEP_RESV_PORTS") : nullptr;
    const std::string name = job(launcher);
    if (const auto first = reserved == nullptr
                               ? std::nullopt
                               : number_of(std::string(reserved).substr(0, std::string(reserved).find_first_of("-,")))) {
      p.master.port = *first;
    } else {
      p.master.port = name.empty() ? kPort : kFirstPort + static_cast<int>(hash_text(name) % kPorts);
    }
    return {};
  }

  /// "node-07" of "node-[07-12,20],gpu3", as Slurm writes lists of hosts.
  static std::string first_host(const std::string& list) {
    const size_t open = list.find('['), comma = list.find(',');
    if (open == std::string::npos || comma < open) return list.substr(0, comma);
    const size_t end = list.find_first_of("-,]", open), close = list.find(']', open);
    const std::string tail = close == std::string::npos ? "" : list.substr(close + 1, list.find(',', close) - close - 1);
    return list.substr(0, open) + list.substr(open + 1, end - open - 1) + tail;
  }

  const JobPlaceFlags& flags_;
  const Environment& environment_;
};

}  // namespace

std::string to_string(const JobPlace& p) {
  std::string text = fmt::format("process {} of {}", p.rank, p.world_size);
  if (p.local_rank >= 0) text += fmt::format(", local rank {}", p.local_rank);
  if (p.node >= 0) text += fmt::format(", node {}{}", p.node, p.nodes > 0 ? fmt::format(" of {}", p.nodes) : "");
  return text + fmt::format(", first process at {}, by {}", to_string(p.master), p.by);
}

std::vector<std::string> words_of(const JobPlace& p) {
  std::vector<std::string> words{"--rank",        std::to_string(p.rank), "--world-size",  std::to_string(p.world_size),
                                 "--master-addr", p.master.host,          "--master-port", std::to_string(p.master.port)};
  if (p.local_rank >= 0) words.insert(words.end(), {"--local-rank", std::to_string(p.local_rank)});
  if (p.node >= 0) words.insert(words.end(), {"--node", std::to_string(p.node)});
  return words;
}

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

Result<std::optional<JobPlace>> find_job_place(const JobPlaceFlags& flags, const Environment& environment) {
  return Finder(flags, environment).find();
}

}  // namespace shardlab::cases
