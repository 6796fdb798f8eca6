#include "reports/sqlite.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include <limits>

#include "plan/base/world_error.h"

namespace shardlab::reports::sqlite {

std::string remedy(int code) {
  switch (code & 0xff) {  // the primary code of an extended one
    case SQLITE_FULL:
      return "free some space on the disk that holds the run directory, then run again with --resume: finished cases are kept";
    case SQLITE_BUSY:
    case SQLITE_LOCKED: return "another program holds the file; wait for it or close it, then run again with --resume";
    case SQLITE_READONLY:
    case SQLITE_PERM:
    case SQLITE_CANTOPEN:
    case SQLITE_AUTH: return "make the run directory writable, or choose another with --out";
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return "the file is damaged or no results store; results.csv beside it may still be whole, and `sqlite3 FILE .recover` may "
             "read what is left. Choose another directory with --out";
    case SQLITE_IOERR: return "the disk failed or is full; check it, then run again with --resume";
    default: return "run again with --resume; finished cases are kept";
  }
}

void fail(sqlite3* database, std::string_view doing) {
  const char* file = sqlite3_db_filename(database, "main");
  throw WorldError(
      fmt::format("{}: {} while {}", file != nullptr && *file != '\0' ? file : "results store", sqlite3_errmsg(database), doing),
      remedy(sqlite3_extended_errcode(database)));
}

void execute(sqlite3* database, const std::string& sql) {
  if (sqlite3_exec(database, sql.c_str(), nullptr, nullptr, nullptr) != SQLITE_OK)
    fail(database, "running `" + sql.substr(0, 60) + "`");
}

Query::Query(sqlite3* database, const std::string& sql) : database_(database) {
  if (sqlite3_prepare_v2(database, sql.c_str(), static_cast<int>(sql.size()), &handle_, nullptr) != SQLITE_OK)
    fail(database, "preparing `" + sql.substr(0, 60) + "`");
}

Query::~Query() { sqlite3_finalize(handle_); }

Query& Query::bind(int index, int64_t value) {
  if (sqlite3_bind_int64(handle_, index, value) != SQLITE_OK) fail(database_, "binding an integer");
  return *this;
}

Query& Query::bind(int index, double value) {
  if (sqlite3_bind_double(handle_, index, value) != SQLITE_OK) fail(database_, "binding a number");
  return *this;
}

Query& Query::bind(int index, std::string_view value) {
  const char* data = value.empty() ? "" : value.data();
  if (sqlite3_bind_text(handle_, index, data, static_cast<int>(value.size()), SQLITE_TRANSIENT) != SQLITE_OK)
    fail(database_, "binding a text");
  return *this;
}

Query& Query::bind_in_place(int index, std::string_view value) {
  const char* data = value.empty() ? "" : value.data();
  if (sqlite3_bind_text(handle_, index, data, static_cast<int>(value.size()), SQLITE_STATIC) != SQLITE_OK)
    fail(database_, "binding a text");
  return *this;
}

Query& Query::bind_null(int index) {
  if (sqlite3_bind_null(handle_, index) != SQLITE_OK) fail(database_, "binding NULL");
  return *this;
}

bool Query::step() {
  const int code = sqlite3_step(handle_);
  if (code == SQLITE_ROW) return true;
  if (code != SQLITE_DONE) fail(database_, "reading or writing results");
  return false;
}

void Query::run() {
  run_bound();
  sqlite3_clear_bindings(handle_);
}

void Query::run_bound() {
  while (step()) {}
  sqlite3_reset(handle_);
}

int64_t Query::integer(int column) const { return sqlite3_column_int64(handle_, column); }

double Query::real(int column) const {
  if (sqlite3_column_type(handle_, column) == SQLITE_NULL) return std::numeric_limits<double>::quiet_NaN();
  return sqlite3_column_double(handle_, column);
}

std::string Query::text(int column) const {
  const auto* data = reinterpret_cast<const char*>(sqlite3_column_text(handle_, column));
  return data == nullptr ? std::string() : std::string(data, static_cast<size_t>(sqlite3_column_bytes(handle_, column)));
}

Transaction::Transaction(sqlite3* database) : database_(database) { execute(database, "BEGIN IMMEDIATE"); }

Transaction::~Transaction() {
  if (open_) sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);  // SQLite may have rolled back already
}

void Transaction::commit() {
  execute(database_, "COMMIT");
  open_ = false;
}

}  // namespace shardlab::reports::sqlite
