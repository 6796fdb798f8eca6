// kill_campaign PROGRAM KILLS SEED: kills runs at random moments, and sees that each goes on and that no finished case is lost.
//
// A run directory gets a sweep of simulated or of measured cases. The driver is started; a random time after it announced a random
// number of cases, it or its case process is killed with SIGKILL. Then
//   - `report` must read the directory, or say that nothing is finished yet, where nothing was announced;
//   - each case that the driver had announced as done must be there, with the very figures of its first announcement;
//   - `run --resume` must go on.
// Once a run ends by itself, all cases must be there and no temporary file, and the next directory begins. Exits with 1 and the
// command at the first promise that is not kept, leaving the directory.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "reports/table.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kSimulated = 6, kMeasured = 2;

struct Ended {
  int status = 0;
  std::string out, err;
  bool exited(int code) const { return WIFEXITED(status) && WEXITSTATUS(status) == code; }
};

std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Starts `program arguments...` with its output in `<name>.out` and `<name>.err`.
pid_t start(const std::vector<std::string>& words, const std::string& name) {
  for (const char* of : {".out", ".err"}) fs::remove(name + of);  // one that is killed before it opens them has said nothing
  const pid_t child = fork();
  if (child != 0) return child;
  dup2(open((name + ".out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
  dup2(open((name + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execv(arguments[0], arguments.data());
  _exit(127);
}

Ended finish(pid_t child, const std::string& name) {
  Ended ended;
  waitpid(child, &ended.status, 0);
  ended.out = slurp(name + ".out");
  ended.err = slurp(name + ".err");
  return ended;
}

/// A child of the process, which of a driver is its case; 0: none.
pid_t child_of(pid_t process) {
  std::ifstream file(fmt::format("/proc/{0}/task/{0}/children", process));
  pid_t child = 0;
  file >> child;
  return file ? child : 0;
}

/// Whether anything with this directory in its command line lives.
bool lives_with(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || name == std::to_string(getpid())) continue;
    if (slurp(entry.path() / "cmdline").find(directory) != std::string::npos) return true;
  }
  return false;
}

class Campaign {
 public:
  Campaign(std::string program, int kills, uint64_t seed) : program_(std::move(program)), kills_(kills), random_(seed) {
    std::string pattern = (fs::temp_directory_path() / "shardlab-kills-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    std::string text;
    for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
    std::ofstream(root_ + "/text.txt") << text;
    std::ofstream(root_ + "/machine.yaml")
        << "id: here\nlocal: true\ncores: 2\ndevices_per_node: 2\n"
           "device: {memory: 4294967296, memory_bandwidth: 10000000000, peak_flops: {fp32: 100000000000}}\n";
    const std::string model =
        "{inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, "
        "tied_embeddings: true}}";
    const std::string train = "train: {seq_len: 16, global_batch_tokens: 64}\n";
    std::ofstream(root_ + "/simulated.yaml") << "version: 1\nname: kills\nmode: simulate\nmodel: " + model +
                                                    "\nmachine: h100-sxm5-80gb\n" + train +
                                                    fmt::format("axes: {{seed: {{range: [1, {}]}}}}\n", kSimulated);
    std::ofstream(root_ + "/measured.yaml") << "version: 1\nname: kills\nmode: measure\nmodel: " + model +
                                                   "\nmachine: {local: true}\ndata: {text: text.txt}\n" + train +
                                                   "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 2m}\n" +
                                                   fmt::format("axes: {{seed: {{range: [1, {}]}}}}\n", kMeasured);
  }

  int run() {
    for (const char* kind : {"simulated", "measured"}) time_undisturbed(kind);
    for (int i = 0; killed_ < kills_ && failure_.empty(); ++i) one_directory(i % 2 == 0 ? "simulated" : "measured");
    fmt::print(
        "{} kills ({} of drivers, {} of case processes) in {} run directories: {} finished cases at the moments of the kills, "
        "{} lost; {} runs resumed, {} not; {} leftovers\n",
        killed_, killed_ - killed_cases_, killed_cases_, directories_, finished_, lost_, resumed_, not_resumed_, leftovers_);
    if (failure_.empty()) {
      fs::remove_all(root_);
      return 0;
    }
    fmt::print("{}\nleft in {}\n", failure_, root_);
    return 1;
  }

 private:
  using Rows = std::map<std::string, std::string>;  ///< by case id, the whole row of a case that is ok

  void fail(int& count, const std::string& what) {
    ++count;
    if (failure_.empty()) failure_ = what;
  }

  std::vector<std::string> command(const std::string& kind, const std::string& out) const {
    return {program_, "run", root_ + "/" + kind + ".yaml", "--machine-file", root_ + "/machine.yaml", "--out", out, "--resume"};
  }

  /// How long a run takes that nobody disturbs: moments of kills are drawn from that.
  void time_undisturbed(const std::string& kind) {
    const std::string out = root_ + "/undisturbed-" + kind;
    const auto begin = Clock::now();
    const Ended ended = finish(start(command(kind, out), out), out);
    seconds_[kind] = std::chrono::duration<double>(Clock::now() - begin).count();
    if (!ended.exited(0)) fail(not_resumed_, fmt::format("run in {}: status {}\n{}", out, ended.status, ended.err));
  }

  /// What the directory holds; nothing where `report` cannot read it though something was announced.
  std::optional<Rows> report(const std::string& out, bool announced) {
    const Ended said = finish(start({program_, "report", out, "--format", "csv", "--csv", out + ".csv"}, out), out);
    if (!said.exited(0)) {
      if (!announced && said.exited(2)) return Rows{};
      fail(not_resumed_, fmt::format("report {}: status {}\n{}", out, said.status, said.err));
      return std::nullopt;
    }
    Rows rows;
    const auto records = shardlab::reports::parse_csv(slurp(out + ".csv"));
    for (size_t i = 1; i < records.size(); ++i) {
      std::string row;
      for (const std::string& cell : records[i]) row += cell + "|";
      if (records[i].at(2) == "ok") rows[records[i].at(0)] = row;
    }
    return rows;
  }

  /// Cases that the driver said were done: lines "[3/6] ... NAME: ok".
  static int announced_in(const std::string& err) {
    int count = 0;
    for (size_t at = 0; (at = err.find(": ok, ", at)) != std::string::npos; ++at) ++count;
    return count;
  }

  void one_directory(const std::string& kind) {
    const std::string out = fmt::format("{}/{}", root_, ++directories_);
    Rows known;
    for (int start_number = 0; failure_.empty(); ++start_number) {
      const auto begin = Clock::now();
      const pid_t driver = start(command(kind, out), out + ".run");
      const bool killed = killed_ < kills_ && kill_in_time(driver, seconds_[kind], out + ".run.err");
      const Ended ended = finish(driver, out + ".run");
      // How busy the machine is changes: on one that has become quiet every run would end before its kill.
      if (start_number == 0 && !killed) seconds_[kind] = std::chrono::duration<double>(Clock::now() - begin).count();
      const auto now = report(out, known.size() + static_cast<size_t>(announced_in(ended.err)) > 0);
      if (!now) return;
      check_kept(out, known, announced_in(ended.err), *now);
      if (killed) finished_ += static_cast<int>(now->size());
      known = *now;
      if (start_number > 0) ++resumed_;
      if (ended.exited(0)) break;
      if (WIFEXITED(ended.status) && !ended.exited(4))  // 4: a case whose process was killed, which --resume runs again
        return fail(not_resumed_, fmt::format("run --resume in {}: exit code {}\n{}", out, WEXITSTATUS(ended.status), ended.err));
    }
    if (failure_.empty()) check_end(kind, out, known);
  }

  /// Kills the driver or its case, up to a third of `seconds` after up to two cases were announced; false: the driver ended before.
  bool kill_in_time(pid_t driver, double seconds, const std::string& errors) {
    const int cases = std::uniform_int_distribution(0, 2)(random_);
    const double after = std::uniform_real_distribution(0.0, seconds / 3)(random_);
    auto moment = Clock::time_point::max();
    while (Clock::now() < moment) {
      if (moment == Clock::time_point::max() && announced_in(slurp(errors)) >= cases)
        moment = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(after));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(driver), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == driver) return false;
    }
    const pid_t a_case = child_of(driver);
    const bool of_case = a_case > 0 && std::uniform_int_distribution(0, 1)(random_) == 1;
    kill(of_case ? a_case : driver, SIGKILL);
    ++killed_;
    killed_cases_ += of_case ? 1 : 0;
    return true;
  }

  void check_kept(const std::string& out, const Rows& before, int announced, const Rows& now) {
    for (const auto& [id, row] : before)
      if (!now.contains(id) || now.at(id) != row)
        return fail(lost_, fmt::format("case {} of {} was finished, and is {} after the kill", id, out,
                                       now.contains(id) ? "another" : "lost"));
    if (now.size() < before.size() + static_cast<size_t>(announced))
      fail(lost_,
           fmt::format("{}: {} cases were there and {} announced, and {} are there", out, before.size(), announced, now.size()));
  }

  void check_end(const std::string& kind, const std::string& out, const Rows& rows) {
    const size_t wanted = kind == "simulated" ? kSimulated : kMeasured;
    if (rows.size() != wanted) fail(lost_, fmt::format("{}: {} of {} cases at the end", out, rows.size(), wanted));
    for (const auto& entry : fs::recursive_directory_iterator(out))
      if (entry.path().string().find(".new-") != std::string::npos || entry.path().string().ends_with("-journal"))
        fail(leftovers_, entry.path().string() + " is left");
    if (lives_with(out)) fail(leftovers_, "a process of " + out + " is left");
    if (failure_.empty()) fs::remove_all(out);
  }

  const std::string program_;
  const int kills_;
  std::mt19937_64 random_;
  std::string root_, failure_;
  std::map<std::string, double> seconds_;  ///< of an undisturbed run, by kind of sweep
  int killed_ = 0, killed_cases_ = 0, directories_ = 0, finished_ = 0, lost_ = 0, resumed_ = 0, not_resumed_ = 0, leftovers_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print("usage: kill_campaign PROGRAM KILLS SEED\n");
    return 2;
  }
  return Campaign(argv[1], std::atoi(argv[2]), std::strtoull(argv[3], nullptr, 10)).run();
}
