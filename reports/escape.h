// What others named, made harmless where it is written: one function a format. What a terminal shows is `visible`
// (plan/base/utf8.h), of which all of these make use.
#pragma once

#include <string>
#include <string_view>

namespace shardlab::reports {

/// A field of CSV. RFC 4180: one with a comma, a quote or a line end is quoted, and its quotes doubled. A text that a spreadsheet
/// would take for a formula (= + - @ first, and no number) begins with an apostrophe, which spreadsheets do not show.
std::string csv_field(std::string_view text);

/// A text of GitHub markdown on one line, which is no link, no image, no emphasis, no column's end and no HTML. Code between
/// backticks is code.
std::string markdown_text(std::string_view text);

/// The same as code: between as many backticks as it takes.
std::string markdown_code(std::string_view text);

/// A text of HTML, in an element or a quoted attribute.
std::string html_escaped(std::string_view text);

/// JSON inside a script element.
std::string script_safe(std::string_view json);

}  // namespace shardlab::reports
