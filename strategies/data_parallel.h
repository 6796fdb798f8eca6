#pragma once
namespace shardlab::strategies {
struct Bucket;
struct Draft;
struct StageDraft;

/// See data_parallel.cpp.
void data_parallel(Draft& draft);

/// `Bucket::reduced`, the sum over data-parallel ranks in place of the bucket's gradients, and its parameters' parts of it.
void declare_reduced(Draft& draft, StageDraft& stage, Bucket& bucket);
}  // namespace shardlab::strategies
