#include "tests/wires/hosts.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace shardlab::testing {
namespace {

constexpr const char* kNamespaces = "/run/netns";  // where ip(8) keeps them

bool ran(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

void must_run(const std::string& command) {
  if (!ran(command)) throw std::runtime_error("cannot run: " + command);
}

/// Enters a namespace of the network by its name.
bool enter(const std::string& name) {
  const int file = ::open(fmt::format("{}/{}", kNamespaces, name).c_str(), O_RDONLY | O_CLOEXEC);
  const bool entered = file >= 0 && ::setns(file, CLONE_NEWNET) == 0;
  if (file >= 0) ::close(file);
  return entered;
}

}  // namespace

std::string Hosts::missing() {
  if (!ran("command -v ip")) return "no ip (Debian: iproute2)";
  const std::string name = fmt::format("shardlab-asks-{}", ::getpid());
  if (!ran("ip netns add " + name)) return "no right to make network namespaces (CAP_SYS_ADMIN)";
  const bool links = ran(fmt::format("ip -n {} link add one type veth peer name two", name));
  ran("ip netns del " + name);
  if (!links) return "no veth devices in this kernel";
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWPID | CLONE_NEWNS) == 0 ? 0 : 1);
  int status = 1;
  ::waitpid(child, &status, 0);
  return status == 0 ? "" : "no right to make process namespaces (CAP_SYS_ADMIN)";
}

Hosts::Hosts(int count, std::string name) : count_(count), name_(std::move(name)) {
  try {
    must_run("ip netns add " + router_name());
    must_run(fmt::format("ip netns exec {} sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'", router_name()));
    for (int h = 0; h < count_; ++h) {
      must_run("ip netns add " + host_name(h));
      must_run(fmt::format("ip -n {} link add wire type veth peer name wire{} netns {}", host_name(h), h, router_name()));
      must_run(fmt::format("ip -n {} addr add 10.78.{}.1/24 dev wire{}", router_name(), h, h));
      must_run(fmt::format("ip -n {} addr add {}/24 dev wire", host_name(h), address(h)));
      must_run(fmt::format("ip -n {} link set lo up", host_name(h)));
      mend(h, End::kHost);
      mend(h, End::kRouter);
    }
  } catch (...) {
    take_away();
    throw;
  }
}

Hosts::~Hosts() { take_away(); }

void Hosts::take_away() const {
  for (int h = 0; h < count_; ++h) ran("ip netns del " + host_name(h));
  ran("ip netns del " + router_name());
}

std::string Hosts::host_name(int host) const { return fmt::format("{}-{}", name_, host); }

std::string Hosts::address(int host) const { return fmt::format("10.78.{}.2", host); }

void Hosts::cut(int host, End end) const {
  must_run(end == End::kHost ? fmt::format("ip -n {} link set wire down", host_name(host))
                             : fmt::format("ip -n {} link set wire{} down", router_name(), host));
}

void Hosts::mend(int host, End end) const {
  must_run(end == End::kHost ? fmt::format("ip -n {} link set wire up", host_name(host))
                             : fmt::format("ip -n {} link set wire{} up", router_name(), host));
  // The way to the other hosts goes with the device.
  must_run(fmt::format("ip -n {} route replace default via 10.78.{}.1", host_name(host), host));
}

int Hosts::left_of(const std::string& name) {
  int left = 0;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(kNamespaces, none))
    left += entry.path().filename().string().starts_with(name + "-");
  return left;
}

Hosts::Visit::Visit(const Hosts& hosts, int host) : back_(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC)) {
  if (back_ < 0 || !enter(hosts.host_name(host))) throw std::runtime_error("cannot enter " + hosts.host_name(host));
}

Hosts::Visit::~Visit() {
  if (::setns(back_, CLONE_NEWNET) != 0) std::abort();  // every later socket would be the host's
  ::close(back_);
}

pid_t Hosts::fork_on(int host) const {
  const int back = ::open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
  if (back < 0 || ::unshare(CLONE_NEWPID) != 0) throw std::runtime_error("no process namespace");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool there = enter(host_name(host)) && ::unshare(CLONE_NEWNS) == 0 &&
                       ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                       ::mount("proc", "/proc", "proc", 0, nullptr) == 0;
    if (!there) ::_exit(77);
    return 0;
  }
  const bool home = ::setns(back, CLONE_NEWPID) == 0;
  ::close(back);
  if (!home) throw std::runtime_error("no way back to the own process namespace");
  return child;
}

}  // namespace shardlab::testing
