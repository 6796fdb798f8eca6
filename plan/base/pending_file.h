// Files that are whole or not there: written under a temporary name, renamed when complete.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace shardlab {

/// A file that takes its name once it is whole. Before that it has no name, so that a process that is killed leaves nothing; on
/// file systems without such files, and for the moment in which it replaces another, it goes by `<path>.new-<process>-<n>`, which
/// is made anew: a file or a link that somebody planted under such a name is left alone. Every function throws WorldError (disk
/// full, no permission).
class PendingFile {
 public:
  /// `what` begins messages ("checkpoint "); `remedy` ends them.
  explicit PendingFile(std::string path, std::string what = {},
                       std::string remedy = "make room on the disk or make the directory writable; the old file is untouched");
  ~PendingFile();  ///< takes the temporary file away unless it was placed
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write(std::string_view bytes);
  /// Waits until the disk has what was written.
  void sync();
  /// Renames the file to its path, or to another path in the same folder, and replaces the file there. To be called once, last.
  void place() { place(path_); }
  void place(const std::string& path);

 private:
  /// Calls `make` with one name after another until one is not taken.
  void take_temporary_name(const char* doing, const std::function<bool(const char*)>& make);
  [[noreturn]] void fail(const char* doing);

  const std::string path_, what_, remedy_;
  std::string temporary_;  ///< empty: the file has no name
  int file_;
};

/// Writes a file of the program's own: a reader sees the old file or the whole new one. Whatever is at `path`, a link
/// too, is replaced.
void write_file_atomically(const std::string& path, std::string_view text);

/// Writes a file that the user named. A link is followed; a pipe, a device or an open file (/dev/stdout) is written into; a
/// regular file is replaced as `write_file_atomically` does, after leftovers of dead processes beside it are taken away.
void write_output(const std::string& path, std::string_view text);

/// Removes the temporary files that killed processes left in `folder` and in the folders below it down to `depth`. Files of living
/// processes stay, unless `all`: for a caller who knows that nobody writes there. Returns the number of files removed.
int remove_pending_files(const std::string& folder, int depth = 0, bool all = false);

}  // namespace shardlab
