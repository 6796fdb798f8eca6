// Real input: the sequences of a text, a folder of texts or a file of tokens, split, cut and shuffled without regard to layout.
//
// Split: the last part of EVERY file is validation, so that both splits see every kind of text in a folder. The files' first
// parts make up the training stream, their last parts the validation stream, both in the order of the files.
// Cut: sequence i of a stream is its tokens [i S, i S + S]: S + 1 ids, the last of which begins the next sequence.
// Packed (data.packed): a document is a file's part in the split, or the tokens up to and including each `document_end`. A document of n
// tokens fills n - 1 places, each a token with the one behind it as its target: its last token is a target alone, and no target is another
// document's. Documents lie one behind the other; sequence i is the places [i S, i S + S). What a sequence's begin cuts off is a document
// of its own there.
// Shuffle: position p of epoch e is sequence permuted_index(p, sequences, seed, e): a bijection computed per element, so any
// rank finds any sequence without a table.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/interfaces.h"

namespace shardlab::runtime {

struct DatasetOptions {
  int64_t seq_len = 0;
  int64_t vocab = 256;               ///< every token id must be below it
  double validation_fraction = 0.1;  ///< of every file's tokens, in [0, 1); 0 for no validation split
  uint64_t seed = 1;                 ///< of the shuffle
};

/// An opened data set. Immutable and safe to read from several threads; cheap to move.
class Dataset {
 public:
  Dataset(Dataset&&) noexcept;
  Dataset& operator=(Dataset&&) noexcept;
  ~Dataset();

  /// Training sequences: epoch after epoch, each in its own shuffled order.
  const BatchSource& train() const;
  /// Validation sequences in the order of the text, from the first again after the last. Refuses when the split has none.
  Result<const BatchSource*> validation() const;

  int64_t train_sequences() const;       ///< of one epoch
  int64_t validation_sequences() const;  ///< 0 when the split is empty or shorter than one sequence
  int64_t files() const;
  int64_t train_tokens() const;
  int64_t train_documents() const;  ///< of two tokens or more, where they are packed; else 0
  /// Entropy in nats per token of the training targets' frequencies: the loss of the best model that knows no context.
  double unigram_entropy() const;

 private:
  friend Result<Dataset> open_dataset(const DataSource& source, const DatasetOptions& options);
  struct State;
  explicit Dataset(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Opens what `source` names.
///
/// `text` is a file, or a folder read recursively in the order of its paths: byte-level, ids 0 to 255. In a folder, hidden
/// entries, links, build folders (`build*`, `cmake-build*`, `node_modules`, `__pycache__`, any with a CMakeCache.txt), run
/// directories (`runs`, any with a results.sqlite) and files with a zero byte in their first 8 KiB are left out. A single file is
/// taken as it is. `tokens` is a file of little-endian uint16: nanoGPT's, which has no header, or llm.c's, which begins with 256
/// int32: the magic number 20240520, version 1 and the count. It is mapped, not read.
///
/// Refuses: neither or both named, a path that is missing or unreadable, no text, too short for one sequence, an odd
/// size, a header that does not fit the file, a token id that is not below `vocab`, packed tokens without an end of a document.
Result<Dataset> open_dataset(const DataSource& source, const DatasetOptions& options);

/// The image of `index` under the pseudo-random permutation of [0, count) named by `seed` and `epoch`.
/// An 8-round balanced Feistel network over Philox bits, walked until it falls below `count` (Black & Rogaway 2002).
int64_t permuted_index(int64_t index, int64_t count, uint64_t seed, uint32_t epoch);

}  // namespace shardlab::runtime
