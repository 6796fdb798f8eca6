// Launch geometry, as pure functions of extents.
#include "kernels/cuda/geometry.h"

#include "tests/test.h"

namespace shardlab::gpu {
namespace {

bool fits(const Geometry& g) {
  INFO(refusal(g));
  return refusal(g).empty();
}

}  // namespace

TEST_CASE("geometry: what no device takes is refused with the limit") {
  REQUIRE(refusal({}).empty());
  REQUIRE(refusal({.threads = 48}) == "threads of a block are a multiple of 32");
  REQUIRE(refusal({.threads = 1056}) == "over 1024 threads a block");
  REQUIRE(refusal({.x = int64_t{1} << 31}) == "over 2^31 - 1 blocks along x");
  REQUIRE(refusal({.z = 65536}) == "over 65535 blocks along y or z");
  REQUIRE(refusal({.shared = 163 * 1024 + 1}) == "over 163 KiB of shared memory a block");
}

TEST_CASE("geometry: elementwise covers every element once") {
  for (const int vector : {1, 4, 8})
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{2047}, int64_t{2048}, int64_t{2049}, int64_t{1} << 34}) {
      const Geometry g = geometry::elementwise(n, vector);
      const int64_t covered = g.blocks() * g.threads * vector;
      REQUIRE(covered >= n);
      REQUIRE(covered - n < int64_t{g.threads} * vector);
      REQUIRE(fits(g));
    }
}

TEST_CASE("geometry: a row's threads hold it whole up to 16384 elements of two bytes") {
  REQUIRE(geometry::row_team(64, 8).rows == 4);
  REQUIRE(geometry::row_team(1024, 8).threads == 32);
  REQUIRE(geometry::row_team(1032, 8).threads == 64);
  REQUIRE(geometry::row_team(4096, 8).threads == 128);
  REQUIRE(geometry::row_team(16384, 8).threads == 512);
  REQUIRE(geometry::row_team(int64_t{1} << 20, 8).threads == 512);
  for (const int64_t width : {1, 5, 128, 129, 4096, 16384, 100000})
    for (const int vector : {1, 4, 8}) {
      const geometry::RowTeam team = geometry::row_team(width, vector);
      if (team.threads < 512) REQUIRE(int64_t{team.threads} * geometry::kRowVectors * vector >= width);
      REQUIRE((team.rows == 1 || team.threads == 32));
      const Geometry g = geometry::rows(1001, width, vector);
      REQUIRE(g.x * team.rows >= 1001);
      REQUIRE(fits(g));
    }
}

TEST_CASE("geometry: counts of any number are cut off by one block") {
  REQUIRE((fits(geometry::fit_rows()) && geometry::fit_rows().blocks() == 1));
}

TEST_CASE("geometry: cross-entropy keeps a row in shared memory where it fits") {
  REQUIRE(geometry::cross_entropy(7, 50304, 16, 2).cached);
  REQUIRE(!geometry::cross_entropy(7, 128256, 16, 2).cached);
  REQUIRE(!geometry::cross_entropy(7, 50304, 16, 4).cached);
  for (const int64_t vocab : {1, 1000, 83000, 83500, 128256})
    for (const int bytes : {2, 4})
      for (const int leaves : {1, 2, 16, 17}) {
        const auto row = geometry::cross_entropy(7, vocab, leaves, bytes);
        REQUIRE(row.geometry.threads == 32 * leaves);
        REQUIRE(row.geometry.blocks() == 7);
        REQUIRE(fits(row.geometry));
      }
}

TEST_CASE("geometry: attention fits every device, and tiles are whole warps of rows") {
  for (const int head_dim : {2, 16, 64, 66, 128, 130, 256})
    for (const bool tensor : {false, true}) {
      const AttentionShape s{3, 1000, 8, 2, head_dim};
      const geometry::AttentionTiles t = geometry::attention_tiles(head_dim, tensor);
      REQUIRE(t.depth >= head_dim);
      REQUIRE(t.queries % 16 == 0);
      const Geometry f = geometry::attention_forward(s, tensor), q = geometry::attention_query_gradient(s, tensor),
                     k = geometry::attention_key_gradient(s, tensor), d = geometry::attention_dots(s);
      REQUIRE(f.x * t.queries >= s.tokens);
      REQUIRE((f.x - 1) * t.queries < s.tokens);
      REQUIRE(f.y == 8);
      REQUIRE(f.z == 3);
      REQUIRE(q.x == f.x);
      REQUIRE(k.x * t.held_keys >= s.tokens);
      REQUIRE(k.y == 2 * t.halves);
      REQUIRE(d.x * 4 >= s.tokens);
      for (const Geometry& g : {f, q, k, d}) REQUIRE(fits(g));
    }
  // What decides how many blocks share a multiprocessor of 228 KiB.
  REQUIRE(geometry::attention_forward({1, 64, 1, 1, 64}, true).shared == 5 * 64 * 72 * 2);
  REQUIRE(geometry::attention_forward({1, 64, 1, 1, 128}, true).shared == 5 * 64 * 136 * 2);
}

TEST_CASE("geometry: attention refuses what it has no tile for") {
  REQUIRE(attention_refusal(AttentionShape{1, 8, 4, 2, 64}).empty());
  REQUIRE(attention_refusal(AttentionShape{1, 8, 4, 3, 64}) == "attention on a GPU: kv_heads divides heads");
  REQUIRE(attention_refusal(AttentionShape{1, 8, 4, 2, 63}) == "attention on a GPU: head_dim is even");
  REQUIRE(attention_refusal(AttentionShape{1, 8, 4, 2, 258}) == "attention on a GPU: head_dim is at most 256");
  AttentionShape wide{1, 8, 4, 2, 64};
  wide.value_dim = 257;
  REQUIRE(attention_refusal(wide) == "attention on a GPU: a value has at most 256 elements");
}

TEST_CASE("geometry: tiles of the fixed-order product and leaves of token sums cover their results") {
  const Geometry p = geometry::fixed_product(130, 65);
  REQUIRE(p.y == 3);
  REQUIRE(p.x == 2);
  REQUIRE(fits(p));
  const Geometry t = geometry::token_leaves(5, 16, 1000, 8, 2);
  REQUIRE(t.x == 4);
  REQUIRE(t.y == 16);
  REQUIRE(t.z == 5);
  REQUIRE(t.shared == 256 * 8 * 2 * 4);
  REQUIRE(fits(t));
  REQUIRE(fits(geometry::embed_weight(1 << 20, 16384, 4)));
  REQUIRE(geometry::squared_norm(8193).x == 2);
  REQUIRE(geometry::squared_norm(0).blocks() == 0);
}

}  // namespace shardlab::gpu
