#include <nlohmann/json.hpp>

#include "reports/columns.h"
#include "reports/escape.h"
#include "reports/html.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// What stands between two marks of a page; they must both be there.
std::string between(const std::string& page, const std::string& open, const std::string& close) {
  const size_t from = page.find(open);
  REQUIRE(from != std::string::npos);
  const size_t to = page.find(close, from + open.size());
  REQUIRE(to != std::string::npos);
  return page.substr(from + open.size(), to - from - open.size());
}

size_t count_of(const std::string& text, const std::string& word) {
  size_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("the page holds its data, and the data hold every case") {
  const Report report = sweep_report();
  const auto json = nlohmann::json::parse(between(render_html(report), "id=\"data\">", "</script>"));
  CHECK(json == nlohmann::json::parse(report_json(report)));
  REQUIRE(json["cases"].size() == report.cases.size());
  REQUIRE(json["columns"].size() == case_columns().size());
  for (size_t i = 0; i < report.cases.size(); ++i) {
    CHECK(json["cases"][i]["values"].size() == case_columns().size());
    CHECK(json["cases"][i]["values"][0] == report.cases[i].case_id);
    CHECK(json["cases"][i]["ops"].size() == report.cases[i].ops.size());
    CHECK(json["cases"][i]["losses"].size() == (report.cases[i].measured ? report.cases[i].measured->losses.size() : 0));
  }
  CHECK(json["cases"][0]["values"][27] == report.cases[0].measured->step_s);
  CHECK(json["timelines"].size() == 2);
  CHECK(json["timelines"][0]["lanes"][0]["measured"].size() == 5 * report.timelines[0].lanes[0].measured.size());
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
  const std::string data = between(page, "id=\"data\">", "</script>");
  CHECK(data.find('<') == std::string::npos);
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
  CHECK(count_of(page, "fetch(") == 0);
  CHECK(count_of(page, "https://") == 0);
  CHECK(count_of(page, "http://") == count_of(page, "http://www.w3.org/2000/svg"));
}

TEST_CASE("equal reports give equal bytes, and an empty one is a page too") {
  CHECK(render_html(sweep_report()) == render_html(sweep_report()));
  Report empty;
  empty.title = "nothing";
  const std::string page = render_html(empty);
  CHECK(page.find("There are no cases.") != std::string::npos);
  CHECK(nlohmann::json::parse(between(page, "id=\"data\">", "</script>"))["cases"].empty());
}

TEST_CASE("the page without scripts has the answer and a row for each case") {
  const Report report = sweep_report();
  const std::string page = render_html(report);
  CHECK(count_of(between(page, "<ul class=\"statements\">", "</ul>"), "<li") >= 5);
  CHECK(count_of(between(page, "<noscript>", "</noscript>"), "<tr>") == report.cases.size() + 1);
}

TEST_CASE("the page without data weighs less than 300 kB") {
  Report empty;
  CHECK(render_html(empty).size() < 300'000);
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
