// The exchanges of experts (expert_parallel.cpp) beside compute. Both kinds put the all-to-alls on a stream of their own, "ep".
//
//   layer          what a layer has to compute besides moves to where an exchange is under way:
//
//                    forward   rows go:            up and activation of the shared experts
//                              rows return:        their down projection and gate
//                    backward  gradients go:       the shared experts, whole
//                              gradients return:   gradients of the experts' weights, and the router
//
//   micro-batches  the same, and the layers of two micro-batches are braided: where a schedule has the forward of one beside the backward of
//                  another on the same stage, both are cut where they wait for an exchange (`pieces_by_exchange`), and their pieces take
//                  turns. What one has under way, the other hides:
//
//                    forward    attention, router |> rows go |       experts |> rows return |       combine
//                    backward                      combine |> gradients go |   experts |> gradients return | router, attention
//
//                  One stage braids the backward of a micro-batch with the forward of the next. A stage of a pipeline braids a forward with the
//                  backward behind it where that one's gradient has come when the forward begins (plan/braids.h).
//
// No sum changes its order: the bits are those without overlap.
//
// Shapes   as without
// Adds     nothing: the same exchanges, on a stream of their own
// Memory   layer: rows that are sent stay until those that come are read. micro-batches: what lies between two pieces is kept by micro-batch,
//          and on one stage two micro-batches are in flight
// Refuses  no expert parallelism; of micro-batches: parameters that are gathered (ZeRO-3), activations on the host, one micro-batch, a
//          schedule in which no gradient comes early enough (afab, 1f1b, zb-h1, naive)
// Paper    DeepSeek-AI, "DeepSeek-V3" (2024), section 3.2.1; Megatron-Core, "1F1B with all-to-all overlap" (2025)
#include "strategies/expert_overlap.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <string_view>

namespace shardlab::strategies {
namespace {

bool is_exchange(const Op& op) {
  const auto* c = std::get_if<Collective>(&op.work);
  return c != nullptr && c->kind == CollectiveKind::kAllToAll && op.strategy == "expert-parallel";
}

/// What fills the time of an exchange, by label; `weights`: only the gradients of weights.
struct Filler {
  std::string_view exchange;
  std::string_view label;
  bool weights = false;
};
constexpr std::array kForward{Filler{"moe.go", "moe.shared.up.gather"}, Filler{"moe.go", "moe.shared.up"},
                              Filler{"moe.go", "moe.shared.act"},       Filler{"moe.return", "moe.shared.down"},
                              Filler{"moe.return", "moe.shared.gate"},  Filler{"moe.return", "moe.shared.gated"}};
constexpr std::array kBackward{Filler{"moe.return.d", "moe.shared.gated"},
                               Filler{"moe.return.d", "moe.shared.gate"},
                               Filler{"moe.return.d", "moe.shared.down.gather"},
                               Filler{"moe.return.d", "moe.shared.down"},
                               Filler{"moe.return.d", "moe.shared.act"},
                               Filler{"moe.return.d", "moe.shared.up"},
                               Filler{"moe.go.d", "moe.down", true},
                               Filler{"moe.go.d", "moe.up", true},
                               Filler{"moe.go.d", "moe.count"},
                               Filler{"moe.go.d", "moe.route"},
                               Filler{"moe.go.d", "moe.router"}};

class Overlapped {
 public:
  /// Each exchange begins as soon as its rows are made.
  Overlapped(DraftSegment& draft, StreamId stream) : segment_(draft.segment) {
    for (size_t i = 0; i < segment_.steps.size(); ++i) {
      if (!is_exchange(op(i))) continue;
      std::get<Op>(segment_.steps[i]).stream = stream;
      size_t begin = i;
      while (begin > 0 && !is_exchange(op(begin - 1)) && independent(segment_, op(begin - 1), op(i))) --begin;
      std::rotate(at(begin), at(i), at(i + 1));
    }
  }

  void fill(std::span<const Filler> fills) {
    auto& steps = segment_.steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string exchange = op(i).label;
      if (!is_exchange(op(i))) continue;
      size_t waits = i + 1;
      while (waits < steps.size() && (is_exchange(op(waits)) || !meet(segment_, op(waits).reads, op(i).writes))) ++waits;
      for (size_t k = waits + 1; k < steps.size(); ++k) {
        const bool fits = std::ranges::any_of(fills, [&](const Filler& f) {
          return f.exchange == exchange && f.label == op(k).label && (!f.weights || phase_of(op(k).work) == Phase::kW);
        });
        if (!fits) continue;
        bool free = true;
        for (size_t between = waits; free && between < k; ++between) free = independent(segment_, op(between), op(k));
        if (!free) continue;
        std::rotate(at(waits), at(k), at(k + 1));
        ++waits;
      }
    }
  }

 private:
  const Op& op(size_t i) const { return std::get<Op>(segment_.steps[i]); }
  std::vector<Step>::iterator at(size_t i) { return segment_.steps.begin() + static_cast<std::ptrdiff_t>(i); }

  Segment& segment_;
};

}  // namespace

void expert_overlap(Draft& draft) {
  const StreamId stream = draft.stream("ep");
  for (const UnitKind kind : draft.mixture_kinds()) {
    UnitTemplate& layer = draft.of(kind);
    Overlapped(layer.forward, stream).fill(kForward);
    Overlapped(layer.backward, stream).fill(kBackward);
  }
}

std::vector<size_t> pieces_by_exchange(const Segment& segment) {
  std::vector<size_t> piece;
  std::vector<SlotId> under_way;
  size_t now = 0;
  for (const Step& step : segment.steps) {
    const Op& op = std::get<Op>(step);
    if (op.stream == StreamId(0)) {
      // Exchanges are on one stream: those before the last that the op waits for have ended too.
      const auto last =
          std::find_if(under_way.rbegin(), under_way.rend(), [&](SlotId slot) { return meet(segment, op.reads, {slot}); });
      if (last != under_way.rend()) {
        under_way.erase(under_way.begin(), last.base());
        ++now;
      }
    } else if (std::holds_alternative<Collective>(op.work)) {
      under_way.insert(under_way.end(), op.writes.begin(), op.writes.end());
    }
    piece.push_back(now);
  }
  return piece;
}

}  // namespace shardlab::strategies
