#include "tests/cuda_runtime/fake_cublaslt.h"

#include <fmt/format.h>

#include <cstring>

#include "kernels/cuda/number.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

using namespace gpu::cublaslt;
using gpu::CublasLtCall;
using gpu::CublasLtDescriptor;
using gpu::CublasStatus;

namespace {

namespace host = gpu::emulated;

const char* name_of(DataType t) { return t == DataType::kF32 ? "f32" : t == DataType::kBF16 ? "bf16" : "f16"; }

double load(const void* base, DataType t, int64_t i) {
  if (t == DataType::kF32) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  return t == DataType::kBF16 ? host::value_of(host::bf16{bits}) : host::value_of(host::f16{bits});
}

void store(void* base, DataType t, int64_t i, float x) {
  if (t == DataType::kF32)
    static_cast<float*>(base)[i] = x;
  else
    static_cast<uint16_t*>(base)[i] = t == DataType::kBF16 ? host::rounded<host::bf16>(x).bits : host::rounded<host::f16>(x).bits;
}

/// To the ten bits of mantissa that the tensor cores keep of an fp32 factor.
double as_tf32(double x) {
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  bits = (bits + 0x1000) & ~uint32_t{0x1fff};
  float rounded;
  std::memcpy(&rounded, &bits, 4);
  return rounded;
}

uint64_t alignment_of(const void* p) {
  const uint64_t address = reinterpret_cast<uintptr_t>(p);
  return address & (~address + 1);
}

}  // namespace

std::string FakeCublasLt::Product::text() const {
  return fmt::format("{}x{}x{} {}{} {} {}{}{}{}", m, n, k, turned_a ? 'T' : 'N', turned_b ? 'T' : 'N', name_of(factors),
                     name_of(result), bias ? " +bias" : "", accumulate ? " +old" : "", tf32 ? " tf32" : "");
}

std::string FakeCublasLt::describe(CublasStatus status) {
  switch (status) {
    case kInvalidValue: return "CUBLAS_STATUS_INVALID_VALUE";
    case kNotSupported: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case kExecutionFailed: return "CUBLAS_STATUS_EXECUTION_FAILED";
    default: return "CUBLAS_STATUS " + std::to_string(status);
  }
}

CublasStatus FakeCublasLt::fault(std::string what) {
  faults.push_back(std::move(what));
  return kInvalidValue;
}

uint64_t FakeCublasLt::Descriptor::attribute(int name, uint64_t otherwise) const {
  const auto found = attributes.find(name);
  return found == attributes.end() ? otherwise : found->second;
}

CublasStatus FakeCublasLt::create(gpu::CublasLtHandle* handle) {
  const std::lock_guard lock(mutex_);
  if (create_status != 0) return create_status;
  auto made = std::make_unique<int>(0);
  *handle = made.get();
  handles_[*handle] = std::move(made);
  return 0;
}

CublasStatus FakeCublasLt::destroy(gpu::CublasLtHandle handle) {
  const std::lock_guard lock(mutex_);
  return handles_.erase(handle) == 1 ? 0 : fault("destroys a handle that it has not");
}

CublasStatus FakeCublasLt::add(CublasLtDescriptor* descriptor, Descriptor made) {
  const std::lock_guard lock(mutex_);
  auto kept = std::make_unique<Descriptor>(std::move(made));
  *descriptor = kept.get();
  descriptors_[*descriptor] = std::move(kept);
  return 0;
}

CublasStatus FakeCublasLt::forget(CublasLtDescriptor descriptor, Kind kind) {
  const std::lock_guard lock(mutex_);
  if (find(descriptor, kind) == nullptr) return fault("destroys a descriptor that it has not");
  descriptors_.erase(descriptor);
  return 0;
}

FakeCublasLt::Descriptor* FakeCublasLt::find(CublasLtDescriptor descriptor, Kind kind) {
  const auto found = descriptors_.find(descriptor);
  return found == descriptors_.end() || found->second->kind != kind ? nullptr : found->second.get();
}

CublasStatus FakeCublasLt::create_product(CublasLtDescriptor* product, Compute compute) {
  if (compute != Compute::kF32 && compute != Compute::kTf32) return fault("a product computes in fp32 or tf32");
  return add(product, {.kind = Kind::kProduct, .compute = compute});
}

CublasStatus FakeCublasLt::create_layout(CublasLtDescriptor* layout, DataType type, int64_t rows, int64_t columns,
                                         int64_t leading) {
  if (type != DataType::kF32 && type != DataType::kBF16 && type != DataType::kF16) return fault("a layout has an unknown type");
  if (rows < 1 || columns < 1 || leading < rows) return fault(fmt::format("a layout of {}x{}, {} apart", rows, columns, leading));
  return add(layout, {.kind = Kind::kLayout, .type = type, .rows = rows, .columns = columns, .leading = leading});
}

CublasStatus FakeCublasLt::create_preference(CublasLtDescriptor* preference) {
  return add(preference, {.kind = Kind::kPreference});
}

CublasStatus FakeCublasLt::keep(CublasLtDescriptor descriptor, Kind kind, int name, size_t size, const void* value, size_t bytes) {
  const std::lock_guard lock(mutex_);
  Descriptor* d = find(descriptor, kind);
  if (d == nullptr || bytes != size) return fault(fmt::format("attribute {} of {} bytes is given {}", name, size, bytes));
  uint64_t number = 0;
  std::memcpy(&number, value, bytes);
  d->attributes[name] = number;
  return 0;
}

CublasStatus FakeCublasLt::set(CublasLtDescriptor product, ProductName name, const void* value, size_t bytes) {
  return keep(product, Kind::kProduct, static_cast<int>(name), name == ProductName::kBias ? sizeof(void*) : 4, value, bytes);
}

CublasStatus FakeCublasLt::set(CublasLtDescriptor preference, PreferenceName name, const void* value, size_t bytes) {
  return keep(preference, Kind::kPreference, static_cast<int>(name), name == PreferenceName::kMostWorkspace ? 8 : 4, value, bytes);
}

CublasStatus FakeCublasLt::check(const CublasLtCall& call, Checked* out) {
  const Descriptor* product = find(call.product, Kind::kProduct);
  const Descriptor *a = find(call.a.layout, Kind::kLayout), *b = find(call.b.layout, Kind::kLayout),
                   *d = find(call.d, Kind::kLayout);
  if (product == nullptr || a == nullptr || b == nullptr || d == nullptr) return fault("a descriptor of a product is missing");
  const auto attribute = [&](ProductName name, auto otherwise) {
    return product->attribute(static_cast<int>(name), static_cast<uint64_t>(otherwise));
  };
  Product p{.m = d->rows, .n = d->columns, .tf32 = product->compute == Compute::kTf32, .factors = a->type, .result = d->type};
  p.turned_a = attribute(ProductName::kTurnA, Turn::kNone) == static_cast<uint64_t>(Turn::kTransposed);
  p.turned_b = attribute(ProductName::kTurnB, Turn::kNone) == static_cast<uint64_t>(Turn::kTransposed);
  p.bias = attribute(ProductName::kEpilogue, Epilogue::kNone) == static_cast<uint64_t>(Epilogue::kBias);
  p.accumulate = call.beta != 0;
  p.k = p.turned_a ? a->rows : a->columns;
  if ((p.turned_a ? a->columns : a->rows) != p.m || (p.turned_b ? b->rows : b->columns) != p.n ||
      (p.turned_b ? b->columns : b->rows) != p.k)
    return fault(fmt::format("{}x{} and {}x{} make no {}x{}", a->rows, a->columns, b->rows, b->columns, p.m, p.n));
  // The combinations of the library's table for fp32 sums: factors of one type, the result of it or of fp32.
  if (b->type != a->type || (d->type != a->type && d->type != DataType::kF32)) return fault("the types make no product");
  if (p.tf32 && a->type != DataType::kF32) return fault("tf32 is for fp32 factors");
  const void* bias = reinterpret_cast<const void*>(attribute(ProductName::kBias, 0));
  if (p.bias && attribute(ProductName::kBiasType, 99) != static_cast<uint64_t>(d->type)) return fault("a bias is of D's type");
  if (p.bias && bias == nullptr) return fault("a bias is nowhere");
  *out = {p, *a, *b, *d, bias};
  return 0;
}

CublasStatus FakeCublasLt::propose(gpu::CublasLtHandle handle, const CublasLtCall& call, CublasLtDescriptor preference,
                                   int requested, gpu::CublasLtProposal* proposals, int* found) {
  const std::lock_guard lock(mutex_);
  ++proposed;
  const Descriptor* wanted = find(preference, Kind::kPreference);
  if (handles_.count(handle) == 0 || wanted == nullptr || requested < 1)
    return fault("a proposal is asked for without all it takes");
  Checked c;
  if (const CublasStatus status = check(call, &c); status != 0) return status;
  const auto preferred = [&](PreferenceName name, uint64_t otherwise) {
    return wanted->attribute(static_cast<int>(name), otherwise);
  };
  *found = 0;
  for (size_t i = 0; i < algorithms.size() && *found < requested; ++i) {
    const Algorithm& a = algorithms[i];
    if (!beyond_workspace && static_cast<uint64_t>(a.workspace) > preferred(PreferenceName::kMostWorkspace, 0)) continue;
    bool fits = true;
    for (const PreferenceName name :
         {PreferenceName::kAlignmentA, PreferenceName::kAlignmentB, PreferenceName::kAlignmentC, PreferenceName::kAlignmentD})
      fits = fits && preferred(name, 256) >= static_cast<uint64_t>(a.alignment);
    if (!fits) continue;
    gpu::CublasLtProposal& p = proposals[(*found)++];
    p.algorithm.words[0] = proposals_.size();
    p.workspace = static_cast<uint64_t>(a.workspace);
    p.status = a.status;
    proposals_.push_back({c.product, i, wanted->attributes});
  }
  return *found == 0 ? kNotSupported : 0;
}

CublasStatus FakeCublasLt::multiply(gpu::CublasLtHandle handle, const CublasLtCall& call, void* stream) {
  const std::lock_guard lock(mutex_);
  if (multiply_status != 0) return multiply_status;
  if (handles_.count(handle) == 0) return fault("a product has no handle");
  Checked c;
  if (const CublasStatus status = check(call, &c); status != 0) return status;
  if (call.algorithm.words[0] >= proposals_.size()) return fault("an algorithm was never proposed");
  const Proposed& proposed = proposals_[call.algorithm.words[0]];
  Product asked = proposed.product;
  asked.accumulate = c.product.accumulate;  // beta is no part of what is proposed for
  if (asked.text() != c.product.text()) return fault(fmt::format("{} runs the algorithm of {}", c.product.text(), asked.text()));
  const Algorithm& algorithm = algorithms[proposed.algorithm];
  if (call.workspace_bytes < algorithm.workspace) return fault("an algorithm is lent too little workspace");
  const auto promised = [&](PreferenceName name, const void* p) {
    const auto found = proposed.preference.find(static_cast<int>(name));
    return alignment_of(p) >= (found == proposed.preference.end() ? 256 : found->second);
  };
  if (!promised(PreferenceName::kAlignmentA, call.a.data) || !promised(PreferenceName::kAlignmentB, call.b.data) ||
      !promised(PreferenceName::kAlignmentC, call.data) || !promised(PreferenceName::kAlignmentD, call.data))
    return fault("an array is less aligned than was promised");
  c.product.algorithm = proposed.algorithm;
  c.product.workspace = call.workspace_bytes;
  products.push_back(c.product);
  const auto work = [c, call, scribbled = algorithm.workspace] {
    if (scribbled > 0) std::memset(call.workspace, 0xff, static_cast<size_t>(scribbled));
    const Product& p = c.product;
    const auto at = [&](const Descriptor& m, const void* data, bool turned, int64_t i, int64_t j) {
      const double x = load(data, m.type, turned ? j + i * m.leading : i + j * m.leading);
      return p.tf32 ? as_tf32(x) : x;
    };
    for (int64_t j = 0; j < p.n; ++j)
      for (int64_t i = 0; i < p.m; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < p.k; ++k) sum += at(c.a, call.a.data, p.turned_a, i, k) * at(c.b, call.b.data, p.turned_b, k, j);
        const int64_t to = i + j * c.d.leading;
        double result = call.alpha * sum;
        if (call.beta != 0) result += call.beta * load(call.data, c.d.type, to);  // with beta 0 it may hold anything
        if (p.bias) result += load(c.bias, c.d.type, i);
        store(call.data, c.d.type, to, static_cast<float>(result));
      }
  };
  if (queue)
    queue(stream, work);
  else
    work();
  return 0;
}

}  // namespace shardlab::testing
