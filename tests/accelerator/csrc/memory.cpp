#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstdlib>
#include <cstring>

namespace emu {

namespace {

using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kRounding = 512;
constexpr size_t kDefaultTotal = size_t{8} << 30;
constexpr auto kAggregate = static_cast<size_t>(StatType::AGGREGATE);

struct DeviceMemory {
  DeviceStats stats;
  size_t total = kDefaultTotal;
};

struct Memory {
  std::mutex mutex;
  std::map<int, DeviceMemory> devices;
  std::map<const char*, size_t> pinned;  // start and size
  std::map<const char*, std::weak_ptr<Block>> blocks;
  std::atomic<bool> scribble{true};
};

Memory& memory() {
  static Memory* const shared = new Memory();
  return *shared;
}

size_t rounded(size_t bytes) { return (bytes + kRounding - 1) / kRounding * kRounding; }

double mib(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void* host_memory(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, bytes == 0 ? 64 : bytes) == 0, "the host has no ", bytes, " bytes left");
  return data;
}

void count_allocated(int device, size_t bytes) {
  auto& shared = memory();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto& of_device = shared.devices[device];
  auto& stats = of_device.stats;
  const auto used = static_cast<size_t>(stats.allocated_bytes[kAggregate].current);
  if (used + bytes > of_device.total) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "emu out of memory. Tried to allocate ", mib(bytes), " MiB. emu:", device,
                     " has a total capacity of ", mib(of_device.total), " MiB of which ", mib(of_device.total - used),
                     " MiB is free. Of the allocated memory ", mib(used), " MiB is allocated by PyTorch.");
  }
  stats.allocation[kAggregate].increase(1);
  for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) (*stat)[kAggregate].increase(bytes);
  const auto reserved = static_cast<size_t>(stats.reserved_bytes[kAggregate].current);
  if (used + bytes > reserved) stats.reserved_bytes[kAggregate].increase(used + bytes - reserved);
}

void count_freed(int device, size_t bytes) {
  auto& shared = memory();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto& stats = shared.devices[device].stats;
  stats.allocation[kAggregate].decrease(1);
  for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) (*stat)[kAggregate].decrease(bytes);
}

void drop_block(void* context) { delete static_cast<std::shared_ptr<Block>*>(context); }

// What a caching allocator may do with freed memory at once: give it to the next tensor of the stream that it came from.
// Who uses it on another stream without record_stream then reads the other tensor; here, bytes of 0xFF (NaN).
void scribble(const std::shared_ptr<Block>& block) {
  if (!memory().scribble || in_bad_fork()) return;
  {
    std::lock_guard<std::mutex> lock(block->mutex);
    if (!block->used_on.empty()) return;
  }
  block->stream->enqueue([block] { std::memset(block->data, 0xFF, block->size); });
}

void free_block(void* context) {
  if (in_bad_fork()) return;  // the parent's: a lock may have been held when the process was forked
  auto* block = static_cast<std::shared_ptr<Block>*>(context);
  count_freed((*block)->device, (*block)->size);
  scribble(*block);
  delete block;
}

struct DeviceMemoryAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    note_context(device);
    const c10::Device where(kEmu, static_cast<c10::DeviceIndex>(device));
    check_device(device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, where};
    const size_t size = rounded(bytes);
    count_allocated(device, size);
    auto* data = host_memory(size);
    auto* block = new std::shared_ptr<Block>(std::make_shared<Block>(data, size, device, &current_stream(device)));
    {
      auto& shared = memory();
      std::lock_guard<std::mutex> lock(shared.mutex);
      shared.blocks[static_cast<const char*>(data)] = *block;
    }
    return {data, block, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    auto& stream = current_stream(current_device());
    without_gil([&stream] { stream.drain(); });
    std::memcpy(target, source, bytes);
  }
  bool initialized() override { return emu::initialized(); }
  void emptyCache(c10::MempoolId_t) override {
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    for (auto& [device, of_device] : shared.devices) {
      auto& stats = of_device.stats;
      auto& reserved = stats.reserved_bytes[kAggregate];
      reserved.decrease(reserved.current - stats.allocated_bytes[kAggregate].current);
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto block = block_of(pointer);
    if (!block) return;
    auto& used_on = stream_by_id(stream.device_index(), stream.id());
    if (&used_on == block->stream) return;
    std::lock_guard<std::mutex> lock(block->mutex);
    block->used_on.push_back(&used_on);
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    return shared.devices[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    auto& stats = shared.devices[device].stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes,
                       &stats.reserved_bytes}) {
      (*stat)[kAggregate].reset_accumulated();
    }
    stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    auto& stats = shared.devices[device].stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes,
                       &stats.reserved_bytes}) {
      (*stat)[kAggregate].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    auto& of_device = shared.devices[device];
    const auto reserved = static_cast<size_t>(of_device.stats.reserved_bytes[kAggregate].current);
    return {of_device.total - std::min(of_device.total, reserved), of_device.total};
  }
};

DeviceMemoryAllocator& the_device_allocator() {
  static auto* const shared = new DeviceMemoryAllocator();
  return *shared;
}

void free_pinned(void* data) {
  if (in_bad_fork()) return;
  auto& shared = memory();
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.pinned.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    auto* data = host_memory(bytes);
    auto& shared = memory();
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& the_pinned_allocator() {
  static auto* const shared = new PinnedAllocator();
  return *shared;
}

struct RegisterAllocators {
  RegisterAllocators() {
    c10::SetAllocator(kEmu, &the_device_allocator());
    at::setHostAllocator(kEmu, &the_pinned_allocator());
  }
} register_allocators;

}  // namespace

Block::~Block() {
  auto& shared = memory();
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.blocks.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

std::shared_ptr<Block> block_of(const c10::DataPtr& pointer) {
  if (auto* block = pointer.cast_context<std::shared_ptr<Block>>(&free_block)) return *block;
  // A storage over another's memory, as from_blob makes it.
  auto& shared = memory();
  const auto* data = static_cast<const char*>(pointer.get());
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto after = shared.blocks.upper_bound(data);
  if (after == shared.blocks.begin()) return nullptr;
  auto block = std::prev(after)->second.lock();
  return block && data < static_cast<const char*>(block->data) + block->size ? block : nullptr;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  TORCH_CHECK(tensor.device().type() == kEmu, "no emu tensor: ", tensor.device());
  const auto& storage = tensor.storage();
  auto block = block_of(storage.data_ptr());
  TORCH_CHECK(block || storage.nbytes() == 0, "the storage of this emu tensor is not from emu's allocator");
  void* const data = block ? const_cast<void*>(storage.data()) : nullptr;
  c10::DataPtr pointer(data, new std::shared_ptr<Block>(std::move(block)), &drop_block, c10::Device(c10::DeviceType::CPU));
  auto alias_storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                             std::move(pointer), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(alias_storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

bool is_pinned(const void* pointer) {
  auto& shared = memory();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto after = shared.pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == shared.pinned.begin()) return false;
  --after;
  return static_cast<const char*>(pointer) < after->first + after->second;
}

void set_memory_limit(int64_t bytes, int device) {
  physical_device(device);  // raises for one that is not there
  auto& shared = memory();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.devices[device].total = bytes <= 0 ? kDefaultTotal : static_cast<size_t>(bytes);
}

size_t total_memory(int device) {
  auto& shared = memory();
  std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.devices[device].total;
}

void set_scribble(bool on) { memory().scribble = on; }

at::Allocator* device_allocator() { return &the_device_allocator(); }

at::Allocator* pinned_allocator() { return &the_pinned_allocator(); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  auto before = block_of(impl->data_ptr());
  auto pointer = device_allocator()->allocate(bytes);
  auto after = block_of(pointer);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (before && after && kept > 0) {
    current_stream(before->device).enqueue([before, after, kept] { std::memcpy(after->data, before->data, kept); });
  }
  impl->set_data_ptr_noswap(std::move(pointer));
  impl->set_nbytes(bytes);
}

}  // namespace emu
