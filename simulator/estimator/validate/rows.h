// Measured training runs of any origin, one a row, in the columns of validate/README.md. They are predicted and scored.
//
// A row states the framework, the model, the machine, the layout and the measurement. Open columns are derived: `dp` from the
// devices, `grad_accumulation` from the global batch, the schedule from pp and vpp. The stated columns must agree with one another.
// A row that cannot be a training run is refused with its reason, and the other rows go on. Unknown columns are carried through.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/result.h"
#include "plan/machine.h"
#include "plan/model.h"
#include "simulator/estimator/validate/csv.h"

namespace shardlab::simulator::validation {

/// Sizes of the model. Zero where a part is absent or, before a preset fills it in, not stated.
struct RunShape {
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
  bool tied_embeddings = false;
  bool swiglu = false;    ///< else GELU, with learned positions and biases where the norm is LayerNorm
  bool rms_norm = false;  ///< else LayerNorm
  int64_t experts = 0, top_k = 0, moe_ffn = 0;

  // Beyond the fixed columns, for DeepSeek's family: experts that every token passes, dense layers before the first
  // mixture, ranks of the compressed q and kv, widths of the rotary part and of v. `head_dim` is then the width of q and k
  // without the rotary part.
  int64_t shared_experts = 0, dense_layers = 0, q_lora_rank = 0, kv_lora_rank = 0, qk_rope_head_dim = 0, v_head_dim = 0;

  std::optional<bool> biases;             ///< of the projections; absent: those of GPT-2's family have them
  std::optional<bool> learned_positions;  ///< else rotary ones; absent: as `biases`
};

/// The layout and the batch. Words are those of the command line, checked against the lists of validate/README.md.
struct RunLayout {
  int64_t dp = 1, tp = 1, pp = 1, vpp = 1, cp = 1, ep = 1;
  std::optional<int64_t> zero;                               ///< absent: as the framework does
  std::string schedule = "none";                             ///< "none" iff pp == 1
  std::optional<bool> sequence_parallel;                     ///< absent: as the framework does
  std::vector<std::string> recompute;                        ///< {"none"}, {"selective"}, {"full"}, or names of sub-layers
  std::vector<std::pair<std::string, std::string>> offload;  ///< {"optimizer", "cpu"}; empty: nothing
  std::string precision = "bf16";
  int64_t micro_batch = 1, grad_accumulation = 1, seq_len = 0;

  std::optional<bool> overlap;              ///< of gradient and weight communication with compute
  std::optional<bool> async_tp;             ///< of tensor-parallel communication with matmuls
  std::optional<bool> compile;              ///< torch.compile
  std::optional<bool> expandable_segments;  ///< of PyTorch's caching allocator; absent: as the framework's launcher asks
  std::optional<bool> fused_attention;      ///< `attention`: fused (no S x S matrix in memory) or unfused
  std::string cp_kind;                      ///< empty: as the framework does
  std::optional<bool> fp8_gather;           ///< zero 3 gathers narrow weights; absent: as the framework does
  std::string fp8_scaling;                  ///< tensorwise, rowwise, blockwise, delayed; empty: not stated
  std::string reduce_dtype, accumulate_dtype, optimizer;  ///< empty: as the framework does
  std::optional<int64_t> bucket_bytes, hybrid_shard;
  std::optional<double> dropout;

  std::optional<int64_t> expert_tp;  ///< ranks that cut each expert; absent: tp
  /// Of the pipeline: whether embedding and head count as a layer each, and the layers of the first and last stage. Absent: evenly.
  bool embedding_as_layer = false, head_as_layer = false;
  int64_t first_stage_layers = 0, last_stage_layers = 0;
  std::string master_dtype,
      moment_dtype;  ///< of the optimizer's copy of the weights and of both moments; empty: as the framework does
  std::optional<bool> gradient_fusion;  ///< matmuls add weight gradients to the accumulated ones
  std::optional<bool> tf32;             ///< fp32 matmuls run on tensor cores
  std::string cuda_graphs;              ///< none, layers, step; empty: as the framework does
  std::optional<int64_t> head_chunks;   ///< pieces of a micro-batch that pass head and loss one after the other
  int64_t offload_layers = 0;           ///< whose activations are offloaded; 0: all
  int64_t micro_batch_group = 0;        ///< micro-batches that a part of a looped stage takes before the next does; 0: pp
  bool expert_overlap = false;          ///< exchanges among experts of one micro-batch run beside the compute of another

  int64_t world_size() const { return dp * tp * pp * cp; }
  int64_t tokens_per_step() const { return dp * micro_batch * grad_accumulation * seq_len; }
};

/// Bus bandwidths as nccl-tests defines them, GB/s (1e9): over all devices of the run, and (`intra`) over the devices of one node.
struct RunFabric {
  std::optional<double> all_reduce, all_gather, reduce_scatter;
  std::optional<double> intra_all_reduce, intra_all_gather, intra_reduce_scatter;
  std::optional<double> bytes;  ///< of the messages they were measured with; 0: large
  friend bool operator==(const RunFabric&, const RunFabric&) = default;
};

enum class MemoryKind : uint8_t {
  kLive,      ///< tensors that the program holds: torch.cuda.max_memory_allocated
  kReserved,  ///< what its allocator holds: torch.cuda.max_memory_reserved
  kDevice     ///< what the driver reports for the device: nvidia-smi
};
inline constexpr size_t kMemoryKinds = 3;
std::string_view name_of(MemoryKind kind);  ///< "live", "reserved", "device"

struct RunMeasured {
  std::optional<double> step_s;  ///< stated, or from tokens/s
  std::optional<int64_t> bytes;  ///< largest over ranks
  MemoryKind kind = MemoryKind::kLive;
  int64_t stage = -1;        ///< whose bytes they are, -1: of the fullest; rows say "last" for the last
  std::optional<bool> fits;  ///< `measured_status`: ok or oom; where that is not stated, a row with a measurement ran
};

struct Run {
  std::string profile = "shardlab";
  RunShape shape;
  /// With as many nodes as the devices need. The preset of a single device stands for a host with up to eight of them.
  Machine machine;
  int64_t devices = 0;
  RunLayout layout;
  RunFabric fabric;
  RunMeasured measured;
  int unstated = 0;  ///< settings of the layout that a source does not tell (`assumed`): they widen intervals
};

/// Resolves names of presets and files. Injected, because the folder that knows them must not be known here.
struct Resolver {
  std::function<Result<Model>(const std::string& preset_or_path)> model;
  std::function<Result<Machine>(const std::string& preset_or_path)> machine;
};

/// One row of a table: a run, or why it is none.
struct Row {
  int line = 0;
  std::string source;  ///< the column `source`, or the table's name: rows of one source share their errors
  Result<Run> run = Error{};
};

struct RowTable {
  std::string name;  ///< of the file, without folder and ending
  std::string file;  ///< as messages name it
  CsvTable csv;
  std::vector<Row> rows;            ///< as many as `csv.records`
  std::vector<std::string> unread;  ///< columns carried through
};

/// Columns that are read, in the order of the documentation.
std::vector<std::string> known_columns();

/// Reads a table. Errors of the file as a whole (csv.h; a column that every run needs is missing) refuse it; a bad value refuses
/// its row, with line and column.
Result<RowTable> read_rows(std::string_view text, const std::string& file, const Resolver& resolver);

}  // namespace shardlab::simulator::validation
