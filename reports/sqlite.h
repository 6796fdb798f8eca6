// A thin hold on the SQLite C interface: statements that clean up, transactions that roll back, failures with a remedy.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

struct sqlite3;
struct sqlite3_stmt;

namespace shardlab::reports::sqlite {

/// The remedy for an error code of SQLite.
std::string remedy(int code);

/// Throws the WorldError for the database's last failure while `doing` ("appending a case").
[[noreturn]] void fail(sqlite3* database, std::string_view doing);

/// Runs SQL that has no parameters and no result. Throws a WorldError.
void execute(sqlite3* database, const std::string& sql);

/// A prepared statement. Parameters are numbered from 1, columns from 0. Everything that fails throws a WorldError.
class Query {
 public:
  Query(sqlite3* database, const std::string& sql);
  ~Query();
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;

  Query& bind(int index, int64_t value);
  Query& bind(int index, double value);  ///< nan becomes NULL
  Query& bind(int index, std::string_view value);
  Query& bind_in_place(int index, std::string_view value);  ///< is not copied: it stays where it is until the query has run
  Query& bind_null(int index);

  /// True while there is a row.
  bool step();
  /// Runs a statement that returns no rows, and makes it ready for new parameters.
  void run();
  /// The same of a statement each of whose parameters is bound anew before it runs again.
  void run_bound();

  int64_t integer(int column) const;
  double real(int column) const;  ///< NULL reads as nan
  std::string text(int column) const;

 private:
  sqlite3* database_;
  sqlite3_stmt* handle_ = nullptr;
};

/// BEGIN IMMEDIATE now; ROLLBACK when destroyed without `commit`.
class Transaction {
 public:
  explicit Transaction(sqlite3* database);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void commit();

 private:
  sqlite3* database_;
  bool open_ = true;
};

}  // namespace shardlab::reports::sqlite
