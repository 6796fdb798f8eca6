#pragma once
namespace shardlab::strategies {
struct Draft;
struct StageDraft;
/// See guard.cpp.
void guard(Draft& draft);
/// The loss and the norm of a step that updates enter their running means.
void take_into_means(Draft& draft, StageDraft& stage);
}  // namespace shardlab::strategies
