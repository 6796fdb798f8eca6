#include "kernels/library_product.h"

#include <dnnl.h>

#include <array>

#include "plan/base/check.h"

namespace shardlab::kernels {
namespace {

template <class T, dnnl_status_t (*destroy)(T*)>
struct Destroy {
  void operator()(T* x) const { destroy(x); }
};
template <class T, dnnl_status_t (*destroy)(T*)>
using Handle = std::unique_ptr<T, Destroy<T, destroy>>;

using Memory = Handle<dnnl_memory, dnnl_memory_destroy>;

void succeed(dnnl_status_t status, const char* what) {
  SHARDLAB_CHECK(status == dnnl_success, "oneDNN's {} returned status {}", what, static_cast<int>(status));
}

dnnl_data_type_t type_of(DType t) {
  SHARDLAB_CHECK(t == DType::bf16 || t == DType::f32, "a library product has bf16 and f32 operands, not {}", name_of(t));
  return t == DType::bf16 ? dnnl_bf16 : dnnl_f32;
}

/// A matrix [rows, columns] that is stored row by row or, transposed, column by column.
dnnl_memory_desc_t matrix(int64_t rows, int64_t columns, bool transposed, DType type) {
  const dnnl_dims_t dims = {rows, columns};
  const dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
  dnnl_memory_desc_t desc;
  succeed(dnnl_memory_desc_init_by_strides(&desc, 2, dims, type_of(type), strides), "memory descriptor");
  return desc;
}

}  // namespace

struct LibraryProduct::Parts {
  Handle<dnnl_engine, dnnl_engine_destroy> engine;
  Handle<dnnl_stream, dnnl_stream_destroy> stream;
  Handle<dnnl_primitive_desc, dnnl_primitive_desc_destroy> desc;
  Handle<dnnl_primitive, dnnl_primitive_destroy> primitive;
  Memory a, b, bias, c;

  Memory memory(const dnnl_memory_desc_t& md) const {
    dnnl_memory_t m = nullptr;
    succeed(dnnl_memory_create(&m, &md, engine.get(), DNNL_MEMORY_NONE), "memory");
    return Memory(m);
  }
};

LibraryProduct::LibraryProduct(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
LibraryProduct::~LibraryProduct() = default;

bool LibraryProduct::runs_here() {
  return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
}

std::unique_ptr<LibraryProduct> LibraryProduct::create(const Spec& spec) {
  if (!runs_here()) return nullptr;
  const auto a = matrix(spec.rows, spec.depth, spec.a_transposed, DType::bf16);
  const auto b = matrix(spec.depth, spec.columns, spec.b_transposed, DType::bf16);
  const auto c = matrix(spec.rows, spec.columns, false, spec.result);
  const auto bias = matrix(1, spec.columns, false, spec.bias_type);
  dnnl_matmul_desc_t operation;
  if (dnnl_matmul_desc_init(&operation, &a, &b, spec.bias ? &bias : nullptr, &c) != dnnl_success) return nullptr;

  dnnl_primitive_attr_t attributes = nullptr;
  succeed(dnnl_primitive_attr_create(&attributes), "attributes");
  const Handle<dnnl_primitive_attr, dnnl_primitive_attr_destroy> owned_attributes(attributes);
  dnnl_post_ops_t sum = nullptr;
  succeed(dnnl_post_ops_create(&sum), "post-ops");
  const Handle<dnnl_post_ops, dnnl_post_ops_destroy> owned_sum(sum);
  if (spec.accumulate) succeed(dnnl_post_ops_append_sum(sum, 1.0f), "sum");
  succeed(dnnl_primitive_attr_set_post_ops(attributes, sum), "post-ops");

  auto parts = std::make_unique<Parts>();
  dnnl_engine_t engine = nullptr;
  succeed(dnnl_engine_create(&engine, dnnl_cpu, 0), "engine");
  parts->engine.reset(engine);
  dnnl_stream_t stream = nullptr;
  succeed(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "stream");
  parts->stream.reset(stream);
  dnnl_primitive_desc_t desc = nullptr;
  if (dnnl_primitive_desc_create(&desc, &operation, attributes, engine, nullptr) != dnnl_success) return nullptr;
  parts->desc.reset(desc);
  dnnl_primitive_t primitive = nullptr;
  succeed(dnnl_primitive_create(&primitive, desc), "primitive");
  parts->primitive.reset(primitive);
  parts->a = parts->memory(a);
  parts->b = parts->memory(b);
  parts->c = parts->memory(c);
  if (spec.bias) parts->bias = parts->memory(bias);
  return std::unique_ptr<LibraryProduct>(new LibraryProduct(std::move(parts)));
}

const char* LibraryProduct::implementation() const {
  const char* name = "";
  succeed(dnnl_primitive_desc_query(parts_->desc.get(), dnnl_query_impl_info_str, 0, static_cast<void*>(&name)), "name");
  return name;
}

void LibraryProduct::run(const Operands& x) const {
  std::array<dnnl_exec_arg_t, 4> args;
  int count = 0;
  const auto bind = [&](int name, const Memory& memory, const void* data) {
    succeed(dnnl_memory_set_data_handle(memory.get(), const_cast<void*>(data)), "data handle");
    args[static_cast<size_t>(count++)] = {name, memory.get()};
  };
  bind(DNNL_ARG_SRC, parts_->a, x.a);
  bind(DNNL_ARG_WEIGHTS, parts_->b, x.b);
  bind(DNNL_ARG_DST, parts_->c, x.c);
  if (parts_->bias != nullptr) bind(DNNL_ARG_BIAS, parts_->bias, x.bias);
  succeed(dnnl_primitive_execute(parts_->primitive.get(), parts_->stream.get(), count, args.data()), "execution");
  succeed(dnnl_stream_wait(parts_->stream.get()), "wait");
}

}  // namespace shardlab::kernels
