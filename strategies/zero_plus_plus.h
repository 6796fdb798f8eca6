// ZeRO++: three ways to send less under ZeRO-3, each a switch of its own. Each has a file: quantised_weights.cpp (qwZ),
// secondary_shard.cpp (hpZ), quantised_scatter.cpp (qgZ, which also scatters compressed gradients under ZeRO-1 and ZeRO-2).
//
// Paper    Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023)
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "strategies/compression.h"
#include "strategies/shards.h"

namespace shardlab::strategies {

/// qwZ: the parameters of a bucket travel in 8 bits with scales, and are made whole again on arrival.
class QuantisedGather {
 public:
  /// Declares what all buckets of the stage send through; call it when they are filled.
  QuantisedGather(Draft& draft, StageDraft& stage, const Shards& shards, StreamId stream);
  /// Every slice to every rank: `slice` -> `flat`, the rank's own as the others see it.
  Call gather(const Bucket& bucket, BufferId slice, BufferId flat);

 private:
  struct Messages {
    BufferId codes, scales;
  };
  Messages messages_of(const Bucket& bucket, const Type& flat);

  Draft& draft_;
  StageDraft& stage_;
  int64_t ranks_;
  StreamId stream_;
  BufferId codes_, scales_;  ///< of whichever bucket is on its way
  std::map<std::string, Messages> messages_;
};

/// hpZ: each group of neighbouring ranks ("node") holds the parameters once more, sharded over itself, and backward
/// gathers from there.
class SecondaryShard {
 public:
  SecondaryShard(Draft& draft, StageDraft& stage, StreamId stream) : draft_(draft), stage_(stage), stream_(stream) {}
  /// Keeps this rank's part of `flat`, which was just gathered.
  Call keep(const Bucket& bucket, BufferId flat);
  /// The parts of the group to each of it: -> `flat`.
  Call gather(const Bucket& bucket, BufferId flat);

 private:
  BufferId shard_of(const Bucket& bucket, BufferId flat);

  Draft& draft_;
  StageDraft& stage_;
  StreamId stream_;
  std::map<std::string, BufferId> shards_;
};

/// A reduce-scatter of quantised gradients: an all-to-all of codes and a sum in fp32, in one hop, or, where ranks have
/// nodes, in two.
class QuantisedScatter {
 public:
  struct Options {
    WireCode code;
    bool feedback = false;  ///< what quantising loses of a gradient is added to the next
    std::string_view strategy;
  };
  /// Declares what all buckets of the stage send through; call it when they are filled.
  QuantisedScatter(Draft& draft, StageDraft& stage, const Shards& shards, Options options);
  /// The sum over the ranks of `bucket.gradient` in this rank's `slice` of it.
  Event scatter(const Bucket& bucket, BufferId slice, int micro_batch);

 private:
  struct Messages {
    std::vector<BufferId> a, b;  ///< codes, and their scales
    BufferId error;
  };
  /// Messages of one dtype, in two buffers by turns.
  struct Wire {
    std::string name;
    DType dtype = DType::f32;
    int64_t of_slice = 0;  ///< elements for one rank's slice
    Micro micro = Micro::kNone;
    SlotId a, b;
  };
  /// The slots of one bucket's way.
  struct Sum {
    int64_t elements = 0;
    SlotId gradient, error, m, slice;  ///< m: the value that is quantised: the gradient, or gradient plus error
    std::vector<Wire> wires;
  };
  int64_t scales_of(const Bucket& bucket) const;
  Messages& messages_of(const Bucket& bucket);
  void one_hop(Compressing& ops, const Sum& sum) const;
  void two_hops(Compressing& ops, const Sum& sum) const;

  Draft& draft_;
  StageDraft& stage_;
  int64_t ranks_;
  Options options_;
  BufferId a_, b_;  ///< codes of whichever bucket is on its way; scales of each have buffers of their own
  std::map<std::string, Messages> messages_;
};

/// The scatter of `compression` bf16 or int8 under ZeRO-1 and ZeRO-2, with error feedback; empty if gradients travel plain.
ScatterEvent compressed_scatter(Draft& draft, StageDraft& stage, const Shards& shards);
/// The `BucketRule::block` that it asks for.
int64_t code_block(const Case& c);

}  // namespace shardlab::strategies
