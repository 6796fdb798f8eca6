#include "tests/numerics/against_reference.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <span>

#include "tests/namespaces.h"
#include "tests/numerics/reference/trainer.h"

namespace shardlab::testing {
namespace {

template <class T>
double squared_norm(const reference::Tensors<T>& gradients) {
  double sum = 0;
  for (const auto& gradient : gradients)
    for (const T g : gradient) sum += double{g} * double{g};
  return sum;
}

template <class T>
std::map<std::string, std::vector<T>> by_name(const reference::Trainer<T>& trainer) {
  std::map<std::string, std::vector<T>> values;
  for (const ModelParameter& p : trainer.parameters()) values[p.name] = trainer.value(p.name);
  return values;
}

/// The sequences of one step, in order, as the trainer takes them.
std::vector<int32_t> tokens_of(const Subject& subject, int64_t step, bool packed) {
  const RandomText text(subject.model.vocab);
  const size_t s = static_cast<size_t>(subject.train.seq_len), length = packed ? 3 * s : s + 1;
  std::vector<int32_t> tokens(static_cast<size_t>(subject.sequences) * length);
  for (int64_t i = 0; i < subject.sequences; ++i) {
    const auto row = std::span(tokens).subspan(static_cast<size_t>(i) * length, length);
    const int64_t number = step * subject.sequences + i;
    if (packed)
      text.packed(number, {row.subspan(0, s), row.subspan(s, s), row.subspan(2 * s, s)});
    else
      text.sequence(number, row);
  }
  return tokens;
}

/// Where two rows of numbers first differ in a bit, or hold what is no number: empty when they are the same finite numbers.
std::string first_difference(const std::string& name, std::span<const float> want, std::span<const float> have) {
  if (want.size() != have.size()) return fmt::format("{}: {} elements, not {}", name, have.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(want[i]) || !std::isfinite(have[i]))
      return fmt::format("{}[{}] is {}, reference {}", name, i, have[i], want[i]);
    if (std::bit_cast<uint32_t>(want[i]) != std::bit_cast<uint32_t>(have[i]))
      return fmt::format("{}[{}] is {:.9g}, reference {:.9g}", name, i, have[i], want[i]);
  }
  return "";
}

/// Squared norms add the same numbers in another order, in fp64.
std::string norm_difference(std::span<const double> want, std::span<const double> have) {
  if (want.size() != have.size()) return fmt::format("{} squared norms, not {}", have.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i)
    if (!(std::abs(have[i] - want[i]) <= 1e-12 * want[i]))
      return fmt::format("squared norm of step {} is {}, reference {}", i, have[i], want[i]);
  return "";
}

}  // namespace

template <class T>
Expected<T> expect(const Subject& subject, const TokenOrder& order, bool packed,
                   std::vector<typename reference::Trainer<T>::Block> blocks) {
  reference::Trainer<T> trainer(subject.model, subject.train, subject.sequences, order, packed);
  if (!blocks.empty()) trainer.set_blocks(std::move(blocks));
  Expected<T> expected;
  expected.initial = by_name(trainer);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto tokens = tokens_of(subject, step, packed);
    const auto sum = trainer.gradients(tokens);
    trainer.update(sum.gradients);
    trainer.follow(sum.load);
    expected.losses.push_back(sum.nll);
    expected.squared_norms.push_back(squared_norm(sum.gradients));
  }
  expected.parameters = by_name(trainer);
  expected.validation_loss = trainer.validation_loss(tokens_of(subject, 0, packed));
  return expected;
}

template Expected<float> expect(const Subject&, const TokenOrder&, bool, std::vector<reference::Trainer<float>::Block>);
template Expected<double> expect(const Subject&, const TokenOrder&, bool, std::vector<reference::Trainer<double>::Block>);

std::string differences(const Case& config, const Expected<float>& want, const Trained& have) {
  std::string text;
  const auto note = [&](const std::string& line) { text += line.empty() ? "" : line + "\n"; };
  note(first_difference("loss", want.losses, have.losses));
  note(first_difference("validation loss", {&want.validation_loss, 1}, {&have.validation_loss, 1}));
  const bool norms = config.train.grad_norm || config.train.clip_norm > 0 || config.train.guard.spike != GuardAction::kNone;
  note(norm_difference(norms ? want.squared_norms : std::vector<double>{}, have.squared_norms));
  for (const auto& [name, values] : want.parameters) {
    const auto found = have.parameters.find(name);
    note(found == have.parameters.end() ? name + " is missing" : first_difference(name, values, found->second));
  }
  return text;
}

double error_of(const Expected<double>& want, const Trained& have) {
  double error = 0, moved = 0;
  for (const auto& [name, values] : want.parameters)
    for (size_t i = 0; i < values.size(); ++i) {
      const double e = values[i] - have.parameters.at(name)[i], m = values[i] - want.initial.at(name)[i];
      error += e * e;
      moved += m * m;
    }
  return std::sqrt(error / moved);
}

}  // namespace shardlab::testing
