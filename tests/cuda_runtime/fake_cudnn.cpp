#include "tests/cuda_runtime/fake_cudnn.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "kernels/cuda/cudnn_names.h"
#include "kernels/cuda/number.h"
#include "tests/cuda_runtime/fake_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

using namespace gpu::cudnn;
using gpu::CudnnDescriptor;
using gpu::CudnnStatus;

namespace {

constexpr CudnnStatus kBadParameter = 2000, kNotFinalized = 2004;
using Index = std::array<int64_t, 4>;

int64_t element_bytes(int form) {
  switch (static_cast<Form>(form)) {
    case Form::kBool: return 1;
    case Form::kDataType:
    case Form::kHeuristicMode:
    case Form::kPointwiseMode:
    case Form::kReduction: return 4;
    default: return 8;
  }
}

/// Attributes without which a descriptor of a kind is not finished.
std::vector<Name> required(Kind kind) {
  switch (kind) {
    case Kind::kTensor:
      return {Name::kTensorType, Name::kTensorExtents, Name::kTensorStrides, Name::kTensorId, Name::kTensorAlignment};
    case Kind::kMatmul: return {Name::kMatmulPrecision};
    case Kind::kReduction: return {Name::kReductionPrecision, Name::kReductionOperator};
    case Kind::kPointwise: return {Name::kPointwiseMode, Name::kPointwisePrecision};
    case Kind::kMatmulOp: return {Name::kMatmulA, Name::kMatmulB, Name::kMatmulC, Name::kMatmulDescriptor};
    case Kind::kReductionOp: return {Name::kReductionX, Name::kReductionY, Name::kReductionDescriptor};
    case Kind::kReshapeOp: return {Name::kReshapeX, Name::kReshapeY};
    case Kind::kPointwiseOp: return {Name::kPointwiseX, Name::kPointwiseY, Name::kPointwiseDescriptor};
    case Kind::kOperationGraph: return {Name::kGraphHandle, Name::kGraphOps};
    case Kind::kHeuristic: return {Name::kHeuristicGraph, Name::kHeuristicMode};
    case Kind::kExecutionPlan: return {Name::kPlanHandle, Name::kPlanEngineConfig};
    case Kind::kVariantPack: return {Name::kPackIds, Name::kPackPointers, Name::kPackWorkspace};
    default: return {};
  }
}

void for_each(const Index& extents, const std::function<void(const Index&)>& f) {
  Index i{};
  for (i[0] = 0; i[0] < extents[0]; ++i[0])
    for (i[1] = 0; i[1] < extents[1]; ++i[1])
      for (i[2] = 0; i[2] < extents[2]; ++i[2])
        for (i[3] = 0; i[3] < extents[3]; ++i[3]) f(i);
}

int64_t offset(const Index& i, const Index& strides) {
  return i[0] * strides[0] + i[1] * strides[1] + i[2] * strides[2] + i[3] * strides[3];
}

double rounded(double x, DataType type) {
  if (type == DataType::kF32) return static_cast<float>(x);
  if (type == DataType::kBF16) return gpu::emulated::value_of(gpu::emulated::rounded<gpu::emulated::bf16>(static_cast<float>(x)));
  if (type == DataType::kF16) return gpu::emulated::value_of(gpu::emulated::rounded<gpu::emulated::f16>(static_cast<float>(x)));
  return x;
}

}  // namespace

std::string FakeCudnn::describe(CudnnStatus status) { return fmt::format("status {}", status); }

CudnnStatus FakeCudnn::create(gpu::CudnnHandle* handle) {
  const std::lock_guard lock(mutex_);
  if (create_status != 0) return create_status;
  if (when_made) when_made();
  auto made = std::make_unique<int>(0);
  *handle = made.get();
  handles_[*handle] = {std::move(made), nullptr};
  return 0;
}
CudnnStatus FakeCudnn::destroy(gpu::CudnnHandle handle) {
  const std::lock_guard lock(mutex_);
  return handles_.erase(handle) == 1 ? 0 : kBadParameter;
}
CudnnStatus FakeCudnn::set_stream(gpu::CudnnHandle handle, void* stream) {
  const std::lock_guard lock(mutex_);
  if (handles_.count(handle) == 0) return kBadParameter;
  handles_[handle].second = stream;
  return 0;
}

CudnnStatus FakeCudnn::create_descriptor(int kind, CudnnDescriptor* descriptor) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_shared<Descriptor>();
  made->kind = kind;
  made->number = ++made_;
  *descriptor = made.get();
  descriptors_[*descriptor] = std::move(made);
  return 0;
}
CudnnStatus FakeCudnn::destroy_descriptor(CudnnDescriptor descriptor) {
  const std::lock_guard lock(mutex_);
  return descriptors_.erase(descriptor) == 1 ? 0 : kBadParameter;
}

FakeCudnn::Descriptor* FakeCudnn::find(CudnnDescriptor descriptor) {
  const auto found = descriptors_.find(descriptor);
  return found == descriptors_.end() ? nullptr : found->second.get();
}

CudnnStatus FakeCudnn::set_attribute(CudnnDescriptor descriptor, int name, int type, int64_t count, const void* elements) {
  const std::lock_guard lock(mutex_);
  Descriptor* d = find(descriptor);
  if (d == nullptr || d->finished || count < 1 || elements == nullptr) return kBadParameter;
  const auto* from = static_cast<const std::byte*>(elements);
  Attribute a{type, count, {from, from + count * element_bytes(type)}};
  if (static_cast<Form>(type) == Form::kDescriptor)
    for (int64_t i = 0; i < count; ++i) {
      const Descriptor* linked = find(static_cast<const CudnnDescriptor*>(elements)[i]);
      if (linked == nullptr || !linked->finished) return kNotFinalized;
    }
  d->attributes[name] = std::move(a);
  return 0;
}

bool FakeCudnn::complete(const Descriptor& d) {
  for (const Name name : required(static_cast<Kind>(d.kind)))
    if (d.attributes.count(static_cast<int>(name)) == 0) return false;
  return true;
}

void FakeCudnn::write_down(const Descriptor& d) {
  log += fmt::format("#{} kind {}:", d.number, d.kind);
  for (const auto& [name, a] : d.attributes) {
    log += fmt::format(" {}=", name);
    for (int64_t i = 0; i < a.count; ++i) {
      const std::byte* at = a.bytes.data() + i * element_bytes(a.type);
      const char* comma = i == 0 ? "" : ",";
      int64_t whole = 0;
      std::memcpy(&whole, at, static_cast<size_t>(element_bytes(a.type)));
      if (static_cast<Form>(a.type) == Form::kDescriptor)
        log += fmt::format("{}#{}", comma, reinterpret_cast<Descriptor*>(whole)->number);
      else if (static_cast<Form>(a.type) == Form::kHandle || static_cast<Form>(a.type) == Form::kPointer)
        log += fmt::format("{}*", comma);
      else
        log += fmt::format("{}{}", comma, whole);
    }
  }
  log += "\n";
}

CudnnStatus FakeCudnn::finalize(CudnnDescriptor descriptor) {
  const std::lock_guard lock(mutex_);
  Descriptor* d = find(descriptor);
  if (d == nullptr || !complete(*d)) return kBadParameter;
  if (static_cast<Kind>(d->kind) == Kind::kOperationGraph && graph_status != 0) return graph_status;
  if (static_cast<Kind>(d->kind) == Kind::kExecutionPlan) {
    CudnnDescriptor config = nullptr;
    std::memcpy(&config, d->attributes[static_cast<int>(Name::kPlanEngineConfig)].bytes.data(), sizeof config);
    d->engine = find(config)->engine;
    if (engines[d->engine].status != 0) return engines[d->engine].status;
  }
  d->finished = true;
  if (static_cast<Kind>(d->kind) != Kind::kVariantPack) write_down(*d);
  return 0;
}

CudnnStatus FakeCudnn::get_attribute(CudnnDescriptor descriptor, int name, int, int64_t requested, int64_t* count, void* elements) {
  const std::lock_guard lock(mutex_);
  Descriptor* d = find(descriptor);
  if (d == nullptr || !d->finished) return kNotFinalized;
  if (static_cast<Name>(name) == Name::kPlanWorkspace) {
    *count = 1;
    std::memcpy(elements, &engines[d->engine].workspace, sizeof(int64_t));
    return 0;
  }
  if (static_cast<Name>(name) != Name::kHeuristicResults) return kBadParameter;
  *count = static_cast<int64_t>(engines.size());
  for (int64_t i = 0; i < std::min(requested, *count); ++i) {
    Descriptor* config = find(static_cast<CudnnDescriptor*>(elements)[i]);
    if (config == nullptr || static_cast<Kind>(config->kind) != Kind::kEngineConfig) return kBadParameter;
    config->engine = static_cast<size_t>(i);
    config->finished = true;
    // It belongs to the graph that was asked about.
    config->attributes[static_cast<int>(Name::kHeuristicGraph)] = d->attributes[static_cast<int>(Name::kHeuristicGraph)];
  }
  return 0;
}

/// A tensor's elements in logical order, while a graph runs.
struct FakeCudnn::Values {
  Index extents{}, strides{};
  DataType type{};
  std::vector<double> x;
  int64_t at(const Index& i) const { return ((i[0] * extents[1] + i[1]) * extents[2] + i[2]) * extents[3] + i[3]; }
  /// Extents of 1 serve every index; fewer heads serve as many neighbours each as it takes.
  double value(const Index& i, const Index& of) const {
    Index mine{};
    for (size_t d = 0; d < 4; ++d) mine[d] = extents[d] == 1 ? 0 : i[d] * extents[d] / of[d];
    return x[static_cast<size_t>(at(mine))];
  }
};

/// Carries a graph out.
class FakeCudnn::Run {
 public:
  Run(FakeCudnn& cudnn, const Descriptor& graph, std::map<int64_t, void*> pointers)
      : cudnn_(cudnn), pointers_(std::move(pointers)) {
    for (const CudnnDescriptor op : list<CudnnDescriptor>(graph, Name::kGraphOps)) ops_.push_back(*cudnn_.find(op));
    // The descriptors may be gone when the stream comes to it.
    for (const Descriptor& op : ops_)
      for (const auto& [name, a] : op.attributes) keep(a);
  }
  void operator()() {
    values_.clear();
    for (const Descriptor& op : ops_) run(op);
  }

 private:
  template <class T>
  static std::vector<T> list(const Descriptor& d, Name name) {
    const Attribute& a = d.attributes.at(static_cast<int>(name));
    std::vector<T> out(static_cast<size_t>(a.count));
    std::memcpy(out.data(), a.bytes.data(), a.bytes.size());
    return out;
  }
  template <class T>
  static T one(const Descriptor& d, Name name) {
    return list<T>(d, name)[0];
  }
  static bool flag(const Descriptor& d, Name name) {
    return d.attributes.count(static_cast<int>(name)) > 0 && one<uint8_t>(d, name) != 0;
  }
  static Index four(const Descriptor& d, Name name) {
    const auto l = list<int64_t>(d, name);
    return {l.at(0), l.at(1), l.at(2), l.at(3)};
  }
  void keep(const Attribute& a) {
    if (static_cast<Form>(a.type) != Form::kDescriptor) return;
    for (int64_t i = 0; i < a.count; ++i) {
      CudnnDescriptor d = nullptr;
      std::memcpy(&d, a.bytes.data() + i * 8, 8);
      kept_.emplace(d, cudnn_.descriptors_.at(d));
    }
  }

  double load(const void* base, DataType type, int64_t i) const {
    if (type == DataType::kF32) return static_cast<const float*>(base)[i];
    const auto* bits = static_cast<const uint16_t*>(base);
    if (type == DataType::kBF16) return gpu::emulated::value_of(std::bit_cast<gpu::emulated::bf16>(bits[i]));
    return gpu::emulated::value_of(std::bit_cast<gpu::emulated::f16>(bits[i]));
  }
  void store(void* base, DataType type, int64_t i, double x) const {
    const auto f = static_cast<float>(x);
    if (type == DataType::kF32)
      static_cast<float*>(base)[i] = f;
    else if (type == DataType::kBF16)
      static_cast<uint16_t*>(base)[i] = std::bit_cast<uint16_t>(gpu::emulated::rounded<gpu::emulated::bf16>(f));
    else
      static_cast<uint16_t*>(base)[i] = std::bit_cast<uint16_t>(gpu::emulated::rounded<gpu::emulated::f16>(f));
  }

  Values empty(CudnnDescriptor tensor) const {
    const Descriptor& d = *kept_.at(tensor);
    Values v{
        four(d, Name::kTensorExtents), four(d, Name::kTensorStrides), static_cast<DataType>(one<int>(d, Name::kTensorType)), {}};
    v.x.resize(static_cast<size_t>(v.extents[0] * v.extents[1] * v.extents[2] * v.extents[3]));
    return v;
  }
  void* pointer(CudnnDescriptor tensor) const {
    const Descriptor& d = *kept_.at(tensor);
    return flag(d, Name::kTensorVirtual) ? nullptr : pointers_.at(one<int64_t>(d, Name::kTensorId));
  }
  const Values& input(const Descriptor& op, Name name) {
    const auto tensor = one<CudnnDescriptor>(op, name);
    if (const auto known = values_.find(tensor); known != values_.end()) return known->second;
    Values v = empty(tensor);
    const void* base = pointer(tensor);
    if (base == nullptr) throw std::runtime_error("a virtual tensor that no operation made");
    for_each(v.extents, [&](const Index& i) { v.x[static_cast<size_t>(v.at(i))] = load(base, v.type, offset(i, v.strides)); });
    return values_.emplace(tensor, std::move(v)).first->second;
  }
  void output(const Descriptor& op, Name name, const std::function<double(const Index&, const Values&)>& f) {
    const auto tensor = one<CudnnDescriptor>(op, name);
    Values v = empty(tensor);
    void* base = pointer(tensor);
    for_each(v.extents, [&](const Index& i) {
      const double x = rounded(f(i, v), v.type);
      v.x[static_cast<size_t>(v.at(i))] = x;
      if (base != nullptr) store(base, v.type, offset(i, v.strides), x);
    });
    values_.insert_or_assign(tensor, std::move(v));
  }

  void run(const Descriptor& op) {
    switch (static_cast<Kind>(op.kind)) {
      case Kind::kMatmulOp: return product(op);
      case Kind::kReductionOp: return reduction(op);
      case Kind::kReshapeOp: return reshape(op);
      default: return pointwise(op);
    }
  }
  void product(const Descriptor& op) {
    const Values &a = input(op, Name::kMatmulA), &b = input(op, Name::kMatmulB);
    output(op, Name::kMatmulC, [&](const Index& i, const Values& c) {
      double sum = 0;
      const int64_t head = i[1] * b.extents[1] / c.extents[1];
      for (int64_t k = 0; k < a.extents[3]; ++k)
        sum += a.x[static_cast<size_t>(a.at({i[0], i[1], i[2], k}))] * b.x[static_cast<size_t>(b.at({i[0], head, k, i[3]}))];
      return sum;
    });
  }
  void reduction(const Descriptor& op) {
    const Values& x = input(op, Name::kReductionX);
    const bool most = one<int>(*kept_.at(one<CudnnDescriptor>(op, Name::kReductionDescriptor)), Name::kReductionOperator) ==
                      static_cast<int>(Reduce::kMax);
    output(op, Name::kReductionY, [&](const Index& i, const Values& y) {
      Index span{}, j{};
      for (size_t d = 0; d < 4; ++d) span[d] = x.extents[d] / y.extents[d];
      double result = most ? -INFINITY : 0;
      for_each(span, [&](const Index& k) {
        for (size_t d = 0; d < 4; ++d) j[d] = i[d] * span[d] + k[d];
        const double v = x.x[static_cast<size_t>(x.at(j))];
        result = most ? std::max(result, v) : result + v;
      });
      return result;
    });
  }
  /// The same memory seen with other strides.
  void reshape(const Descriptor& op) {
    const Values& x = input(op, Name::kReshapeX);
    std::map<int64_t, double> memory;
    for_each(x.extents, [&](const Index& i) { memory[offset(i, x.strides)] = x.x[static_cast<size_t>(x.at(i))]; });
    output(op, Name::kReshapeY, [&](const Index& i, const Values& y) { return memory.at(offset(i, y.strides)); });
  }
  void pointwise(const Descriptor& op) {
    const Descriptor& how = *kept_.at(one<CudnnDescriptor>(op, Name::kPointwiseDescriptor));
    const auto mode = static_cast<Pointwise>(one<int>(how, Name::kPointwiseMode));
    const Values& x = input(op, Name::kPointwiseX);
    const auto optional = [&](Name name) { return op.attributes.count(static_cast<int>(name)) > 0 ? &input(op, name) : nullptr; };
    const Values *b = optional(Name::kPointwiseB), *t = optional(Name::kPointwiseT);
    output(op, Name::kPointwiseY, [&](const Index& i, const Values& y) {
      const double u = x.value(i, y.extents), v = b != nullptr ? b->value(i, y.extents) : 0;
      switch (mode) {
        case Pointwise::kAdd: return u + v;
        case Pointwise::kMul: return u * v;
        case Pointwise::kDiv: return u / v;
        case Pointwise::kSub: return u - v;
        case Pointwise::kExp: return std::exp(u);
        case Pointwise::kLog: return std::log(u);
        case Pointwise::kIdentity: return u;
        case Pointwise::kGreaterOrEqual: return u >= v ? 1.0 : 0.0;
        case Pointwise::kIndex: return static_cast<double>(i[static_cast<size_t>(one<int64_t>(how, Name::kPointwiseAxis))]);
        case Pointwise::kSelect: return t->value(i, y.extents) != 0 ? u : v;
      }
      return 0.0;
    });
  }

  FakeCudnn& cudnn_;
  std::map<int64_t, void*> pointers_;
  std::vector<Descriptor> ops_;
  std::map<CudnnDescriptor, std::shared_ptr<Descriptor>> kept_;
  std::map<CudnnDescriptor, Values> values_;
};

CudnnStatus FakeCudnn::execute(gpu::CudnnHandle handle, CudnnDescriptor plan, CudnnDescriptor pack) {
  const std::lock_guard lock(mutex_);
  if (execute_status != 0) return execute_status;
  Descriptor *p = find(plan), *given = find(pack);
  if (handles_.count(handle) == 0 || p == nullptr || given == nullptr || !p->finished || !given->finished) return kBadParameter;
  const auto linked = [&](const Descriptor& d, Name name) {
    CudnnDescriptor to = nullptr;
    std::memcpy(&to, d.attributes.at(static_cast<int>(name)).bytes.data(), sizeof to);
    return find(to);
  };
  const Descriptor* graph = linked(*linked(*p, Name::kPlanEngineConfig), Name::kHeuristicGraph);
  const Attribute &ids = given->attributes.at(static_cast<int>(Name::kPackIds)),
                  &pointers = given->attributes.at(static_cast<int>(Name::kPackPointers));
  std::map<int64_t, void*> by_id;
  for (int64_t i = 0; i < ids.count; ++i) {
    int64_t id = 0;
    void* at = nullptr;
    std::memcpy(&id, ids.bytes.data() + i * 8, 8);
    std::memcpy(&at, pointers.bytes.data() + i * 8, 8);
    by_id[id] = at;
  }
  ++executed;
  auto run = std::make_shared<Run>(*this, *graph, std::move(by_id));
  void* stream = handles_[handle].second;
  if (stream == nullptr)
    (*run)();
  else
    static_cast<FakeStream*>(stream)->push([run] { (*run)(); });
  return 0;
}

}  // namespace shardlab::testing
