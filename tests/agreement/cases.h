// Random legal cases that both resolutions of prediction can say, over everything that either knows.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "plan/case.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Deals cases: models of both families with few layers and realistic widths, on nodes of eight devices, under every technique that
/// a plan can say and the analytic estimate has. Each draw is independent of the last; the same seed deals the same cases.
class CaseDealer {
 public:
  /// `sequences`: products in strips, parts of sequences, and head and loss in pieces are dealt too; the other cases stay those they were.
  explicit CaseDealer(uint64_t seed, bool sequences = false) : drawn_(seed << 32), sequences_(sequences) {}

  /// The next case that `check` passes.
  Case next();
  /// Cases that were drawn and thrown away, by the message that refused them, its numbers left out.
  const std::map<std::string, int64_t>& refused() const { return refused_; }

 private:
  Case deal();
  void deal_model(Case& c);
  void deal_layout(Case& c);
  void deal_state(Case& c);
  void deal_layers(Case& c);
  void deal_training(Case& c);
  void deal_techniques(Case& c);
  void deal_compression(Case& c);
  void deal_sequences(Case& c);
  void deal_machine(Case& c);

  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[draw(values.size())];
  }
  /// True once in `n`.
  bool one_in(uint64_t n) { return draw(n) == 0; }
  uint64_t draw(uint64_t n);

  uint64_t drawn_;
  bool sequences_;
  std::map<std::string, int64_t> refused_;
};

}  // namespace shardlab::testing
