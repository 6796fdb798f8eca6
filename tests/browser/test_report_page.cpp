#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "reports/escape.h"
#include "tests/namespaces.h"
#include "tests/paths.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

namespace fs = std::filesystem;

/// The first browser of the PATH that can run without a display, or nothing.
std::string browser() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    for (const char* name : {"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"})
      if (::access((fs::path(folder) / name).c_str(), X_OK) == 0) return (fs::path(folder) / name).string();
  return {};
}

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

size_t count_of(const std::string& text, const std::string& word) {
  size_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

/// A page in a folder of its own, and what the browser makes of it.
class Page {
 public:
  explicit Page(const std::string& html) {
    std::string name = (fs::temp_directory_path() / "shardlab-page-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    folder_ = name;
    std::ofstream(folder_ / "report.html", std::ios::binary) << html;
  }
  ~Page() {
    std::error_code ignored;  // the browser's children may still be writing into the profile
    fs::remove_all(folder_, ignored);
  }

  /// Runs the browser on the page with one more option; its standard output is returned, its log kept for `log`.
  std::string load(const std::string& option, int width) {
    const std::string command = fmt::format(
        "timeout 120 '{}' --headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
        "--disable-sync --no-first-run "
        "--disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr --virtual-time-budget=4000 --window-size={},900 "
        "--user-data-dir='{}' {} 'file://{}' > '{}' 2> '{}'",
        browser(), width, (folder_ / "profile").string(), option, (folder_ / "report.html").string(), (folder_ / "out").string(),
        (folder_ / "log").string());
    const int status = std::system(command.c_str());
    INFO(contents(folder_ / "log"));
    REQUIRE(status == 0);
    return contents(folder_ / "out");
  }
  /// What the page wrote to its console.
  std::string console() const {
    std::istringstream log(contents(folder_ / "log"));
    std::string out;
    for (std::string line; std::getline(log, line);)
      if (line.find("CONSOLE") != std::string::npos) out += line + "\n";
    return out;
  }
  fs::path folder() const { return folder_; }

 private:
  fs::path folder_;
};

bool skipped() {
  if (!browser().empty()) return false;
  WARN("skipped: no browser (chromium) in the PATH; install chromium-headless-shell to run this test");
  return true;
}

/// Width and height of a PNG file, from its header.
std::array<uint32_t, 2> png_size(const std::string& png) {
  std::array<uint32_t, 2> size{};
  REQUIRE(png.substr(1, 3) == "PNG");
  for (size_t i = 0; i < 8; ++i) size[i / 4] = size[i / 4] << 8 | static_cast<unsigned char>(png[16 + i]);
  return size;
}

}  // namespace

TEST_CASE("a browser draws the whole report without an error") {
  if (skipped()) return;
  const Report report = sweep_report();
  Page page(render_html(report));
  const std::string dom = page.load("--dump-dom", 1280);
  CHECK(page.console() == "");
  CHECK(count_of(dom, "data-ready=\"true\"") == 1);
  for (const char* section :
       {"answer", "grid", "why", "memory", "timeline", "prediction", "losses", "cost", "cases", "environment"}) {
    CAPTURE(section);
    CHECK(count_of(dom, fmt::format("<section id=\"{}\"", section)) == 1);
  }
  CHECK(count_of(dom, "<tr class=\"pick") == report.cases.size());
  CHECK(count_of(dom, "class=\"status refused\"") == 2);  // in the answer and in the table
  CHECK(count_of(dom, "data-drawn=\"true\"") == 1);
  CHECK(dom.find("heads 6 is not divisible by tp 5") != std::string::npos);
  CHECK(count_of(dom, "alert(") == 0);
}

TEST_CASE("reports with little in them are drawn without an error") {
  if (skipped()) return;
  Report empty;
  empty.title = "nothing";
  Report refused = empty;
  refused.cases = {sweep_outcomes()[15]};
  Report simulated = empty;
  simulated.cases = sweep_outcomes();
  for (CaseOutcome& o : simulated.cases) o.measured.reset();
  Report broken = empty;
  broken.cases = {small_outcome()};
  broken.cases[0].measured->losses = {5.5, std::nan(""), HUGE_VAL};
  for (const Report& report : {empty, refused, simulated, broken}) {
    Page page(render_html(report));
    const std::string dom = page.load("--dump-dom", 1280);
    CHECK(page.console() == "");
    CHECK(count_of(dom, "data-ready=\"true\"") == 1);
    CHECK(count_of(dom, "<tr class=\"pick") == report.cases.size());
  }
}

TEST_CASE("the console check sees an error that is there") {
  if (skipped()) return;
  Page page("<!DOCTYPE html><title>x</title><script>no_such_function();</script>");
  page.load("--dump-dom", 1280);
  CHECK(page.console().find("no_such_function") != std::string::npos);
}

TEST_CASE("the page does not overflow a wide or a narrow window") {
  if (skipped()) return;
  const std::string report = html_escaped(render_html(sweep_report()));
  for (const int width : {1280, 400}) {
    // A frame can be narrower than a headless window; the page around it measures.
    Page page(fmt::format(
        "<!DOCTYPE html><title>frame</title><iframe id=\"f\" style=\"width:{}px;height:800px;border:0\" srcdoc=\"{}\"></iframe>"
        "<script>const f = document.getElementById('f'); f.onload = () => {{ const d = f.contentDocument.documentElement;"
        "document.documentElement.dataset.overflow = d.scrollWidth - d.clientWidth; document.documentElement.dataset.width = "
        "d.clientWidth; }};</script>",
        width, report));
    CAPTURE(width);
    const std::string dom = page.load("--dump-dom", 1400);
    CHECK(page.console() == "");
    CHECK(count_of(dom, "data-overflow=\"0\"") == 1);
    CHECK(count_of(dom, fmt::format("data-width=\"{}\"", width)) == 1);
  }
}

TEST_CASE("the page can be photographed") {
  if (skipped()) return;
  Page page(render_html(sweep_report()));
  page.load(fmt::format("--screenshot='{}'", (page.folder() / "shot.png").string()), 1280);
  const std::string png = contents(page.folder() / "shot.png");
  CHECK(png_size(png) == std::array<uint32_t, 2>{1280, 900});
  CHECK(png.size() > 20'000);  // an empty page compresses to less
}
