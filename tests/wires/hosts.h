// Hosts on one machine, for tests of what only a network between hosts can do: each is a network namespace with a link to one router.
// A process on a host also sees no processes but its own host's, so that nothing passes between hosts beside the network.
//
//   Hosts hosts(4, "name");            // throws what this machine does not give: `Hosts::missing()` asks before
//   hosts.cut(2, Hosts::End::kHost);   // `ip link set down`
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "tests/namespaces.h"

namespace shardlab::testing {

class Hosts {
 public:
  /// Why this machine gives no hosts: a program or a right that is missing. Empty: it does.
  static std::string missing();

  /// Makes `count` hosts and a router, called `name`-0, ... and `name`-r. Throws std::runtime_error where the system refuses.
  Hosts(int count, std::string name);
  /// Takes them away.
  ~Hosts();
  Hosts(const Hosts&) = delete;

  std::string address(int host) const;
  /// What `make` makes on a host: its sockets are that host's.
  template <class Make>
  auto on(int host, const Make& make) {
    const Visit visit(*this, host);
    return make();
  }
  /// fork(2) whose child is a process of the host.
  pid_t fork_on(int host) const;

  /// The link of a host to the router goes down at one end: the host's own device, or the router's, of which the host sees nothing but
  /// a carrier that is lost.
  enum class End { kHost, kRouter };
  void cut(int host, End end) const;
  /// The link comes back, as it was.
  void mend(int host, End end) const;

  /// Namespaces of this name that there are.
  static int left_of(const std::string& name);

 private:
  class Visit {
   public:
    Visit(const Hosts& hosts, int host);
    ~Visit();
    Visit(const Visit&) = delete;

   private:
    int back_ = -1;
  };
  std::string host_name(int host) const;
  std::string router_name() const { return name_ + "-r"; }
  void take_away() const;

  const int count_;
  const std::string name_;
};

}  // namespace shardlab::testing
