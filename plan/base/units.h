// Strong types for the quantities that shardlab adds up, so that bytes are never added to flops.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace shardlab {

/// A count of one unit. `Tag` only tells counts of different units apart.
template <class Tag>
struct Count {
  int64_t value = 0;

  constexpr Count() = default;
  constexpr explicit Count(int64_t v) : value(v) {}
  friend constexpr auto operator<=>(Count, Count) = default;
  constexpr Count& operator+=(Count o) {
    value += o.value;
    return *this;
  }
  constexpr Count& operator-=(Count o) {
    value -= o.value;
    return *this;
  }
  friend constexpr Count operator+(Count a, Count b) { return Count(a.value + b.value); }
  friend constexpr Count operator-(Count a, Count b) { return Count(a.value - b.value); }
  friend constexpr Count operator*(Count a, int64_t k) { return Count(a.value * k); }
  friend constexpr Count operator*(int64_t k, Count a) { return Count(a.value * k); }
};

using Bytes = Count<struct BytesTag>;
using Flops = Count<struct FlopsTag>;

/// Seconds appear in `Machine`, `CostModel` and `Trace` only: a plan knows none.
struct Seconds {
  double value = 0;

  constexpr Seconds() = default;
  constexpr explicit Seconds(double v) : value(v) {}
  friend constexpr auto operator<=>(Seconds, Seconds) = default;
  constexpr Seconds& operator+=(Seconds o) {
    value += o.value;
    return *this;
  }
  friend constexpr Seconds operator+(Seconds a, Seconds b) { return Seconds(a.value + b.value); }
  friend constexpr Seconds operator-(Seconds a, Seconds b) { return Seconds(a.value - b.value); }
  friend constexpr Seconds operator*(Seconds a, double k) { return Seconds(a.value * k); }
};

/// An index into one kind of table. `kNone` is "no such entry".
template <class Tag>
struct Id {
  static constexpr int32_t kNone = -1;
  int32_t value = kNone;

  constexpr Id() = default;
  constexpr explicit Id(int32_t v) : value(v) {}
  friend constexpr auto operator<=>(Id, Id) = default;
  constexpr explicit operator bool() const { return value != kNone; }
  constexpr size_t index() const { return static_cast<size_t>(value); }
};

using BufferId = Id<struct BufferTag>;        ///< into Role::buffers
using SegmentId = Id<struct SegmentTag>;      ///< into Plan::segments
using SlotId = Id<struct SlotTag>;            ///< into Segment::slots
using StreamId = Id<struct StreamTag>;        ///< into Plan::streams
using CommId = Id<struct CommTag>;            ///< into Plan::comms
using ParameterId = Id<struct ParameterTag>;  ///< into Plan::parameters

}  // namespace shardlab
