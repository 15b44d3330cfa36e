// What PyTorch asks of an accelerator: the device guard, the hooks, and the random number generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>

#include "generator.h"
#include "memory.h"

namespace emu {

namespace {

constexpr int kStreamsPerDevice = 32;  // as many as CUDA's pool: a program that takes more shares them

c10::Device device_of(int index) { return {kEmu, static_cast<c10::DeviceIndex>(index)}; }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

c10::Stream as_c10(Stream& stream) { return c10::Stream(c10::Stream::UNSAFE, device_of(stream.device()), stream.id()); }

Stream& from_c10(const c10::Stream& stream) { return stream_by_id(stream.device_index(), stream.id()); }

Stream& stream_of_pool(int device) {
  static auto* const mutex = new std::mutex();
  static auto* const pools = new std::map<int, std::pair<std::vector<Stream*>, size_t>>();
  std::lock_guard<std::mutex> lock(*mutex);
  auto& [streams, next] = (*pools)[device];
  if (streams.size() < kStreamsPerDevice) {
    streams.push_back(&new_stream(device));
    return *streams.back();
  }
  return *streams[next++ % kStreamsPerDevice];
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    if (device.index() != before) set_current_device(device.index());
    return device_of(before);
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < deviceCount()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return as_c10(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_c10(default_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return as_c10(stream_of_pool(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_c10(stream_of_pool(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& before = current_stream(stream.device_index());
    set_current_stream(from_c10(stream));
    return as_c10(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &from_c10(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->record(from_c10(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<Event*>(event)->block(from_c10(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->query(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  bool queryStream(const c10::Stream& stream) const override {
    check_device(stream.device_index());  // as cudaStreamQuery, which returns an error that stays
    return from_c10(stream).query();
  }
  void synchronizeStream(const c10::Stream& stream) const override { from_c10(stream).synchronize(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && last, "Both events must be recorded before calculating elapsed time.");
    return static_cast<Event*>(first)->elapsed_ms(*static_cast<Event*>(last));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  void init() const override { initialize(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device();
    set_current_device(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    if (device < 0) return getCurrentDevice();
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_of(current_device()); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} register_hooks;

}  // namespace

Generator::Generator(int device) : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == kStateBytes, "RNG state is wrong size: ", state.numel(), " bytes instead of ", kStateBytes);
  const auto* numbers = static_cast<const uint64_t*>(state.data());
  seed_ = numbers[0];
  offset_ = numbers[1];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto state = at::detail::empty_cpu({kStateBytes}, c10::ScalarType::Byte);
  auto* numbers = static_cast<uint64_t*>(state.mutable_data_ptr());
  numbers[0] = seed_;
  numbers[1] = offset_;
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* clone = new Generator(device().index());
  clone->seed_ = seed_;
  clone->offset_ = offset_;
  return clone;
}

at::Generator Generator::next() {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t mixed = (seed_ * 0x9E3779B97F4A7C15ULL) ^ ((offset_ + 1) * 0xBF58476D1CE4E5B9ULL);
  offset_ += 4;  // as the Philox generator of CUDA counts
  return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
}

const at::Generator& default_generator(int device) {
  static auto* const mutex = new std::mutex();
  static auto* const generators = new std::map<int, at::Generator>();
  const int index = device < 0 ? current_device() : device;
  physical_device(index);  // raises for one that is not there
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = generators->find(index);
  if (found == generators->end()) found = generators->emplace(index, at::make_generator<Generator>(index)).first;
  return found->second;
}

}  // namespace emu
