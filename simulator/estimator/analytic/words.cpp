// Names of parts, classes and refusals of estimates.
#include <array>
#include <numeric>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/schedule.h"

namespace shardlab::simulator::analytic {
namespace {

constexpr std::array<std::string_view, 5> kCpKinds{"ring", "zigzag", "striped", "all-gather", "ulysses"};
constexpr std::array<std::string_view, 3> kMedia{"none", "cpu", "nvme"};
constexpr std::array<std::string_view, 5> kCompressions{"none", "powersgd", "top-k", "one-bit", "int8"};
constexpr std::array<std::string_view, kRefusals> kRefusalNames{"legal", "size",      "devices",   "ability",    "heads",
                                                                "width", "layers",    "schedule",  "sequence",   "experts",
                                                                "zero",  "precision", "algorithm", "combination"};
constexpr std::array<std::string_view, kTimeParts> kTimeNames{
    "forward",          "backward",        "recompute",     "launch",   "tensor_parallel",
    "context_parallel", "expert_parallel", "data_parallel", "pipeline", "update"};
constexpr std::array<std::string_view, kMemoryParts> kMemoryNames{"parameters", "gradients", "master",  "moments",  "activations",
                                                                  "transient",  "logits",    "buckets", "gathered", "workspace",
                                                                  "fragmented", "context",   "nccl"};

template <class Enum, size_t N>
bool find(const std::array<std::string_view, N>& words, std::string_view word, Enum* v) {
  for (size_t i = 0; i < N; ++i)
    if (words[i] == word) return *v = static_cast<Enum>(i), true;
  return false;
}

}  // namespace

std::string_view name_of(CpKind v) { return kCpKinds[static_cast<size_t>(v)]; }
std::string_view name_of(Medium v) { return kMedia[static_cast<size_t>(v)]; }
std::string_view name_of(Compression v) { return kCompressions[static_cast<size_t>(v)]; }
std::string_view name_of(Refusal v) { return kRefusalNames[static_cast<size_t>(v)]; }
std::string_view sentence_of(Refusal v) {
  static constexpr std::array<std::string_view, kRefusals> kSentences{
      "nothing is wrong with it",
      "a size is out of range",
      "more ranks than devices",
      "the framework does not have it",
      "tp or ulysses does not divide the attention heads",
      "tp does not divide the widths of the model",
      "fewer layers than pipeline stages",
      "the schedule does not go with these stages and micro-batches",
      "cp and tp do not divide the sequence",
      "ep does not go with the experts",
      "this stage of ZeRO does not go with pipeline stages or shards",
      "the device has no such precision",
      "the collective algorithm is not the framework's, or no size of its groups",
      "two techniques exclude each other"};
  return kSentences[static_cast<size_t>(v)];
}
std::string_view sentence_of(TimePart v) {
  static constexpr std::array<std::string_view, kTimeParts> kSentences{"longer forward",
                                                                       "longer backward",
                                                                       "recompute",
                                                                       "the device waits for the host",
                                                                       "more waiting for tensor parallelism",
                                                                       "more waiting for context parallelism",
                                                                       "more waiting for experts' exchanges",
                                                                       "more waiting for gradients and gathered weights",
                                                                       "longer pipeline bubbles",
                                                                       "longer updates and offload"};
  return kSentences[static_cast<size_t>(v)];
}
std::string_view words_of(MemoryPart v) {
  static constexpr std::array<std::string_view, kMemoryParts> kWords{"weights",
                                                                     "gradients",
                                                                     "master weights",
                                                                     "optimizer moments",
                                                                     "activations",
                                                                     "memory of the layer that runs",
                                                                     "logits",
                                                                     "gradient buckets",
                                                                     "gathered weights",
                                                                     "library workspace",
                                                                     "allocator fragments",
                                                                     "driver memory",
                                                                     "NCCL buffers"};
  return kWords[static_cast<size_t>(v)];
}
std::string_view name_of(TimePart v) { return kTimeNames[static_cast<size_t>(v)]; }
std::string_view name_of(PeakMoment v) {
  static constexpr std::array<std::string_view, 5> kNames{"forward", "loss", "backward", "end", "update"};
  return kNames[static_cast<size_t>(v)];
}
std::string_view name_of(MemoryPart v) { return kMemoryNames[static_cast<size_t>(v)]; }
const std::vector<std::string_view>& schedule_words() {
  static const std::vector<std::string_view> words = [] {
    std::vector<std::string_view> out{name_of(Schedule::kNone)};
    for (const Schedule s : estimated_schedules()) out.push_back(name_of(s));
    return out;
  }();
  return words;
}
bool read(std::string_view word, Schedule* v) {
  const auto named = schedule_named(word);
  if (!named || *named > Schedule::kDualPipeV) return false;
  *v = *named;
  return true;
}
bool read(std::string_view word, CpKind* v) { return find(kCpKinds, word, v); }
bool read(std::string_view word, Medium* v) { return find(kMedia, word, v); }
bool read(std::string_view word, Compression* v) { return find(kCompressions, word, v); }

int64_t MemoryBytes::live() const {
  return std::accumulate(bytes.begin(), bytes.begin() + static_cast<size_t>(MemoryPart::kFragmented), int64_t{0});
}
int64_t MemoryBytes::reserved() const { return live() + (*this)[MemoryPart::kFragmented]; }
int64_t MemoryBytes::device() const { return reserved() + (*this)[MemoryPart::kContext] + (*this)[MemoryPart::kNccl]; }

double Estimate::wire_total() const { return std::accumulate(wire.begin(), wire.end(), 0.0); }

}  // namespace shardlab::simulator::analytic
