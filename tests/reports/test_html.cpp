#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "plan/base/hash.h"
#include "reports/columns.h"
#include "reports/escape.h"
#include "reports/html.h"
#include "reports/pack.h"
#include "tests/namespaces.h"
#include "tests/reports/page.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

size_t count_of(const std::string& text, const std::string& word) {
  size_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

/// The value of a column for a case.
nlohmann::json value_of(const nlohmann::json& document, const std::string& name, size_t i) {
  for (const auto& column : document["columns"]) {
    if (column["name"] != name) continue;
    const auto& values = column["values"];
    return values.is_array() ? values[i] : values.contains("c") ? values["c"] : values["d"][values["i"][i].get<size_t>()];
  }
  FAIL("no column " << name);
  return {};
}

}  // namespace

TEST_CASE("what is packed unpacks to the same text") {
  for (const std::string& text : {std::string(), std::string("a"), std::string("ab"), std::string("abc"), std::string(100'000, 'x'),
                                  std::string("\0\xff\x80", 3)})
    CHECK(unpacked(packed(text)) == text);
}

TEST_CASE("the page holds its data, and the data hold every case") {
  const Report report = sweep_report();
  const auto json = nlohmann::json::parse(data_of(render_html(report)));
  CHECK(json == nlohmann::json::parse(report_json(report)));
  REQUIRE(json["count"] == report.cases.size());
  for (const CaseColumn& column : case_columns())
    for (size_t i = 0; i < report.cases.size(); ++i) {
      CAPTURE(column.name, i);
      const Value value = column.get(report.cases[i]);
      const auto shown = value_of(json, std::string(column.name), i);
      if (const auto* number = std::get_if<double>(&value)) CHECK(shown == *number);
      if (const auto* count = std::get_if<int64_t>(&value)) CHECK(shown == *count);
      if (const auto* text = std::get_if<std::string>(&value)) CHECK(shown == *text);
      if (std::holds_alternative<std::monostate>(value)) CHECK(shown.is_null());
    }
  for (size_t i = 0; i < report.cases.size(); ++i) {
    const auto& detail = json["details"][std::to_string(i)];
    CHECK(detail.value("ops", nlohmann::json::array()).size() == report.cases[i].ops.size());
    CHECK(detail.value("losses", nlohmann::json::array()).size() ==
          (report.cases[i].measured ? report.cases[i].measured->losses.size() : 0));
  }
  REQUIRE(json["timelines"].size() == 3);
  CHECK(json["timelines"][0]["index"] == 2);
  CHECK(json["timelines"][0]["lanes"][0]["measured"]["t"].size() == report.timelines[0].lanes[0].measured.size());
  CHECK(json["timelines"][2]["rows"].size() == 4);
  CHECK(json["metadata"]["command"] == report.metadata.command);
}

TEST_CASE("hostile text stays text") {
  Report report = sweep_report();
  const std::string evil = "</script><script>alert(1)</script><!-- @data@ @js@ \" ' & \xff";
  report.title = evil;
  report.metadata.command = evil;
  report.cases[0].config.name = evil;
  report.cases[0].reason = evil;
  report.timelines[0].label = evil;
  const std::string page = render_html(report);
  CHECK(count_of(page, "<script") == 2);
  CHECK(count_of(page, "</script") == 2);
  CHECK(count_of(page, "alert(1)</script>") == 0);
  CHECK(between(page, "id=\"data\"", "</script>").find('<') == std::string::npos);
  const std::string data = data_of(page);
  const auto json = nlohmann::json::parse(data);
  CHECK(json["title"] ==
        "</script><script>alert(1)</script><!-- @data@ @js@ \" ' & \xef\xbf\xbd");  // the broken byte became U+FFFD
  CHECK(between(page, "<title>", "</title>").find("&lt;/script&gt;") == 0);
}

TEST_CASE("the page needs nothing from outside") {
  const std::string page = render_html(sweep_report());
  CHECK(page.find("default-src 'none'") != std::string::npos);
  CHECK(count_of(page, " src=") == 0);
  CHECK(count_of(page, "@import") == 0);
  CHECK(count_of(page, "url(#plot)") == count_of(page, "url("));
  CHECK(count_of(page, "XMLHttpRequest") + count_of(page, "WebSocket") + count_of(page, "sendBeacon") == 0);
  // A page asks for what is new where a server says so in the page, and may not elsewhere.
  CHECK(count_of(page, "fetch(") == 1);
  CHECK(count_of(page, "connect-src") == 0);
  CHECK(count_of(page, "data-revision") == 0);
  const std::string served = render_html(sweep_report(), "12-\"7");
  CHECK(count_of(served, "connect-src 'self'") == 1);
  CHECK(count_of(served, " data-revision=\"12-&quot;7\"") == 1);
  CHECK(count_of(page, "https://") == 0);
  CHECK(count_of(page, "http://") == count_of(page, "http://www.w3.org/2000/svg"));
}

TEST_CASE("equal reports give equal bytes, and an empty one is a page too") {
  CHECK(render_html(sweep_report()) == render_html(sweep_report()));
  Report empty;
  empty.title = "nothing";
  const std::string page = render_html(empty);
  CHECK(page.find("There are no cases.") != std::string::npos);
  CHECK(nlohmann::json::parse(data_of(page))["count"] == 0);
}

TEST_CASE("the page without scripts has the answer and a row for each case") {
  const Report report = sweep_report();
  const std::string page = render_html(report);
  CHECK(count_of(between(page, "<ul class=\"statements\">", "</ul>"), "<li") >= 5);
  CHECK(count_of(between(page, "<noscript>", "</noscript>"), "<tr>") == report.cases.size() + 1);
}

TEST_CASE("the page's head names the device that was measured, and its host after it") {
  Report report = sweep_report();
  report.metadata.processor = "Host Processor";
  const auto head = [&] { return between(render_html(report), "<h1", "</header>"); };
  CHECK(head().find("· Host Processor") != std::string::npos);
  CaseOutcome& o = report.cases.front();
  REQUIRE(o.measured);
  o.config.backend = BackendKind::kCuda;
  o.config.machine.device.id = "SomeGPU";
  CHECK(head().find("· SomeGPU, host Host Processor") != std::string::npos);
  o.measured.reset();  // what is only predicted ran nowhere
  CHECK(head().find("· Host Processor") != std::string::npos);
}

TEST_CASE("the page without data weighs less than 300 kB") {
  Report empty;
  CHECK(render_html(empty).size() < 300'000);
}

TEST_CASE("a page of 25,000 cases weighs less than 3 MB, and a reader without scripts has the first of them") {
  Report report;
  report.title = "grid";
  const CaseOutcome first = sweep_outcomes()[0];
  for (int i = 0; i < 25'000; ++i) {
    CaseOutcome o = first;
    o.measured.reset(), o.ops.clear();
    o.config.layout.tp = 1 << i % 4, o.config.layout.pp = 1 << i / 4 % 5, o.config.layout.dp = 1 << i / 20 % 8;
    o.config.train.micro_batch = 1 << i / 160 % 4, o.config.train.seq_len = 1024 * (1 + i / 640);
    o.config.name = fmt::format("tp={} pp={} dp={} micro_batch={} seq_len={}", o.config.layout.tp, o.config.layout.pp,
                                o.config.layout.dp, o.config.train.micro_batch, o.config.train.seq_len);
    o.case_id = fmt::format("{:016x}", hash_text(o.config.name + std::to_string(i)));
    // Digits as a simulation leaves them.
    const double noise = static_cast<double>(hash_text(o.case_id) % 1'000'003) / 1e6;
    o.predicted->step_s *= 1 + noise, o.predicted->compute_s *= 1 + noise * noise, o.predicted->exposed_comm_s = 0.01 * noise,
                                                                                   o.predicted->bubble_fraction = noise / 7;
    o.predicted->peak_bytes += static_cast<int64_t>(1e8 * noise), o.predicted->wire_bytes += static_cast<int64_t>(1e9 * noise);
    o.predicted->memory.bytes[5] += static_cast<int64_t>(1e8 * noise);
    if (i % 3 == 0)
      o.status = Status::kOom, o.reason = fmt::format("does not fit: a rank needs {:.4f} GiB and may use 80 GiB", 100 * noise);
    report.cases.push_back(std::move(o));
  }
  const std::string page = render_html(report);
  CHECK(page.size() < 3'000'000);
  CHECK(count_of(between(page, "<noscript>", "</noscript>"), "<tr>") <= 202);
  const auto json = nlohmann::json::parse(data_of(page));
  CHECK(json["rounded"] == true);
  CHECK(json["details"].size() >= 300);
  CHECK(std::abs(value_of(json, "predicted_step_s", 24'999).get<double>() / report.cases.back().predicted->step_s - 1) < 1e-5);
  CHECK(value_of(json, "predicted_wire_bytes", 24'999) == report.cases.back().predicted->wire_bytes);
}

TEST_CASE("the report as markdown") { REQUIRE_GOLDEN("reports/report.md", render_markdown(sweep_report())); }

TEST_CASE("the report as markdown has what takes memory that no plan has, where devices told") {
  const auto contains = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  Report report = sweep_report();
  REQUIRE_FALSE(contains(render_markdown(report), "unplanned memory"));
  report.cases[0].measured->unplanned_memory_bytes = 3 << 20;
  report.cases[0].measured->unplanned_memory = {{"context", 2 << 20}, {"other", 1 << 20}};
  report.cases[1].measured->unplanned_memory_bytes = 5 << 20;
  report.cases[1].measured->unplanned_memory = {{"context", 4 << 20}, {"NCCL buffers", 1 << 20}};
  const std::string text = render_markdown(report);
  INFO(text);
  const std::string head = "| name | unplanned memory | context | other | NCCL buffers |";
  REQUIRE(contains(text, head));
  const std::string table = text.substr(text.find(head));
  REQUIRE(contains(table, "| " + report.cases[0].config.name + " | 3.000 MiB | 2.000 MiB | 1.000 MiB |  |"));
  REQUIRE(contains(table, "| " + report.cases[1].config.name + " | 5.000 MiB | 4.000 MiB |  | 1.000 MiB |"));
  // The page has it among the reasons of the case.
  REQUIRE(contains(report_json(report), "Memory that no plan has, 3.000 MiB: 2.000 MiB context, 1.000 MiB other."));
}

TEST_CASE("escapes") {
  CHECK(html_escaped("<a href=\"x\">'&'</a>") == "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
  CHECK(script_safe("{\"a\":\"</script><!--\"}") == "{\"a\":\"\\u003c/script>\\u003c!--\"}");
}
