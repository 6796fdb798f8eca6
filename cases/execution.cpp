#include "cases/execution.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "cases/namespaces.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "plan/base/world_error.h"
#include "profiler/gpu/nvml.h"
#include "profiler/gpu/recorder.h"
#include "profiler/gpu/usage.h"
#include "profiler/process.h"
#include "profiler/recorder.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/nccl_transport.h"
#include "runtime/cuda/one_gpu_transport.h"
#include "runtime/gloo_transport.h"
#include "runtime/mpi_transport.h"
#include "runtime/process_transport.h"
#include "runtime/tcp_transport.h"
#include "runtime/thread_transport.h"

namespace shardlab::cases {
namespace {

/// Ranks on the processor: as threads of this process, or of several.
class HostExecution final : public Execution {
 public:
  static Result<std::unique_ptr<Execution>> create(const PlacedPlan& placed, const ExecutionOptions& options) {
    std::unique_ptr<HostExecution> made(new HostExecution(placed, options));
    SHARDLAB_TRY(made->make_transport(placed));
    return std::unique_ptr<Execution>(std::move(made));
  }

  void attach(RunOptions& options) override {
    options.control = options_.control;
    if (options_.events_per_stream > 0) options.recorder = &recorder_;
  }
  Transport& transport() override { return *transport_; }
  BackendFactory backends() override {
    if (options_.backend == BackendKind::kDry) return dry_backend();
    return cpu_backend(kernels_, {options_.canonical, options_.threads_per_rank});
  }
  void set_recording(bool on) override {
    recorder_.set_on(on);
    if (on) energy_.restart();
  }
  Trace take() override;
  std::optional<double> joules() override { return energy_.joules(); }
  MemoryReading memory() const override;
  MemoryReading memory_before() const override { return before_; }
  std::vector<MemoryItem> unplanned(int64_t) const override { return {}; }
  bool memory_is_host() const override { return true; }
  std::string description() const override;

 private:
  HostExecution(const PlacedPlan& placed, const ExecutionOptions& options)
      : options_(options),
        kernels_(kernels::kernels_for_this_processor()),
        recorder_(placed.plan->mesh.world_size(), placed.plan->streams, options.events_per_stream) {
    recorder_.set_on(false);
    before_ = memory();
  }
  Result<void> make_transport(const PlacedPlan& placed);

  const ExecutionOptions options_;
  const kernels::Kernels& kernels_;
  std::unique_ptr<Transport> transport_;
  CpuRecorder recorder_;
  EnergyMeter energy_;
  MemoryReading before_;
};

/// MPI and Gloo of this process, started by its first transport.
Result<std::unique_ptr<Transport>> mpi_transport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control,
                                                 double timeout_s) {
  auto mpi = open_mpi(mpi_files());
  if (!mpi.ok()) return mpi.error();
  auto& world = control.kept<MpiWorld>([&] { return new MpiWorld(std::move(*mpi), control, timeout_s); });
  return std::unique_ptr<Transport>(std::make_unique<MpiTransport>(kernels, placed, control, world));
}
Result<std::unique_ptr<Transport>> gloo_transport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control,
                                                  double timeout_s) {
  const auto library = GlooLibrary::open(gloo_file());
  if (!library.ok()) return library.error();
  auto& world = control.kept<GlooWorld>([&] { return new GlooWorld(*library, control, timeout_s); });
  return std::unique_ptr<Transport>(std::make_unique<GlooTransport>(kernels, placed, control, world));
}

Result<void> HostExecution::make_transport(const PlacedPlan& placed) {
  if (options_.control == nullptr) {
    transport_ = std::make_unique<ThreadTransport>(kernels_);
    return {};
  }
  if (const auto ranks = local_ranks(placed.plan->mesh.world_size(), options_.control); !ranks.ok()) return ranks.error();
  if (options_.transport == TransportKind::kTcp) {
    transport_ = std::make_unique<TcpTransport>(kernels_, placed, *options_.control, options_.timeout_s);
    return {};
  }
  const auto take = [this](auto made) -> Result<void> {
    if (!made.ok()) return made.error();
    transport_ = std::move(*made);
    return {};
  };
  if (options_.transport == TransportKind::kMpi)
    return take(mpi_transport(kernels_, placed, *options_.control, options_.timeout_s));
  if (options_.transport == TransportKind::kGloo)
    return take(gloo_transport(kernels_, placed, *options_.control, options_.timeout_s));
  return take(ProcessTransport::create(kernels_, placed, *options_.control, options_.backend != BackendKind::kDry,
                                       dynamic_cast<const ProcessTransport*>(options_.beside)));
}

/// Of several processes: the events of all, which have the ranks in order.
Trace HostExecution::take() {
  Trace trace = recorder_.take();
  if (options_.control == nullptr) return trace;
  static_assert(std::is_trivially_copyable_v<TraceEvent>);
  std::string own;
  put(own, trace.dropped);
  for (const TraceEvent& event : trace.events) put(own, event);
  trace.events.clear();
  trace.dropped = 0;
  for (const std::string& said : options_.control->gather(own)) {
    Taking from(said);
    trace.dropped += from.take<int64_t>();
    while (!from.done()) trace.events.push_back(from.take<TraceEvent>());
  }
  return trace;
}

/// Of several processes the sum, in which what they share counts once; the system keeps no highest mark of that.
MemoryReading HostExecution::memory() const {
  if (options_.control == nullptr) {
    const ResidentMemory r = resident_memory();
    return {r.now_bytes, r.peak_bytes};
  }
  std::string own;
  put(own, proportional_memory());
  int64_t sum = 0;
  for (const std::string& said : options_.control->gather(own)) sum += Taking(said).take<int64_t>();
  return {sum, sum};
}

std::string HostExecution::description() const {
  const std::string text = kernels::description(kernels_);
  if (options_.control == nullptr) return text;
  return fmt::format("{}; {} processes", text, options_.control->processes());
}

/// Ranks as threads that issue work to one GPU, or to one each.
class GpuExecution final : public Execution {
 public:
  static Result<std::unique_ptr<Execution>> create(const PlacedPlan& placed, const ExecutionOptions& options);
  ~GpuExecution() override = default;

  void attach(RunOptions& options) override {
    options.recorder = recorder_.get();
    options.tracer = recorder_.get();
  }
  Transport& transport() override { return *transport_; }
  BackendFactory backends() override { return cuda::cuda_backend(*node_, cuda_options_); }
  void set_recording(bool on) override;
  Trace take() override { return recorder_->take(*placed_.plan, placed_.programs); }
  std::optional<double> joules() override;
  MemoryReading memory() const override;
  MemoryReading memory_before() const override { return {}; }
  std::vector<MemoryItem> unplanned(int64_t planned) const override;
  bool memory_is_host() const override { return false; }
  std::string description() const override;

 private:
  GpuExecution(const PlacedPlan& placed, const ExecutionOptions& options) : placed_(placed), options_(options) {}
  Result<void> build(const cuda::Presence& presence);
  cuda::MemoryAccount::Meter meter() const;
  Result<void> open_cudnn();
  Result<void> make_transport();

  const PlacedPlan& placed_;
  const ExecutionOptions options_;
  SteadyClock clock_;
  std::unique_ptr<cuda::Api> api_;
  std::unique_ptr<cuda::NcclApi> nccl_;
  std::unique_ptr<gpu::CudnnApi> cudnn_;
  cuda::CudaOptions cuda_options_;
  std::set<std::string> chosen_;  ///< whose kernels, as the back ends told
  std::set<int> devices_;
  LibraryStatus nvml_status_;
  std::unique_ptr<Nvml> nvml_;
  std::unique_ptr<GpuRecorder> recorder_;
  std::unique_ptr<cuda::MemoryAccount> memory_;  ///< since before the contexts
  std::unique_ptr<cuda::Node> node_;
  std::unique_ptr<Transport> transport_;
  std::vector<std::unique_ptr<UsageSampler>> usage_;
  std::vector<std::string> warnings_;
};

Result<std::unique_ptr<Execution>> GpuExecution::create(const PlacedPlan& placed, const ExecutionOptions& options) {
  std::unique_ptr<GpuExecution> made(new GpuExecution(placed, options));
  auto api = cuda::real_api();
  if (!api.ok()) return api.error();
  made->api_ = std::move(*api);
  const cuda::Presence presence = cuda::presence(*made->api_);
  if (!presence.usable()) return Error{ExitCode::kEnvironment, presence.reason, presence.remedy, ""};
  SHARDLAB_TRY(made->build(presence));
  return std::unique_ptr<Execution>(std::move(made));
}

Result<void> GpuExecution::build(const cuda::Presence& presence) {
  const int ranks = placed_.plan->mesh.world_size();
  const auto devices = cuda::devices_for(options_.transport, ranks, presence);
  if (!devices.ok()) return devices.error();
  devices_.insert(devices->begin(), devices->end());
  // The recorder comes first: CUPTI should be there before CUDA is used.
  recorder_ = GpuRecorder::create(ranks, {.clock = &clock_});
  nvml_ = Nvml::open(nvml_status_);
  memory_ = std::make_unique<cuda::MemoryAccount>(*api_, devices_, meter());
  node_ = std::make_unique<cuda::Node>(*api_, *cuda::built_kernels(), *devices, memory_.get());
  SHARDLAB_TRY(open_cudnn());
  return make_transport();
}

/// NVML's, of devices by CUDA's number.
cuda::MemoryAccount::Meter GpuExecution::meter() const {
  if (nvml_ == nullptr) return nullptr;
  auto found = std::make_shared<std::map<int, NvmlDevice>>();
  for (const int device : devices_) {
    std::string bus;
    if (api_->pci_bus_id(device, &bus) != cuda::kSuccess) return nullptr;
    if (const auto known = nvml_->device(bus); known.ok()) found->emplace(device, *known);
  }
  return [found](int device) -> std::optional<int64_t> {
    const auto known = found->find(device);
    return known == found->end() ? std::nullopt : known->second.used_bytes();
  };
}

/// What the case's attention asks for. Without cuDNN `auto` goes on with own kernels, and the results say so.
Result<void> GpuExecution::open_cudnn() {
  cuda_options_ = {.canonical = options_.canonical, .tf32 = options_.tf32, .notes = &chosen_};
  if (options_.attention == AttentionBy::kOwn || options_.canonical) return {};
  cuda_options_.attention = options_.attention;
  auto cudnn = gpu::real_cudnn();
  if (!cudnn.ok() && options_.attention == AttentionBy::kCudnn) return cudnn.error();
  if (!cudnn.ok()) {
    cuda_options_.no_cudnn = cudnn.error().message;
    return {};
  }
  cudnn_ = std::move(*cudnn);
  cuda_options_.cudnn = cudnn_.get();
  return {};
}

Result<void> GpuExecution::make_transport() {
  if (options_.transport == TransportKind::kOneGpu) {
    transport_ = std::make_unique<cuda::OneGpuTransport>(*node_);
    return {};
  }
  auto nccl = cuda::real_nccl();
  if (!nccl.ok()) return nccl.error();
  nccl_ = std::move(*nccl);
  auto transport = cuda::NcclTransport::create(*nccl_, placed_, node_.get());
  if (!transport.ok()) return transport.error();
  transport_ = std::move(*transport);
  return {};
}

void GpuExecution::set_recording(bool on) {
  // Recording begins after the warm-up, in which CUDA loaded what the kernels need.
  if (on) memory_->book(cuda::MemoryUse::kKernels);
  recorder_->set_on(on);
  if (on) memory_->book(cuda::MemoryUse::kRecorder);
  usage_.clear();
  if (!on || nvml_ == nullptr) return;
  for (const int device : devices_) {
    std::string bus;
    if (api_->pci_bus_id(device, &bus) != cuda::kSuccess) continue;
    if (const auto found = nvml_->device(bus); found.ok()) usage_.push_back(std::make_unique<UsageSampler>(*found, clock_));
  }
}

std::optional<double> GpuExecution::joules() {
  std::optional<double> sum;
  for (const auto& sampler : usage_) {
    const DeviceUsage usage = sampler->stop();
    for (const std::string& warning : usage.warnings()) warnings_.push_back(warning);
    if (usage.energy_j) sum = sum.value_or(0) + *usage.energy_j;
  }
  usage_.clear();
  return sum;
}

MemoryReading GpuExecution::memory() const {
  memory_->book(cuda::MemoryUse::kRest);
  const int64_t taken = memory_->taken();
  return {taken, taken};  // what is taken is kept: arenas and scratch are taken once, before the first step
}

std::vector<MemoryItem> GpuExecution::unplanned(int64_t planned) const {
  std::vector<MemoryItem> items;
  for (const auto& [use, bytes] : memory_->unplanned(planned)) items.push_back({std::string(name_of(use)), bytes});
  return items;
}

std::string GpuExecution::description() const {
  cuda::Properties device;
  api_->properties(*devices_.begin(), &device);
  const cuda::Presence presence = cuda::presence(*api_);
  std::string text = fmt::format("{}{}, compute capability {}.{}, CUDA {} (driver {})",
                                 devices_.size() > 1 ? fmt::format("{} x ", devices_.size()) : "", device.name, device.major,
                                 device.minor, cuda::version_text(presence.runtime), cuda::version_text(presence.driver));
  if (options_.transport == TransportKind::kOneGpu && placed_.plan->mesh.world_size() > 1)
    text += fmt::format("; {} ranks share it: times of communication are those of its memory", placed_.plan->mesh.world_size());
  text += recorder_->source() == DeviceTimeSource::kCupti ? "; times by CUPTI"
                                                          : fmt::format("; times by CUDA events ({})", recorder_->status().message);
  if (!memory_->knows_context())
    text +=
        fmt::format("; memory of the context is not known ({})", nvml_ == nullptr ? nvml_status_.message : "NVML does not tell");
  for (const std::string& choice : chosen_) text += "; " + choice;
  for (const std::string& warning : warnings_) text += "; " + warning;
  return text;
}

}  // namespace

std::string gloo_file() {
  if (const char* named = std::getenv("SHARDLAB_GLOO"); named != nullptr) return named;
  std::error_code none;
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", none).parent_path();
  const std::filesystem::path installed = folder.parent_path() / "libexec/shardlab" / kGlooFile;
  return (is_there(installed) ? installed : folder / kGlooFile).string();
}

std::vector<std::string> mpi_files() {
  if (const char* named = std::getenv("SHARDLAB_MPI"); named != nullptr) return {named};
  std::vector<std::string> files = open_mpi_files(), others = mpich_files();
  // MPICH's launcher speaks PMI; Open MPI's, and Slurm for it, PMIx.
  if (std::getenv("PMI_RANK") != nullptr && std::getenv("PMIX_RANK") == nullptr) std::swap(files, others);
  files.insert(files.end(), others.begin(), others.end());
  return files;
}

Result<void> check_backend(BackendKind backend) {
  if (backend != BackendKind::kCuda) return {};
  const cuda::Presence presence = cuda::presence();
  if (presence.usable()) return {};
  return Error{ExitCode::kEnvironment, fmt::format("backend cuda cannot be used here: {}", presence.reason), presence.remedy, ""};
}

Result<std::unique_ptr<Execution>> Execution::create(const PlacedPlan& placed, const ExecutionOptions& options) {
  if (options.backend == BackendKind::kCuda) return GpuExecution::create(placed, options);
  return HostExecution::create(placed, options);
}

}  // namespace shardlab::cases
