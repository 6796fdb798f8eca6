// Seconds of kernels: derived cases, monotony, what is refused.
#include "simulator/interpreter/device_model.h"

#include <cmath>
#include <limits>

#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

Device plain() {
  Device d;
  d.id = "plain";
  d.memory_bytes_per_s = 1e12;
  d.peak_flops = {{"bf16", 1e14}};
  // One wave of 128 x 256 tiles on 100 multiprocessors is computed at the peak, nothing else costs time.
  d.constants = {{"sms", 100},
                 {"matmul.bf16.rate", 1},
                 {"matmul.sustained", 1},
                 {"matmul.ramp_k", 1e-9},
                 {"matmul.quantisation", 1},
                 {"matmul.start_s", 1e-12},
                 {"kernel.start_s", 1e-12},
                 {"matmul.memory", 1e3}};
  return d;
}

DeviceModel model_of(const Device& d) {
  const auto model = DeviceModel::of(d);
  REQUIRE(model.ok());
  return *model;
}

}  // namespace

TEST_CASE("a matmul takes whole waves of tiles") {
  const DeviceModel model = model_of(plain());
  const double k = 4096;
  const double tile = 2 * 128 * 256 * k / (1e14 / 100);
  // 100 tiles fill the device once; 101 tiles need a second wave.
  CHECK(model.matmul_seconds({.m = 10 * 128, .n = 10 * 256, .k = k}) == Approx(tile));
  CHECK(model.matmul_seconds({.m = 128, .n = 256, .k = k, .batch = 100}) == Approx(tile));
}

TEST_CASE("a matmul beside a collective goes without the multiprocessors that it holds, up to those of the measured ones") {
  Device d = plain();
  d.constants["matmul.beside"] = 1.8;
  const DeviceModel model = model_of(d);
  CHECK(model.held_beside(0) == 0);
  CHECK(model.held_beside(4) == Approx(1 - 1 / (1 + 0.8 * 4 / 24)));
  CHECK(model.held_beside(24) == Approx(1 - 1 / 1.8));
  CHECK(model.held_beside(32) == Approx(1 - 1 / 1.8));
  CHECK(model.lost_beside(24, 1e-3, 5e-3) == Approx(model.held_beside(24)));
  CHECK(model.share_of(25) == Approx(0.25));
}

TEST_CASE("where blocks stay, those without a multiprocessor wait for the collective to end or for the first wave") {
  Device d = plain();
  d.constants["matmul.resident"] = 0.875;
  const DeviceModel model = model_of(d);
  // Twelve and a half of a hundred multiprocessors are free.
  CHECK(model.lost_beside(12, 1e-3, 5e-3) == 0);
  CHECK(model.held_beside(12) == 0);
  CHECK(model.held_beside(13) == 0.5);
  // A collective of 1 ms that begins with a matmul of 5: its last blocks begin 1 ms late.
  CHECK(model.lost_beside(24, 1e-3, 5e-3) == 1);
  CHECK(model.lost_beside(24, 5e-3, 5e-3) == Approx(1));
  // Of 8 ms, one matmul takes 10 instead of 5.
  CHECK(model.lost_beside(24, 8e-3, 5e-3) == Approx(5.0 / 8));
  // Of 12 ms, the next begins at 10 and ends two later than alone.
  CHECK(model.lost_beside(24, 12e-3, 5e-3) == Approx(7.0 / 12));
  CHECK(model.lost_beside(24, 1, 0) == 0.5);
}

TEST_CASE("a library has no large tiles for rows that begin at any element") {
  Device d = plain();
  d.constants["matmul.small_tile"] = 0.5;
  d.constants["matmul.unaligned"] = 0.25;
  const DeviceModel model = model_of(d);
  // 1280 x 2560 are 400 tiles of 128 x 64, each at the rate of its size: 0.5 and a third of the way to the largest.
  const double tile = 2.0 * 128 * 64 * 4096 / (1e14 / 100 * (0.5 + 0.5 / 3) * 0.25);
  CHECK(model.matmul_seconds({.m = 1280, .n = 2559, .k = 4096}) == Approx(4 * tile));
}

TEST_CASE("rows that do not begin at 16 bytes slow a matmul, by the dims that are contiguous") {
  Device d = plain();
  d.constants["matmul.unaligned"] = 0.125;
  const DeviceModel model = model_of(d);
  const auto seconds = [&](double m, double n, double k, Product product) {
    return model.matmul_seconds({.m = m, .n = n, .k = k, .product = product});
  };
  const double whole = seconds(1280, 2560, 4096, Product::kForward);
  // Within one tile of the same size: 2552 is a multiple of 8 elements, 2556 of 4, 2558 of 2, 2559 of 1.
  CHECK(seconds(1280, 2552, 4096, Product::kForward) == Approx(whole));
  CHECK(seconds(1280, 2556, 4096, Product::kForward) == Approx(2 * whole));
  CHECK(seconds(1280, 2558, 4096, Product::kForward) == Approx(4 * whole));
  const double odd = seconds(1280, 2559, 4096, Product::kForward);
  CHECK(odd > 8 * whole);  // and in smaller tiles
  CHECK(seconds(1280, 2560, 4095, Product::kInput) == Approx(odd).epsilon(1e-3));
  // The number of rows is of no matter, but in the weight gradient, whose result has it as columns of an operand.
  CHECK(seconds(1279, 2560, 4096, Product::kForward) == Approx(whole));
  CHECK(seconds(1279, 2560, 4096, Product::kWeight) == Approx(odd).epsilon(1e-3));
  CHECK(seconds(1280, 2560, 4095, Product::kWeight) == Approx(whole).epsilon(1e-3));
  // A mean over experts has no alignment.
  CHECK(seconds(1280, 2559.5, 4096, Product::kForward) == Approx(whole));
}

TEST_CASE("power takes clock from long runs, less where waves leave multiprocessors idle") {
  Device d = plain();
  d.constants["matmul.sustained"] = 0.5, d.constants["matmul.small_tile"] = 1e-3;
  const DeviceModel model = model_of(d);
  const Matmul full{.m = 10 * 128, .n = 10 * 256, .k = 512}, over{.m = 10 * 128, .n = 10 * 256 + 8, .k = 512};
  const double tile = 2 * 128 * 256 * 512 / (1e14 / 100);
  CHECK(model.matmul_seconds(full, true) == Approx(tile));
  CHECK(model.matmul_seconds(full) == Approx(2 * tile));
  // A second wave for eight columns: half of the multipliers are busy, 0.5 f^3 = 0.5^3.
  CHECK(model.matmul_seconds(over, true) == Approx(2 * tile));
  CHECK(model.matmul_seconds(over) == Approx(2 * tile * std::cbrt(4.0)).epsilon(2e-3));
  // So few that the full clock is within the power.
  const Matmul few{.m = 64, .n = 5 * 256, .k = 512};
  CHECK(model.matmul_seconds(few) == model.matmul_seconds(few, true));
}

TEST_CASE("devices that wait for one another go at the pace of the slowest, where power sets the clock") {
  Device d = plain();
  d.constants["matmul.sustained"] = 0.8, d.constants["matmul.spread"] = 0.02;
  const DeviceModel model = model_of(d);
  CHECK(model.slowest_of(1) == 1);
  // The largest of n standard normals is 0.564, 1.424, 2.508 and 3.241 on average (n = 2, 8, 100, 1000).
  CHECK(model.slowest_of(2) == Approx(1 + 0.02 * 0.564).epsilon(1e-3));
  CHECK(model.slowest_of(8) == Approx(1 + 0.02 * 1.424).epsilon(1e-3));
  CHECK(model.slowest_of(100) == Approx(1 + 0.02 * 2.508).epsilon(1e-3));
  CHECK(model.slowest_of(1000) == Approx(1 + 0.02 * 3.241).epsilon(1e-3));
  const Matmul full{.m = 10 * 128, .n = 10 * 256, .k = 512}, few{.m = 64, .n = 5 * 256, .k = 512};
  Matmul together = full, few_together = few;
  together.slowest = few_together.slowest = model.slowest_of(1000);
  CHECK(model.matmul_seconds(together) == Approx(together.slowest * model.matmul_seconds(full)));
  CHECK(model.matmul_seconds(few_together) == model.matmul_seconds(few));
  // No power limit, no spread.
  CHECK(model_of(plain()).matmul_seconds(together) == model_of(plain()).matmul_seconds(full));
}

TEST_CASE("a matmul with few tiles splits its contraction") {
  Device d = plain();
  const Matmul thin{.m = 128, .n = 256, .k = 65536};
  const double split = model_of(d).matmul_seconds(thin);
  const double whole = 2 * 128 * 256 * 65536.0 / (1e14 / 100);
  CHECK(split < whole / 4);
  CHECK(split >= whole / 100);
}

TEST_CASE("a matmul is never faster than its bytes") {
  Device d = plain();
  d.constants["matmul.memory"] = 0.5;
  const Matmul thin{.m = 1, .n = 8192, .k = 8192};
  CHECK(model_of(d).matmul_seconds(thin) >= 8192.0 * 8192 * 2 / 0.5e12);
  Matmul accumulated{.m = 8192, .n = 8192, .k = 16, .out_bytes = 4, .accumulate = true};
  CHECK(model_of(d).matmul_seconds(accumulated) == Approx((2.0 * 16 * 16384 + 8 * 8192.0 * 8192) / 0.5e12).epsilon(1e-3));
}

TEST_CASE("more work never takes less time") {
  const DeviceModel model = model_of(plain());
  for (const double size : {64.0, 100.0, 512.0, 1000.0, 4096.0, 20000.0}) {
    const Matmul base{.m = size, .n = size, .k = size};
    Matmul larger = base;
    larger.k *= 2;
    CHECK(model.matmul_seconds(larger) >= model.matmul_seconds(base));
    larger = base;
    larger.batch = 2;
    CHECK(model.matmul_seconds(larger) >= model.matmul_seconds(base));
    AttentionShape x{.heads = 8, .kv_heads = 8, .queries = size, .keys = size};
    const double causal = model.attention_seconds(x);
    x.causal = false;
    CHECK(model.attention_seconds(x) >= causal);
    x.pass = Pass::kBackward;
    CHECK(model.attention_seconds(x) > 2 * causal);
    x.kernel = AttentionKernel::kUnfused;
    const double unfused = model.attention_seconds(x);
    x.dropout = true;
    CHECK(model.attention_seconds(x) > unfused);
  }
}

TEST_CASE("a softmax whose steps are kernels of their own moves its scores in fp32") {
  const DeviceModel model = model_of(plain());
  AttentionShape x{.batch = 3, .heads = 6, .kv_heads = 6, .queries = 2048, .keys = 2048, .kernel = AttentionKernel::kUnfused};
  const double scores = 3 * 6 * 2048.0 * 2048.0;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    x.pass = pass;
    x.kernel = AttentionKernel::kUnfused;
    const double together = model.attention_seconds(x);
    x.kernel = AttentionKernel::kEager;
    // Two casts of 6 bytes, scale and mask of 8; and the softmax reads and writes two or three tensors of 4 bytes instead of 2.
    const double tensors = pass == Pass::kForward ? 2 : 3;
    const double steps = model.memory_bound_seconds(scores * 28, 4);
    const double softmax = model.memory_bound_seconds(scores * 4 * tensors, 1, MemoryKernel::kSoftmax) -
                           model.memory_bound_seconds(scores * 2 * tensors, 1, MemoryKernel::kSoftmax);
    CHECK(model.attention_seconds(x) - together == Approx(steps + softmax));
  }
}

TEST_CASE("memory-bound kernels, copies and the host's floor") {
  Device d = plain();
  d.constants["memory.permute"] = 0.25;
  CHECK(model_of(d).memory_bound_seconds(1e9, 1, MemoryKernel::kPermute) == Approx(1e9 / (0.25 * 1e12)));
  d.constants["memory.elementwise"] = 0.5;
  d.constants["kernel.start_s"] = 2e-6;
  d.constants["cache.bytes"] = 1e6;
  d.constants["host.launch_s"] = 5e-6;
  d.constants["host.to_device_bytes_per_s"] = 1e10;
  d.constants["host.copy_start_s"] = 1e-5;
  d.constants["nvme.read_bytes_per_s"] = 1e10;
  d.constants["nvme.start_s"] = 1e-4;
  const DeviceModel model = model_of(d);
  CHECK(model.memory_bound_seconds(1e9) == Approx(2e-3 + 2e-6));
  CHECK(model.memory_bound_seconds(1e9, 10) == Approx(2e-3 + 2e-5));
  CHECK(model.memory_bound_seconds(1e5) < 1e5 / 0.5e12 + 2e-6);  // served by the cache
  CHECK(model.host_bound_seconds(1e-3, 10) == 1e-3);
  CHECK(model.host_bound_seconds(1e-6, 10) == Approx(5e-5));
  CHECK(model.host_copy_seconds(1e9, HostCopy::kToDevice) == Approx(0.1 + 1e-5));
  CHECK(model.nvme_seconds(1e9, false, 8) == Approx(0.8 + 1e-4));
}

TEST_CASE("a precision that the device lacks runs at the next wider one") {
  const DeviceModel model = model_of(plain());
  CHECK(model.peak_flops(Precision::kFp8) == 1e14);
  CHECK(model.peak_flops(Precision::kFp16) == 1e14);
  CHECK(model.peak_flops(Precision::kFp32) == 0);
  CHECK(precision_named("fp4") == Precision::kFp4);
  CHECK_FALSE(precision_named("int8"));
}

TEST_CASE("what a device model refuses") {
  Device d = plain();
  d.constants["matmul.rate"] = 1;
  CHECK(DeviceModel::of(d).error().message == "device constant `matmul.rate` is not known");
  d = plain();
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    d.constants["sms"] = bad;
    CHECK_FALSE(DeviceModel::of(d).ok());
  }
  d = plain();
  d.memory_bytes_per_s = 0;
  CHECK(DeviceModel::of(d).error().message == "device `plain` has no memory bandwidth");
  d = plain();
  d.peak_flops.clear();
  CHECK(DeviceModel::of(d).error().message == "device `plain` has no peak for any precision");
}

TEST_CASE("an answer says what its least trusted constant is") {
  Device d = plain();
  CHECK(model_of(d).provenance("attention") == Provenance::kTransferred);
  for (const DeviceConstant& c : device_constants()) d.provenance[std::string(c.name)] = Provenance::kMeasured;
  CHECK(model_of(d).provenance("attention") == Provenance::kMeasured);
  d.provenance["attention.half"] = Provenance::kFitted;
  CHECK(model_of(d).provenance("attention") == Provenance::kFitted);
  CHECK(model_of(d).provenance("memory") == Provenance::kMeasured);
}
