#include "cli/serve.h"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "cases/interrupt.h"
#include "cli/namespaces.h"
#include "plan/base/world_error.h"

namespace shardlab::cli {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

/// The page of the last revision that was asked for.
class Page {
 public:
  explicit Page(const Served& served) : served_(served) {}

  void answer(httplib::Response& response) {
    const std::lock_guard lock(mutex_);
    if (const std::string now = served_.revision(); !made_ || revision_ != now) {
      Result<std::string> page = made(now);
      made_ = page.ok();
      if (!made_) {
        response.status = 503;
        response.set_header("Refresh", "2");
        return response.set_content(page.error().message + "\nThis page is asked for again every 2 seconds.\n",
                                    "text/plain; charset=utf-8");
      }
      revision_ = now, text_ = std::move(page).value();
    }
    response.set_content(text_, "text/html; charset=utf-8");
  }

  std::string state() {
    const std::lock_guard lock(mutex_);
    return nlohmann::json{{"revision", served_.revision()}, {"live", served_.live()}}.dump();
  }

 private:
  /// A store that the run holds for long is no end: the page is asked for again.
  Result<std::string> made(const std::string& revision) const {
    try {
      return served_.page(revision);
    } catch (const WorldError& e) { return Error{ExitCode::kEnvironment, e.what(), e.hint(), {}}; }
  }

  const Served& served_;
  std::mutex mutex_;
  bool made_ = false;
  std::string revision_, text_;
};

}  // namespace

Result<ExitCode> serve(const Served& served, int port) {
  httplib::Server server;
  Page page(served);
  server.set_socket_options([](socket_t socket) {  // by default two servers could share a port
    constexpr int kYes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);
  });
  if (port == 0)
    port = server.bind_to_any_port(kLoopback);
  else if (!server.bind_to_port(kLoopback, port))
    port = -1;
  if (port <= 0)
    return refusal("the port cannot be had: another program listens there, or it is reserved",
                   "use --port 0, which takes a free one");
  const std::string named = fmt::format("localhost:{}", port), numbered = fmt::format("{}:{}", kLoopback, port);
  server.set_pre_routing_handler([&](const httplib::Request& request, httplib::Response& response) {
    const std::string host = request.get_header_value("Host");
    if (host == named || host == numbered) return httplib::Server::HandlerResponse::Unhandled;
    response.status = 403;
    return httplib::Server::HandlerResponse::Handled;
  });
  server.set_keep_alive_timeout(1);
  server.set_default_headers({{"Cache-Control", "no-store"}, {"X-Content-Type-Options", "nosniff"}});
  server.Get("/", [&](const httplib::Request&, httplib::Response& response) { page.answer(response); });
  server.Get("/state",
             [&](const httplib::Request&, httplib::Response& response) { response.set_content(page.state(), "application/json"); });
  fmt::print("http://{}/  (Ctrl-C ends it)\n", numbered);
  std::fflush(stdout);
  interrupt::ask_on_signal("");
  std::jthread watch([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && !interrupt::asked()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    server.stop();
  });
  server.listen_after_bind();
  return ExitCode::kDone;
}

}  // namespace shardlab::cli
