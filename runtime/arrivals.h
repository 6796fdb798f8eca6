// The order in which gradients reached the servers of a parameter server whose workers run apart. A run leaves this log, and a
// replay follows it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::runtime {

/// The gradient of one worker's step.
struct Arrival {
  int64_t step = 0;
  int worker = 0;
  friend auto operator<=>(const Arrival&, const Arrival&) = default;
};

/// The updates that one server made of one bucket.
struct BucketArrivals {
  std::string bucket;                         ///< name of the buffer in which gradients are added up: "bucket0.sum"
  std::vector<std::vector<Arrival>> updates;  ///< what each update applied, by step and then by worker
  friend bool operator==(const BucketArrivals&, const BucketArrivals&) = default;
};

/// One server's log. A worker goes on with what the update that applied its gradient left: no other time is needed to replay.
struct ArrivalLog {
  int server = 0;
  int workers = 0;
  int staleness = 0;
  std::vector<BucketArrivals> buckets;
  friend bool operator==(const ArrivalLog&, const ArrivalLog&) = default;
};

/// One line a bucket: updates apart by spaces, arrivals within one by commas, each as worker:step.
std::string print(const ArrivalLog& log);
/// Reads what `print` writes. Refuses anything else, naming the line.
Result<ArrivalLog> parse_arrivals(std::string_view text);

/// How old the values were that gradients were made from: updates that a server made between giving a worker its values and
/// applying what the worker made of them. Over all buckets and servers.
struct StalenessFigures {
  int64_t gradients = 0;
  int64_t sum = 0;
  int64_t worst = 0;
  int64_t ahead = 0;  ///< most steps that a gradient was ahead of the slowest worker's when it was applied

  double mean() const { return gradients > 0 ? static_cast<double>(sum) / static_cast<double>(gradients) : 0; }
};

}  // namespace shardlab::runtime
