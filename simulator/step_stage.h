// What one stage of a step does: the writer of its text. Internal to the closed form of a step.
//
// A visit is the forward or the backward of one unit for one micro-batch. Every technique says what it puts around visits; the
// timetable then goes through them in order. Techniques are written from their papers and from what README and closed_form say of
// bytes; none of it asks the plan.
#pragma once

#include <initializer_list>
#include <map>
#include <tuple>
#include <vector>

#include "simulator/closed_form_parts.h"
#include "simulator/step_kernels.h"
#include "simulator/step_walk.h"

namespace shardlab::simulator::forms {

class StageWriter {
 public:
  StageWriter(const Case& c, const StepKernels& kernels, int stage);
  StageText write();

 private:
  /// Streams beside the control stream; those of messages come behind.
  enum Stream : int32_t { kReducing, kGathering, kToHost, kToDevice, kHost, kToFile, kFromFile };
  static_assert(kFromFile + 1 == kStageStreams);
  using Events = std::vector<Event>;
  using After = std::initializer_list<int32_t>;

  /// What happens within a visit, after so many of its tasks.
  struct Cut {
    int32_t tasks;
    Event event;
  };
  /// What surrounds a visit: before it, and what it cannot begin without; what is given up after it, and what follows.
  struct Around {
    Events before, needed, released, after;
    std::vector<Cut> within, arrivals;  ///< what leaves for other streams; what the control stream waits for
  };

  // Visits.
  struct Visit {
    bool backward;
    int64_t unit, micro_batch;
  };
  Visit visit(size_t v) const;
  size_t forward_of(int64_t unit, int64_t micro_batch) const;
  size_t backward_of(int64_t unit, int64_t micro_batch) const;
  size_t last_visit() const { return around_.size() - 1; }
  /// Of the model, of a unit that is one.
  int64_t layer_of_unit(int64_t unit) const { return first_layer_of(c_, stage_) + unit - (part_.first ? 1 : 0); }
  bool is_layer(int64_t unit) const { return unit >= (part_.first ? 1 : 0) && unit < units_ - (part_.last ? 1 : 0); }
  void number_slots();
  void make_blocks();
  int32_t block_of(size_t v) const;
  Block& block(int32_t index) { return text_.blocks[static_cast<size_t>(index)]; }

  // Words of the text.
  static void append(Events& to, const Events& events) { to.insert(to.end(), events.begin(), events.end()); }
  static Event await(int32_t number) { return {.kind = Event::Kind::kAwait, .number = number}; }
  static void await(Events& to, int32_t number) {
    if (number >= 0) to.push_back(await(number));
  }
  Event alone(const Task& task);
  /// Appends a task that begins when those in `after` are over: on `stream`, and then its name is returned; or, without overlap, on
  /// the control stream, and then -1 is. The host's stream is there without overlap too.
  int32_t start(Events& to, const Task& task, Stream stream, After after = {});

  // Data parallelism (step_data.cpp).
  Task exchanged(CollectiveKind kind, const BucketForm& b, int64_t element) const;
  size_t index_of(const BucketForm& b) const { return static_cast<size_t>(&b - state_.buckets.data()); }
  void sum_replicas(const BucketForm& b, Events& events);
  void put_within(size_t v, const BucketForm& b, const Events& events);
  void reduce_when_complete();
  void scatter_every_micro_batch();
  void gather_before_use();
  void clear_padding();

  // Micro-batches in canonical mode: sums of them are added as a binary counter carries.
  int64_t carries(int64_t micro_batch) const;
  void count_in_binary();
  void add_copies(int64_t unit, Block& b) const;

  // What reduces a bucket, plainly or compressed (step_compression.cpp). Returns its last name.
  class Reducing;
  int32_t reduce(const BucketForm& b, Events& to);
  void reduce_in_codes(const BucketForm& b, Reducing& ops) const;
  void reduce_some(const BucketForm& b, Reducing& ops) const;
  void reduce_in_low_rank(const BucketForm& b, Reducing& ops) const;

  // Activations that wait outside the device (step_offload.cpp).
  void park_activations();
  void park(size_t forward, size_t backward, const LayerTreatment& treatment);

  // Parameters that wait there (step_offload.cpp).
  void fetch_before_use();
  void leave_every_micro_batch(const BucketForm& b);

  // An optimizer that works on the host (step_host_update.cpp).
  struct HostUpdate {
    size_t bucket = 0;
    double elements = 0;
    int32_t read = -1, updated = -1, rounded = -1, returned = -1, written = -1;
  };
  bool waits_for_all() const;
  bool has_ring() const {
    return c_.layout.offload.optimizer == OffloadTo::kNvme || c_.layout.offload.parameters == OffloadTo::kNvme;
  }
  int states_in_files() const;
  bool adds_on_host() const { return parks_parameters(c_) && c_.train.grad_accumulation > 1; }
  bool arrives_late(const BucketForm& b) const;
  void list_host_updates();
  void leave_when_complete();
  void leave_late();
  void leave(const BucketForm& b, size_t v, Events& there);
  void follow(size_t v, Events& there);
  void fetch_state(size_t job, Events& to);
  void update_host_copy(HostUpdate& job, Events& to);
  void round_copy(HostUpdate& job, Events& to);
  void put_back(HostUpdate& job, Events& to);
  void give_back(HostUpdate& job, Events& to);
  void work(size_t index, bool turned, Events& to);
  void forget(const HostUpdate& job, Events& to);
  void turn_ring(size_t job, Events& to);
  void update_on_host();

  // The timetable.
  void emit(const Event& e) { text_.events.push_back(e); }
  void emit_all(const Events& events) { append(text_.events, events); }
  int32_t edge_of(bool backward, bool receives) const;
  void pipeline();
  void receive(int64_t slot);
  void send(int64_t slot, int32_t others);
  int32_t launches_of(const Events& events) const;
  void give_up_sent(int64_t slot);
  void compute(int64_t slot);
  void work(size_t v, const Event* arrived);
  int32_t part_of_block(int32_t block, int32_t first, int32_t last);

  // The end of the step (step_end.cpp).
  bool meets_early() const { return c_.model.tied_embeddings && c_.layout.pp == 1 && c_.layout.zero < 2 && !c_.canonical; }
  Block& tail();
  void trifles(int n);
  void add(double flops, double bytes) { tail().add(kernels_.kernel({flops, bytes}, Spent::kUpdate)); }
  void meet(const Exchange& exchange, const Ways::Way& way, int stages, int32_t number);
  void agree_tp(int64_t element = 4);
  void agree_dp(int64_t element = 4);
  void agree_pp(int64_t element = 4);
  int64_t own_gradients() const;
  void await_all();
  void finish();
  void tie();
  void find_infinities();
  void square_gradients();
  void update_parameters();
  void update_slices();
  void judge_spikes();
  void decide();
  void sum_losses();
  void metrics();

  const Case& c_;
  const StepKernels& kernels_;
  int stage_;
  Part part_;
  Timetable table_;
  Elements elements_;
  State state_;
  Treatments treatments_;
  int64_t units_;
  StageText text_;
  std::vector<Around> around_;  ///< by visit
  Events at_end_;               ///< after all of them
  int32_t embed_forward_ = 0, layer_forward_ = 0, head_forward_ = 0;
  std::array<int32_t, 2> embed_backward_{}, head_backward_{};  ///< that writes gradients, and that adds to them
  std::vector<std::pair<LayerTreatment, std::array<int32_t, 2>>> layer_backward_;
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> parts_;
  std::vector<int64_t> micro_batches_, forward_slots_, backward_slots_;  ///< by slot; by micro-batch
  std::vector<int32_t> reduced_;                                         ///< by bucket: what its sum waits for, -1 for nothing
  std::vector<int64_t> sent_;
  size_t given_up_ = 0;
  int32_t next_number_ = 0, tail_ = -1, meetings_ = 0;  // meeting 0 is that of the two ends
  bool squared_ = false, summed_ = false;               ///< the gradients' squares; the losses
  std::vector<HostUpdate> host_updates_;                ///< as their gradients arrive
  size_t arrived_ = 0;                                  ///< of them
};

}  // namespace shardlab::simulator::forms
