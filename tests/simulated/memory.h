// The device's memory: the host's, counted in blocks of 512 bytes. All that is allocated is reserved, and so is what a graph's
// pool keeps.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace simulated {

const c10::Device HERE(c10::DeviceType::CUDA, 0);

struct Block {
  int64_t nbytes, capacity; // what was asked for, and what there is
  int pool; // of recorded graphs; 0 for none
  bool live;
};

std::mutex lock;
std::map<char*, Block> blocks; // by their addresses
std::map<int, int> pools; // how many graphs there are of each
int64_t allocated = 0, most_allocated = 0, requested = 0, most_requested = 0, reserved = 0, most_reserved = 0, allocations = 0;
int64_t limit = int64_t(1) << 34;
thread_local int taking_from = 0; // the pool of what this thread records

int64_t in_blocks(int64_t nbytes) {
  return (nbytes + 511) / 512 * 512;
}

void give_back(std::map<char*, Block>::iterator found) {
  reserved -= found->second.capacity;
  free(found->first);
  blocks.erase(found);
}

void release(void* address) {
  if (!address) return;
  std::lock_guard<std::mutex> held(lock);
  auto found = blocks.find(static_cast<char*>(address));
  TORCH_INTERNAL_ASSERT(found != blocks.end() && found->second.live);
  allocated -= in_blocks(found->second.nbytes);
  requested -= found->second.nbytes;
  found->second.live = false;
  if (!pools.count(found->second.pool)) give_back(found);
}

char* kept_by_pool(int64_t nbytes) {
  for (auto& [address, block] : blocks) {
    if (!block.live && block.pool == taking_from && block.capacity >= nbytes) return address;
  }
  return nullptr;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, HERE};
    std::lock_guard<std::mutex> held(lock);
    const int64_t own = in_blocks(nbytes);
    char* address = taking_from ? kept_by_pool(own) : nullptr;
    if (address) {
      blocks[address].nbytes = nbytes;
      blocks[address].live = true;
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, reserved + own <= limit, "CUDA out of memory. Tried to allocate ", nbytes, " bytes");
      TORCH_CHECK(posix_memalign(reinterpret_cast<void**>(&address), 512, own) == 0, "the host has no ", own, " bytes");
      blocks[address] = {static_cast<int64_t>(nbytes), own, taking_from, true};
      reserved += own;
    }
    allocated += own;
    requested += nbytes;
    allocations++;
    most_allocated = std::max(most_allocated, allocated);
    most_requested = std::max(most_requested, requested);
    most_reserved = std::max(most_reserved, reserved);
    return {address, address, &release, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};
Memory memory;

// Whether there is memory at an address that a graph may read or write: it is allocated, or kept by a pool.
bool is_there(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == blocks.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second.capacity;
}

void pool_begins(int pool) {
  std::lock_guard<std::mutex> held(lock);
  pools[pool]++;
}

void pool_ends(int pool) {
  std::lock_guard<std::mutex> held(lock);
  if (--pools[pool]) return;
  pools.erase(pool);
  for (auto one = blocks.begin(); one != blocks.end();) {
    auto next = std::next(one);
    if (one->second.pool == pool && !one->second.live) give_back(one);
    one = next;
  }
}

void reset_peak() {
  std::lock_guard<std::mutex> held(lock);
  most_allocated = allocated;
  most_requested = requested;
  most_reserved = reserved;
}

std::map<std::string, int64_t> statistics() {
  std::lock_guard<std::mutex> held(lock);
  int64_t alive = 0;
  for (const auto& [address, block] : blocks) alive += block.live;
  return {
      {"allocated", allocated}, {"most allocated", most_allocated}, {"requested", requested}, {"most requested", most_requested},
      {"reserved", reserved}, {"most reserved", most_reserved}, {"allocations", allocations}, {"blocks", alive}};
}

// Of each block its address, the bytes that were asked for, its own, its pool, and whether it is allocated.
std::vector<std::tuple<int64_t, int64_t, int64_t, int, bool>> all_blocks() {
  std::lock_guard<std::mutex> held(lock);
  std::vector<std::tuple<int64_t, int64_t, int64_t, int, bool>> found;
  for (const auto& [address, one] : blocks) {
    found.emplace_back(reinterpret_cast<int64_t>(address), one.nbytes, one.capacity, one.pool, one.live);
  }
  return found;
}

} // namespace simulated
