#include "tests/cuda_runtime/queued_kernels.h"

#include <memory>
#include <vector>

#include "tests/cuda_runtime/fake_api.h"
#include "tests/cuda_runtime/host_kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

namespace {

FakeStream& stream_of(gpu::Stream s) { return *static_cast<FakeStream*>(s.handle); }
gpu::Stream on_host(gpu::LaunchCheck* check) { return {nullptr, check}; }

/// Arguments that outlive the launch: lists on the host are read before it returns.
template <class Args>
struct Kept {
  Args args;
  explicit Kept(const Args& a) : args(a) {}
  Args use() const { return args; }
};

struct KeptList {
  std::vector<const void*> data;
  std::vector<int64_t> sizes;
  explicit KeptList(const gpu::ArrayList& list)
      : data(list.data, list.data + list.count), sizes(list.sizes, list.sizes + list.count) {}
  gpu::ArrayList list() const { return {data.data(), sizes.data(), static_cast<int>(data.size())}; }
};

template <class Args>
struct KeptParts {
  Args args;
  KeptList parts;
  explicit KeptParts(const Args& a) : args(a), parts(a.parts) {}
  Args use() const {
    Args a = args;
    a.parts = parts.list();
    return a;
  }
};
template <>
struct Kept<gpu::SumScalars> : KeptParts<gpu::SumScalars> {
  using KeptParts::KeptParts;
};
template <>
struct Kept<gpu::SquaredNorm> : KeptParts<gpu::SquaredNorm> {
  using KeptParts::KeptParts;
};
template <>
struct Kept<gpu::Amax> {
  gpu::Amax args;
  std::vector<gpu::Input> parts;
  std::vector<int64_t> sizes;
  explicit Kept(const gpu::Amax& a) : args(a), parts(a.parts, a.parts + a.count), sizes(a.sizes, a.sizes + a.count) {}
  gpu::Amax use() const {
    gpu::Amax a = args;
    a.parts = parts.data();
    a.sizes = sizes.data();
    return a;
  }
};
template <>
struct Kept<gpu::Combine> {
  gpu::Combine args;
  std::vector<const void*> parts;
  std::vector<void*> outs;
  explicit Kept(const gpu::Combine& a) : args(a), parts(a.parts, a.parts + a.count), outs(a.outs, a.outs + a.out_count) {}
  gpu::Combine use() const {
    gpu::Combine a = args;
    a.parts = parts.data();
    a.outs = outs.data();
    return a;
  }
};

using Table = const gpu::Kernels& (*)();

template <Table Base, auto Member, class Args>
void queue(const Args& args, gpu::Stream s) {
  stream_of(s).push([kept = Kept<Args>(args), check = s.check] { (Base().*Member)(kept.use(), on_host(check)); });
}

/// Puts the queueing launch of one member into the table.
template <Table Base, auto Member, class Args>
void set(gpu::Kernels& table, void (*gpu::Kernels::*)(const Args&, gpu::Stream)) {
  table.*Member = &queue<Base, Member, Args>;
}

template <Table Base, auto... Members>
void set_all(gpu::Kernels& table) {
  (set<Base, Members>(table, Members), ...);
}

class QueuedMatmul final : public gpu::Matmul {
 public:
  explicit QueuedMatmul(std::unique_ptr<gpu::Matmul> inner) : inner_(std::move(inner)) {}
  void forward(const gpu::LinearForward& a, gpu::Stream s) override { queue_call(&gpu::Matmul::forward, a, s); }
  void input(const gpu::LinearInput& a, gpu::Stream s) override { queue_call(&gpu::Matmul::input, a, s); }
  void weight(const gpu::LinearWeight& a, gpu::Stream s) override { queue_call(&gpu::Matmul::weight, a, s); }
  std::string_view name() const override { return inner_->name(); }

 private:
  template <class Args>
  void queue_call(void (gpu::Matmul::*method)(const Args&, gpu::Stream), const Args& a, gpu::Stream s) {
    stream_of(s).push([inner = inner_, method, a, check = s.check] { ((*inner).*method)(a, on_host(check)); });
  }
  std::shared_ptr<gpu::Matmul> inner_;
};

template <Table Base>
std::unique_ptr<gpu::Matmul> queued_matmul(const gpu::MatmulOptions& options, gpu::LaunchCheck& check) {
  return std::make_unique<QueuedMatmul>(Base().matmul(options, check));
}

template <Table Base>
gpu::Kernels make_table() {
  using K = gpu::Kernels;
  K table{};
  table.name = "queued";
  set_all<Base, &K::embed_forward, &K::embed_weight, &K::positions_forward, &K::positions_weight, &K::norm_forward, &K::norm_input,
          &K::norm_weight, &K::head_norm_forward, &K::head_norm_input, &K::head_norm_weight, &K::latent_heads, &K::linear_forward,
          &K::linear_input, &K::linear_weight, &K::rope, &K::attention_forward, &K::attention_input, &K::split_heads,
          &K::attention_block_forward, &K::attention_block_input, &K::attention_merge_forward, &K::attention_merge_input,
          &K::regroup, &K::activation_forward, &K::activation_input, &K::route_forward, &K::route_input, &K::expert_load,
          &K::update_router_bias, &K::fit_rows, &K::dispatch, &K::combine_forward, &K::combine_input, &K::gate_forward,
          &K::gate_input, &K::grouped_linear, &K::grouped_linear_weight, &K::grouped_activation, &K::residual_forward,
          &K::bias_weight, &K::dropout, &K::add, &K::fill, &K::cast, &K::cross_entropy_fused, &K::cross_entropy_loss_only,
          &K::cross_entropy_max, &K::cross_entropy_sum, &K::cross_entropy_grad, &K::sum_scalars, &K::squared_norm, &K::combine,
          &K::sgd, &K::adamw, &K::lion, &K::adamw8bit, &K::numbers, &K::amax, &K::multiply, &K::subtract, &K::quantise,
          &K::dequantise, &K::dequantise_sum, &K::sum_rows, &K::swap_leading, &K::select, &K::scatter, &K::zero_selected,
          &K::orthogonalise, &K::start_basis, &K::fold_momentum, &K::frozen_adam, &K::outer_step>(table);
  table.matmul = &queued_matmul<Base>;
  return table;
}

}  // namespace

const gpu::Kernels& queued_kernels(Behind behind) {
  static const gpu::Kernels host = make_table<&host_kernels>(), emulated = make_table<&gpu::emulated_kernels>();
  return behind == Behind::kHost ? host : emulated;
}

}  // namespace shardlab::testing
