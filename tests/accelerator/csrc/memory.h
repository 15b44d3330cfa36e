// Device memory: blocks on the host, counted per device as CUDA's caching allocator counts.
#pragma once

#include <ATen/ATen.h>

#include <mutex>
#include <vector>

#include "runtime.h"

namespace emu {

constexpr auto kEmu = c10::DeviceType::PrivateUse1;

// What a tensor's storage points to. Work in flight holds the block, so that the memory outlives the tensor, while the
// counters see it freed with the tensor, as they do on CUDA.
struct Block {
  Block(void* data, size_t size, int device, Stream* stream) : data(data), size(size), device(device), stream(stream) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* const data;
  const size_t size;
  const int device;
  Stream* const stream;  // the current one when it was allocated: that is who may reuse the memory
  std::mutex mutex;
  std::vector<Stream*> used_on;  // the streams of Tensor.record_stream
};

// The block of a storage on the device; null for one without memory.
std::shared_ptr<Block> block_of(const c10::DataPtr& pointer);

// A CPU tensor over the same memory, which keeps the memory but not the tensor.
at::Tensor cpu_alias(const at::Tensor& tensor);

bool is_pinned(const void* pointer);

// Gives the device this much memory, or what it had first for 0.
void set_memory_limit(int64_t bytes, int device);
size_t total_memory(int device);

// Whether freed memory is overwritten with 0xFF in the order of its stream.
void set_scribble(bool on);

at::Allocator* device_allocator();
at::Allocator* pinned_allocator();

void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace emu
