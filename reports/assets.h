// The parts of the report's page, embedded by CMake from reports/web.
#pragma once

#include <string_view>

namespace shardlab::reports::assets {

std::string_view template_html();
std::string_view report_css();
std::string_view report_js();

}  // namespace shardlab::reports::assets
