#include "runtime/dataset.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "plan/base/philox.h"

namespace shardlab::runtime {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSniffedBytes = 8192;  // as git: a zero byte this early makes a file binary
constexpr int64_t kLlmcHeaderBytes = 256 * 4;
constexpr int32_t kLlmcMagic = 20240520;        // uint16 tokens of GPT-2
constexpr int32_t kLlmcLlama3Magic = 20240801;  // uint32 tokens of Llama 3
constexpr int kFeistelRounds = 8;

/// A file mapped for reading.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(const uint8_t* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile() {
    if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
  }
  std::span<const uint8_t> bytes() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

Error unreadable(const std::string& path, const std::string& why, const std::string& key) {
  return {ExitCode::kUsage, fmt::format("cannot read `{}`: {}", path, why),
          fmt::format("Give a readable path in data.{}; relative paths are relative to the sweep file.", key), ""};
}

Result<MappedFile> map_file(const std::string& path, const std::string& key) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe is refused, not waited for
  if (descriptor < 0) return unreadable(path, std::strerror(errno), key);
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    return unreadable(path, "it is not a regular file", key);
  }
  if (status.st_size == 0) {
    close(descriptor);
    return MappedFile();
  }
  void* data = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
  const std::string failure = std::strerror(errno);
  close(descriptor);
  if (data == MAP_FAILED) return unreadable(path, failure, key);
  return MappedFile(static_cast<const uint8_t*>(data), status.st_size);
}

int32_t little_endian_i32(const uint8_t* p) {
  return static_cast<int32_t>(uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24);
}

/// Tokens of 1 byte (text) or 2 (little-endian), wherever they are stored.
struct TokenSpan {
  const uint8_t* data = nullptr;
  int64_t count = 0;
  int width = 1;

  int32_t operator[](int64_t i) const {
    return width == 1 ? data[i] : static_cast<int32_t>(data[2 * i]) | static_cast<int32_t>(data[2 * i + 1]) << 8;
  }
  TokenSpan part(int64_t begin, int64_t end) const { return {data + begin * width, end - begin, width}; }
};

/// Number of sequences of `seq_len` + 1 tokens at stride `seq_len`.
int64_t sequences_in(int64_t tokens, int64_t seq_len) { return tokens <= seq_len ? 0 : (tokens - 1) / seq_len; }

/// Tokens of `total` that train: the rest, at the end, validates.
int64_t train_part(int64_t total, double validation_fraction) {
  return total - static_cast<int64_t>(std::floor(static_cast<double>(total) * validation_fraction));
}

/// A document of a packed stream.
struct Document {
  int64_t first = 0;  ///< its first token in the stream
  int64_t place = 0;  ///< and the place of that token among all that are trained on
};

/// The sequences of one stream of tokens.
class Stream final : public BatchSource {
 public:
  Stream() = default;
  Stream(TokenSpan tokens, const DatasetOptions& options, bool shuffled)
      : tokens_(tokens), seq_len_(options.seq_len), seed_(options.seed), shuffled_(shuffled) {}

  /// Packs the documents that end before the tokens `ends`, ascending. One of a single token has no target and is left out.
  void pack(std::span<const int64_t> ends) {
    packed_ = true;
    for (int64_t first = 0; const int64_t end : ends) {
      if (end - first >= 2) {
        documents_.push_back({first, places_});
        places_ += end - first - 1;
      }
      first = end;
    }
  }

  int64_t sequences() const { return packed_ ? places_ / seq_len_ : sequences_in(tokens_.count, seq_len_); }
  const TokenSpan& tokens() const { return tokens_; }
  int64_t documents() const { return static_cast<int64_t>(documents_.size()); }

  void sequence(int64_t number, std::span<int32_t> out) const override {
    SHARDLAB_CHECK(!packed_, "sequence {} of packed documents is no run of the text", number);
    SHARDLAB_CHECK(static_cast<int64_t>(out.size()) == seq_len_ + 1, "a sequence is {} + 1 tokens, not {}", seq_len_, out.size());
    const int64_t first = index_of(number) * seq_len_;
    for (int64_t i = 0; i <= seq_len_; ++i) out[static_cast<size_t>(i)] = tokens_[first + i];
  }

  void packed(int64_t number, const PackedSequence& out) const override {
    SHARDLAB_CHECK(packed_, "packed sequence {} of a stream that was not packed", number);
    for (const std::span<int32_t> part : {out.tokens, out.targets, out.positions})
      SHARDLAB_CHECK(static_cast<int64_t>(part.size()) == seq_len_, "a sequence is {} tokens, not {}", seq_len_, part.size());
    const int64_t begin = index_of(number) * seq_len_;
    auto document = std::ranges::upper_bound(documents_, begin, {}, &Document::place) - 1;
    int32_t position = 0;
    for (int64_t i = 0; i < seq_len_; ++i, ++position) {
      if (const auto next = document + 1; next != documents_.end() && next->place == begin + i) document = next, position = 0;
      const int64_t token = document->first + begin + i - document->place;
      out.tokens[static_cast<size_t>(i)] = tokens_[token];
      out.targets[static_cast<size_t>(i)] = tokens_[token + 1];
      out.positions[static_cast<size_t>(i)] = position;
    }
  }

  /// Calls f(target) for every target of an epoch.
  template <class F>
  void for_targets(const F& f) const {
    const int64_t targets = sequences() * seq_len_;
    if (!packed_)
      for (int64_t i = 1; i <= targets; ++i) f(tokens_[i]);
    for (size_t d = 0; d < documents_.size(); ++d) {
      const int64_t end = d + 1 < documents_.size() ? documents_[d + 1].place : places_;
      for (int64_t place = documents_[d].place; place < std::min(end, targets); ++place)
        f(tokens_[documents_[d].first + place - documents_[d].place + 1]);
    }
  }

 private:
  /// Where sequence number `number` of the run lies in the stream.
  int64_t index_of(int64_t number) const {
    SHARDLAB_CHECK(number >= 0 && sequences() > 0, "sequence {} of a stream of {}", number, sequences());
    const int64_t index = number % sequences();
    return shuffled_ ? permuted_index(index, sequences(), seed_, static_cast<uint32_t>(number / sequences())) : index;
  }

  TokenSpan tokens_;
  bool packed_ = false;
  std::vector<Document> documents_;
  int64_t places_ = 0;  ///< of all documents
  int64_t seq_len_ = 1;
  uint64_t seed_ = 0;
  bool shuffled_ = false;
};

bool holds_products(const fs::path& folder) {
  const std::string name = folder.filename().string();
  std::error_code ignored;
  return name.starts_with("build") || name.starts_with("cmake-build") || name == "node_modules" || name == "__pycache__" ||
         name == "runs" || fs::exists(folder / "CMakeCache.txt", ignored) || fs::exists(folder / "results.sqlite", ignored);
}

/// Paths of the files in `folder` that may be text, in bytewise order of their generic form: the same on every machine.
Result<std::vector<std::string>> list_files(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const bool hidden = it->path().filename().string().starts_with(".");
    std::error_code gone;  // an entry that vanishes while we walk is no file
    if (it->is_symlink(gone)) continue;
    if (it->is_directory(gone)) {
      if (hidden || holds_products(it->path())) it.disable_recursion_pending();
    } else if (it->is_regular_file(gone) && !hidden) {
      paths.push_back(it->path().generic_string());
    }
  }
  if (error) return unreadable(folder, error.message(), "text");
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool looks_binary(std::span<const uint8_t> bytes) {
  const auto head = bytes.first(std::min(bytes.size(), static_cast<size_t>(kSniffedBytes)));
  return std::find(head.begin(), head.end(), uint8_t{0}) != head.end();
}

/// The two streams of all files, one after the other in one block of storage, validation last.
struct Streams {
  std::vector<uint8_t> storage;
  int64_t train = 0;
  int64_t files = 0;
  std::vector<int64_t> train_ends, validation_ends;  ///< where each file's part of a stream ends in it
};

Result<Streams> read_text(const std::string& path, const DatasetOptions& options) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  std::vector<std::string> paths{path};
  if (folder) {
    auto listed = list_files(path);
    if (!listed) return listed.error();
    paths = std::move(*listed);
  }
  Streams streams;
  std::vector<uint8_t> validation;
  for (const std::string& file : paths) {
    auto mapped = map_file(file, "text");
    if (!mapped) return mapped.error();
    const auto bytes = mapped->bytes();
    if (looks_binary(bytes)) {
      if (folder) continue;
      return Error{ExitCode::kUsage, fmt::format("`{}` is no text: it has zero bytes", path),
                   "Name a text file in data.text, or a file of uint16 tokens in data.tokens.", ""};
    }
    const auto cut = bytes.begin() + train_part(static_cast<int64_t>(bytes.size()), options.validation_fraction);
    streams.storage.insert(streams.storage.end(), bytes.begin(), cut);
    validation.insert(validation.end(), cut, bytes.end());
    streams.train_ends.push_back(static_cast<int64_t>(streams.storage.size()));
    streams.validation_ends.push_back(static_cast<int64_t>(validation.size()));
    streams.files += bytes.empty() ? 0 : 1;
  }
  if (streams.storage.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` holds no text{}", path, folder ? ": no file that is not empty, hidden or binary" : ""),
                 "Name a text file, or a folder with text files in it, in data.text.", ""};
  streams.train = static_cast<int64_t>(streams.storage.size());
  streams.storage.insert(streams.storage.end(), validation.begin(), validation.end());
  return streams;
}

/// The uint16 tokens of a mapped file, its header checked and left out.
Result<TokenSpan> tokens_of(std::span<const uint8_t> file, const std::string& path) {
  const int64_t size = static_cast<int64_t>(file.size());
  if (size == 0)
    return Error{ExitCode::kUsage, fmt::format("`{}` is empty", path), "Name a file of uint16 tokens in data.tokens.", ""};
  if (size % 2 != 0)
    return Error{ExitCode::kUsage, fmt::format("`{}` has {} bytes, an odd number, so it is no file of uint16 tokens", path, size),
                 "Write the file again, or use data.text for text.", ""};
  const int32_t magic = size >= 4 ? little_endian_i32(file.data()) : 0;
  if (magic == kLlmcLlama3Magic)
    return Error{ExitCode::kUsage, fmt::format("`{}` is an llm.c file of uint32 tokens (magic number {})", path, magic),
                 "Only uint16 tokens are read: tokenise for a vocabulary of at most 65536.", ""};
  if (magic != kLlmcMagic) return TokenSpan{file.data(), size / 2, 2};
  if (size < kLlmcHeaderBytes)
    return Error{
        ExitCode::kUsage,
        fmt::format("`{}` begins as an llm.c file but has {} bytes, less than its header of {}", path, size, kLlmcHeaderBytes),
        "The file is cut short: write it again.", ""};
  const int32_t version = little_endian_i32(file.data() + 4), count = little_endian_i32(file.data() + 8);
  if (version != 1)
    return Error{ExitCode::kUsage, fmt::format("`{}` is an llm.c file of version {}; only version 1 is known", path, version),
                 "Write it with llm.c's present dev/data scripts.", ""};
  if (count < 0 || kLlmcHeaderBytes + int64_t{2} * count != size)
    return Error{
        ExitCode::kUsage,
        fmt::format("`{}` is an llm.c file whose header says {} tokens, but {} follow", path, count, (size - kLlmcHeaderBytes) / 2),
        "The file is cut short or damaged: write it again.", ""};
  return TokenSpan{file.data() + kLlmcHeaderBytes, count, 2};
}

int32_t largest_token(const TokenSpan& tokens) {
  int32_t largest = 0;
  for (int64_t i = 0; i < tokens.count; ++i) largest = std::max(largest, tokens[i]);
  return largest;
}

Result<void> check_vocabulary(const TokenSpan& tokens, int64_t vocab, const std::string& path) {
  const bool text = tokens.width == 1;
  if (vocab >= (text ? 256 : 65536)) return {};
  const int32_t largest = largest_token(tokens);
  if (largest < vocab) return {};
  return Error{ExitCode::kUsage,
               fmt::format("`{}` holds {} {}, but the model's vocabulary has {} ids, 0 to {}", path, text ? "byte" : "token",
                           largest, vocab, vocab - 1),
               text ? "Set model.vocab to 256: text is read byte by byte."
                    : fmt::format("Set model.vocab to at least {}, or give the file of another tokeniser.", largest + 1),
               ""};
}

/// Where the documents of a stream end: behind each token `document_end`, and at the end.
std::vector<int64_t> ends_of(const TokenSpan& tokens, int64_t document_end) {
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < tokens.count; ++i)
    if (tokens[i] == document_end || i + 1 == tokens.count) ends.push_back(i + 1);
  return ends;
}

/// Entropy in nats of the frequencies of a stream's targets.
double target_entropy(const Stream& stream) {
  std::vector<int64_t> counts(stream.tokens().width == 1 ? 256 : 65536);
  int64_t targets = 0;
  stream.for_targets([&](int32_t target) {
    ++counts[static_cast<size_t>(target)];
    ++targets;
  });
  double entropy = 0;
  for (const int64_t count : counts) {
    if (count == 0) continue;
    const double p = static_cast<double>(count) / static_cast<double>(targets);
    entropy -= p * std::log(p);
  }
  return entropy;
}

Result<void> check_options(const DataSource& source, const DatasetOptions& options) {
  if (source.text.empty() == source.tokens.empty())
    return Error{
        ExitCode::kUsage,
        source.text.empty() ? "no data: neither data.text nor data.tokens is set" : "both data.text and data.tokens are set",
        "Set exactly one: data: {text: FILE-OR-FOLDER} or data: {tokens: FILE.bin}.", ""};
  if (options.seq_len < 1)
    return Error{ExitCode::kUsage, fmt::format("seq_len is {}; it must be at least 1", options.seq_len), "Set train.seq_len.", ""};
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1))
    return Error{ExitCode::kUsage, fmt::format("the validation fraction is {}; it must be in [0, 1)", options.validation_fraction),
                 "0.1 keeps the last tenth of every file for validation.", ""};
  return {};
}

}  // namespace

struct Dataset::State {
  std::vector<uint8_t> text;  // both streams of a text
  MappedFile file;            // or the file of tokens
  Stream train, validation;
  int64_t files = 0;
  double unigram_entropy = 0;
  std::string path;
  DatasetOptions options;
};

Dataset::Dataset(std::unique_ptr<State> state) : state_(std::move(state)) {}
Dataset::Dataset(Dataset&&) noexcept = default;
Dataset& Dataset::operator=(Dataset&&) noexcept = default;
Dataset::~Dataset() = default;

const BatchSource& Dataset::train() const { return state_->train; }
int64_t Dataset::train_sequences() const { return state_->train.sequences(); }
int64_t Dataset::validation_sequences() const { return state_->validation.sequences(); }
int64_t Dataset::files() const { return state_->files; }
int64_t Dataset::train_tokens() const { return state_->train.tokens().count; }
int64_t Dataset::train_documents() const { return state_->train.documents(); }
double Dataset::unigram_entropy() const { return state_->unigram_entropy; }

Result<const BatchSource*> Dataset::validation() const {
  if (validation_sequences() > 0) return static_cast<const BatchSource*>(&state_->validation);
  return Error{ExitCode::kUsage,
               fmt::format("the validation split of `{}` has {} tokens, too few for one sequence of {} + 1", state_->path,
                           state_->validation.tokens().count, state_->options.seq_len),
               "Give more text, shorten train.seq_len, or set measure.validate_sequences to 0.", ""};
}

Result<Dataset> open_dataset(const DataSource& source, const DatasetOptions& options) {
  SHARDLAB_TRY(check_options(source, options));
  auto state = std::make_unique<Dataset::State>();
  state->options = options;
  state->path = source.text.empty() ? source.tokens : source.text;
  TokenSpan all;
  int64_t train = 0;
  std::vector<int64_t> train_ends, validation_ends;
  if (!source.text.empty()) {
    auto streams = read_text(source.text, options);
    if (!streams) return streams.error();
    state->text = std::move(streams->storage);
    state->files = streams->files;
    all = {state->text.data(), static_cast<int64_t>(state->text.size()), 1};
    train = streams->train;
    train_ends = std::move(streams->train_ends);
    validation_ends = std::move(streams->validation_ends);
  } else {
    auto mapped = map_file(source.tokens, "tokens");
    if (!mapped) return mapped.error();
    state->file = std::move(*mapped);
    auto tokens = tokens_of(state->file.bytes(), source.tokens);
    if (!tokens) return tokens.error();
    state->files = 1;
    all = *tokens;
    train = train_part(all.count, options.validation_fraction);
    if (source.packed) {
      train_ends = ends_of(all.part(0, train), source.document_end);
      validation_ends = ends_of(all.part(train, all.count), source.document_end);
      if (train_ends.size() <= 1)
        return Error{ExitCode::kUsage,
                     fmt::format("the training split of `{}` holds no token {} before its last, so it is one document",
                                 source.tokens, source.document_end),
                     "Set data.document_end to the id that ends a document there, or data.packed: false.", ""};
    }
  }
  SHARDLAB_TRY(check_vocabulary(all, options.vocab, state->path));
  state->train = Stream(all.part(0, train), options, true);
  state->validation = Stream(all.part(train, all.count), options, false);
  if (source.packed) {
    state->train.pack(train_ends);
    state->validation.pack(validation_ends);
  }
  if (state->train.sequences() == 0)
    return Error{ExitCode::kUsage,
                 fmt::format("the training split of `{}` has {} tokens, too few for one sequence of {} + 1", state->path, train,
                             options.seq_len),
                 "Give more text or shorten train.seq_len.", ""};
  state->unigram_entropy = target_entropy(state->train);
  return Dataset(std::move(state));
}

int64_t permuted_index(int64_t index, int64_t count, uint64_t seed, uint32_t epoch) {
  SHARDLAB_CHECK(index >= 0 && index < count, "index {} of a permutation of {}", index, count);
  // Two halves of `half` bits cover [0, 4^half), less than 4 times `count`: on average fewer than 4 walks.
  const int half = std::max(1, (static_cast<int>(std::bit_width(static_cast<uint64_t>(count - 1))) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint32_t round = 0; round < kFeistelRounds; ++round) {
      const uint64_t mixed = left ^ (random_bits({seed, RandomUse::kShuffle, round, epoch}, right) & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(value);
}

}  // namespace shardlab::runtime
