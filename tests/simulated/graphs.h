// CUDA graphs: what a thread records is not computed then, but each time that the graph is replayed, at the same addresses.
//
// As on a device, what is freed while something is recorded is taken again by what follows, from a pool of the graph's own.
// Memory that is gone when a graph is replayed is an error here, where a device would read what lies there now.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <set>

#include "memory.h"

namespace simulated {

struct Graph;
thread_local Graph* recording = nullptr; // what this thread records

// -- Random numbers: a seed and an offset, as Philox has them; each draw is a Mersenne twister's, seeded with both ---

struct RandomState {
  uint64_t seed = c10::default_rng_seed_val, offset = 0;
};

struct Generator final : c10::GeneratorImpl {
  std::shared_ptr<RandomState> now;
  explicit Generator(std::shared_ptr<RandomState> state)
      : c10::GeneratorImpl(HERE, c10::DispatchKeySet(c10::DispatchKey::CUDA)), now(std::move(state)) {}
  static void asked() {
    TORCH_CHECK(!recording, "Cannot read or set the state of a CUDA generator during CUDA graph capture.");
  }
  void set_current_seed(uint64_t seed) override {
    asked();
    *now = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    asked();
    now->offset = offset;
  }
  uint64_t get_offset() const override {
    asked();
    return now->offset;
  }
  uint64_t current_seed() const override {
    asked();
    return now->seed;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return now->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    asked();
    TORCH_CHECK(state.numel() == sizeof(RandomState) && state.is_cpu(), "RNG state is wrong size");
    memcpy(now.get(), state.data(), sizeof(RandomState));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    asked();
    auto state = at::detail::empty_cpu({sizeof(RandomState)}, at::kByte, {}, {}, {}, {});
    memcpy(state.mutable_data_ptr(), now.get(), sizeof(RandomState));
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    now = static_cast<Generator*>(other.get())->now;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return c10::make_intrusive<Generator>(now); }
  Generator* clone_impl() const override { return new Generator(std::make_shared<RandomState>(*now)); }
};

const std::shared_ptr<RandomState>& state_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->now;
}

const at::Generator& default_generator() {
  static const at::Generator made = at::make_generator<Generator>(std::make_shared<RandomState>());
  return made;
}

// While one is alive, the CPU's generator draws a generator's next numbers.
struct Drawing {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor before = cpu.get_state();
  explicit Drawing(RandomState& state) {
    cpu.set_state(at::detail::createCPUGenerator(state.seed * 1000003 + state.offset).get_state());
    state.offset += 4;
  }
  ~Drawing() { cpu.set_state(before); }
};

// -- Graphs ---------------------------------------------------------------------------------------------------------

struct Graph {
  std::vector<std::function<void()>> steps;
  std::vector<const void*> addresses; // of what they read and write
  std::set<std::shared_ptr<RandomState>> states; // that it may draw from
  int pool = 0;
  bool spoilt = false; // something was asked for that cannot be recorded

  void begin(int of) {
    TORCH_CHECK(!recording, "this thread records another graph");
    pool = of;
    pool_begins(pool);
    states.insert(state_of(default_generator()));
    recording = this;
    taking_from = pool;
  }

  void end() {
    TORCH_CHECK(recording == this, "this thread does not record this graph");
    recording = nullptr;
    taking_from = 0;
    if (!spoilt) return;
    reset();
    TORCH_CHECK(false, "CUDA error: operation failed due to a previous error during capture");
  }

  void replay() {
    TORCH_CHECK(pool && !recording, "nothing was recorded, or something is being recorded");
    for (const void* address : addresses) {
      TORCH_CHECK(is_there(address), "a recorded graph is replayed that reads or writes memory which was freed");
    }
    for (const auto& step : steps) step();
  }

  void reset() {
    steps.clear();
    if (pool) pool_ends(pool);
    pool = 0;
  }

  ~Graph() { reset(); }

  void permits(bool allowed, const std::string& what) {
    spoilt = spoilt || !allowed;
    TORCH_CHECK(allowed, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  }
};

// What waits for the device, which nothing may do that is recorded.
void wait(const std::string& what) {
  if (recording) recording->permits(false, what);
}

} // namespace simulated
