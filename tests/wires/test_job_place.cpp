// Where a process finds its place in a job, by what each launcher sets.
#include <map>
#include <string>

#include "cases/job_place.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Variables = std::map<std::string, std::string>;

Result<std::optional<JobPlace>> find(const Variables& variables, const JobPlaceFlags& flags = {}) {
  return find_job_place(flags, [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

/// What is found, as doctor shows it.
std::string place(const Variables& variables, const JobPlaceFlags& flags = {}) {
  const auto found = find(variables, flags);
  if (!found.ok()) return "refused: " + found.error().message;
  return *found ? to_string(**found) : "none";
}

const Variables kTorchrun{{"RANK", "5"},       {"WORLD_SIZE", "8"},   {"LOCAL_RANK", "1"},      {"LOCAL_WORLD_SIZE", "4"},
                          {"GROUP_RANK", "1"}, {"MASTER_ADDR", "n0"}, {"MASTER_PORT", "29400"}, {"TORCHELASTIC_RUN_ID", "none"}};
const Variables kSlurm{{"SLURM_PROCID", "3"},
                       {"SLURM_NTASKS", "8"},
                       {"SLURM_STEP_NUM_TASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_JOB_ID", "4711"},
                       {"SLURM_STEP_NODELIST", "node-[07-12,20],gpu3"},
                       {"SLURM_STEP_RESV_PORTS", "12003-12006"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

}  // namespace

TEST_CASE("a place in a job: what each launcher sets") {
  CHECK(place({}) == "none");
  CHECK(place(kTorchrun) == "process 5 of 8, local rank 1, node 1, first process at n0:29400, by torchrun (RANK)");
  CHECK(place(kSlurm) == "process 3 of 4, local rank 1, node 1 of 2, first process at node-07:12003, by Slurm (SLURM_PROCID)");
  CHECK(place({{"OMPI_COMM_WORLD_RANK", "1"},
               {"OMPI_COMM_WORLD_SIZE", "2"},
               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
               {"MASTER_PORT", "7000"}}) ==
        "process 1 of 2, local rank 1, first process at 127.0.0.1:7000, by Open MPI (OMPI_COMM_WORLD_RANK)");
  CHECK(place({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}}) ==
        "process 0 of 2, first process at 127.0.0.1:29500, by PMI (PMI_RANK)");
  // mpirun of MPICH (Hydra 4.0), as it sets them.
  CHECK(place({{"PMI_RANK", "3"},
               {"PMI_SIZE", "4"},
               {"PMI_FD", "8"},
               {"MPI_LOCALRANKID", "3"},
               {"MPI_LOCALNRANKS", "4"},
               {"HYDI_CONTROL_FD", "7"}}) == "process 3 of 4, local rank 3, first process at 127.0.0.1:29500, by PMI (PMI_RANK)");
  // The same over two hosts: who is first must be said.
  const Variables wide{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  CHECK(place(wide) == "refused: 4 processes, by PMI (PMI_RANK), and nobody says on which host the first is");
  CHECK(place(with(wide, {{"MASTER_ADDR", "n0"}, {"MASTER_PORT", "7000"}})) ==
        "process 3 of 4, local rank 1, first process at n0:7000, by PMI (PMI_RANK)");
  // A program of MPICH under srun --mpi=pmi2: Slurm knows nodes and hosts, PMI does not.
  CHECK(place(with(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"PMI_JOBID", "4711.0"}, {"PMI_FD", "9"}})) == place(kSlurm));
  JobPlaceFlags size;
  size.world_size = 3;
  size.master_addr = "a";
  size.master_port = 1;
  CHECK(place({{"PMIX_RANK", "2"}}) == "none");  // PMIx tells no size by a variable
  CHECK(place({{"PMIX_RANK", "2"}}, size) == "process 2 of 3, first process at a:1, by flags");
}

TEST_CASE("a place in a job: flags before variables, launchers in their order") {
  JobPlaceFlags flags;
  flags.rank = 1;
  flags.world_size = 2;
  flags.node = 0;
  flags.master_addr = "10.0.0.1";
  flags.master_port = 5000;
  CHECK(place({}, flags) == "process 1 of 2, node 0, first process at 10.0.0.1:5000, by flags");
  CHECK(place(with(kTorchrun, kSlurm), flags) == "process 1 of 2, local rank 1, node 0, first process at 10.0.0.1:5000, by flags");
  CHECK(place(with(kSlurm, kTorchrun)) == place(kTorchrun));
  CHECK(place(with(kSlurm, {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}})) == place(kSlurm));  // Slurm sets both
  // mpirun within an allocation of Slurm: each host's processes have the variables of the step that started mpirun's part there.
  CHECK(place(with(kSlurm, {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"MASTER_PORT", "7000"}})) ==
        "process 1 of 2, first process at 127.0.0.1:7000, by Open MPI (OMPI_COMM_WORLD_RANK)");
  // The variables of all launchers give way to MASTER_ADDR and MASTER_PORT.
  CHECK(place(with(kSlurm, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "9"}})).find("first process at h:9,") != std::string::npos);
  // torchrun's own store has MASTER_PORT.
  CHECK(place(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).find("at n0:29401,") != std::string::npos);
}

TEST_CASE("a place in a job: what a batch script or a shell of Slurm has is none") {
  Variables script = kSlurm;
  script.erase("SLURM_STEP_ID");
  CHECK(place(script) == "none");
  CHECK(place(with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}})) == "none");
}

TEST_CASE("a place in a job: hosts and ports that are derived") {
  const auto host = [](const std::string& list) {
    const auto found = find(with(kSlurm, {{"SLURM_STEP_NODELIST", list}}));
    return found.ok() && *found ? (*found)->master.host : std::string("refused");
  };
  CHECK(host("gpu3") == "gpu3");
  CHECK(host("gpu3,gpu7") == "gpu3");
  CHECK(host("node-[07-12,20],gpu3") == "node-07");
  CHECK(host("rack[2,4]-ib,x") == "rack2-ib");
  CHECK(host("a,node[1-2]") == "a");
  Variables job = kSlurm;
  job.erase("SLURM_STEP_RESV_PORTS");
  const auto first = find(job), same = find(with(job, {{"SLURM_PROCID", "0"}})),
             other = find(with(job, {{"SLURM_JOB_ID", "4712"}}));
  REQUIRE((first.ok() && same.ok() && other.ok()));
  CHECK((*first)->master.port == (*same)->master.port);
  CHECK((*first)->master.port != (*other)->master.port);
  CHECK(((*first)->master.port >= 20000 && (*first)->master.port < 30000));
  CHECK((*first)->token == (*same)->token);
  CHECK((*first)->token != (*other)->token);
  CHECK((*find(with(job, {{"SHARDLAB_GROUP_TOKEN", "secret"}})))->token == "secret");
}

TEST_CASE("a place in a job: refusals say the variable and what to set") {
  CHECK(place(with(kTorchrun, {{"RANK", "x"}})) == "refused: RANK=x is no number from 0 on");
  CHECK(place(with(kTorchrun, {{"RANK", "8"}})) == "refused: process 8 of 8, by torchrun (RANK)");
  CHECK(place(with(kTorchrun, {{"MASTER_PORT", "70000"}})) == "refused: MASTER_PORT=70000 is no port");
  JobPlaceFlags rank;
  rank.rank = 0;
  CHECK(place({}, rank) == "refused: --rank without --world-size");
  const auto apart = find({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  REQUIRE_FALSE(apart.ok());
  CHECK(apart.error().message == "4 processes, by Open MPI (OMPI_COMM_WORLD_RANK), and nobody says on which host the first is");
  CHECK(apart.error().hint == "mpirun -x MASTER_ADDR=HOST ..., or --master-addr HOST");
}

}  // namespace shardlab::testing
