#include "runtime.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <sstream>

namespace emu {

namespace {

constexpr int kAssertTriggered = 710;  // what CUDA numbers a failed device-side assertion
constexpr auto kExitPatience = std::chrono::milliseconds(500);

// What the whole process shares. It is never destroyed, since stream threads outlive static objects.
struct Process {
  std::mutex mutex;
  std::atomic<bool> initialized{false};
  std::atomic<bool> bad_fork{false};
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> contexts{0};  // a bit per device
  std::atomic<int> busy{0};  // stream threads that run a closure now
  std::vector<int> devices;  // frozen by initialize()
  std::map<std::pair<int, int64_t>, Stream*> streams;
  std::map<int, int64_t> next_stream_id;
  std::map<int, std::string> errors;
  std::atomic<int> error_count{0};
  std::map<std::string, int64_t> host_syncs;
};

Process& process() {
  static Process* const shared = new Process();
  return *shared;
}

thread_local int thread_device = 0;
thread_local std::map<int, Stream*> thread_streams;

std::vector<int> visible_devices() {
  const char* count_text = std::getenv("EMU_NUM_DEVICES");
  const int count = count_text == nullptr || *count_text == '\0' ? 2 : std::atoi(count_text);
  std::vector<int> devices;
  const char* mask = std::getenv("EMU_VISIBLE_DEVICES");
  if (mask == nullptr) {
    for (int device = 0; device < count; ++device) devices.push_back(device);
    return devices;
  }
  std::stringstream names(mask);
  std::string name;
  while (std::getline(names, name, ',')) {
    char* end = nullptr;
    const long device = std::strtol(name.c_str(), &end, 10);
    // As CUDA: the first entry that is no device hides itself and those after it.
    if (end == name.c_str() || device < 0 || device >= count) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

std::vector<int> devices_now() {
  auto& shared = process();
  if (shared.initialized) return shared.devices;
  return visible_devices();
}

void forked_child() {
  auto& shared = process();
  if (shared.initialized) shared.bad_fork = true;
}

// Lets the closures that run end, so that they do not use what the exit of the process destroys.
void before_exit() {
  auto& shared = process();
  if (shared.bad_fork) return;
  shared.stopping = true;
  const auto deadline = std::chrono::steady_clock::now() + kExitPatience;
  while (shared.busy > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void use_one_cpu_thread() {
  using SetThreads = void (*)(int);
  if (auto* set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set_threads(1);
}

Stream& add_stream(int device) {
  initialize();
  TORCH_CHECK(device >= 0 && device < num_devices(), "emu error: invalid device ordinal ", device, " of ", num_devices());
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  const int64_t id = ++shared.next_stream_id[device];
  auto* stream = new Stream(device, id);
  shared.streams[{device, id}] = stream;
  return *stream;
}

std::vector<Stream*> streams_of(int device) {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  std::vector<Stream*> streams;
  for (const auto& [key, stream] : shared.streams) {
    if (key.first == device) streams.push_back(stream);
  }
  return streams;
}

}  // namespace

int num_devices() { return static_cast<int>(devices_now().size()); }

int physical_device(int device) {
  const auto devices = devices_now();
  TORCH_CHECK(device >= 0 && device < static_cast<int>(devices.size()), "emu error: invalid device ordinal ", device, " of ",
              devices.size());
  return devices[device];
}

int current_device() { return thread_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "emu error: invalid device ordinal ", device, " of ", num_devices());
  thread_device = device;
}

bool initialized() { return process().initialized; }

bool has_context(int device) { return device >= 0 && ((process().contexts >> device) & 1) != 0; }

void note_context(int device) {
  initialize();
  process().contexts |= uint64_t{1} << device;
}

bool in_bad_fork() { return process().bad_fork; }

void initialize() {
  auto& shared = process();
  TORCH_CHECK(!shared.bad_fork,
              "Cannot re-initialize emu in forked subprocess. To use emu with multiprocessing, you must use the 'spawn' "
              "start method");
  if (shared.initialized) return;
  static std::once_flag once;
  std::call_once(once, [&shared] {
    const auto devices = visible_devices();
    TORCH_CHECK(!devices.empty(), "No emu devices are available");
    shared.devices = devices;
    pthread_atfork(nullptr, nullptr, forked_child);
    std::atexit(before_exit);
    shared.initialized = true;
  });
}

void without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* const state = PyEval_SaveThread();
    struct Restore {
      PyThreadState* state;
      ~Restore() { PyEval_RestoreThread(state); }
    } restore{state};
    wait();
  } else {
    wait();
  }
}

void Stream::enqueue(std::function<void()> work) { push({std::move(work), false}); }

void Stream::enqueue_always(std::function<void()> work) { push({std::move(work), true}); }

void Stream::push(Item item) {
  note_context(device_);
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(item));
  ++enqueued_;
  if (!started_) {
    started_ = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  filled_.notify_one();
}

void Stream::run() {
  auto& shared = process();
  pthread_setname_np(pthread_self(), ("emu" + std::to_string(device_) + "." + std::to_string(id_)).c_str());
  use_one_cpu_thread();
  thread_device = device_;
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait(lock, [this] { return !queue_.empty(); });
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    ++shared.busy;
    if (shared.stopping) {
      --shared.busy;
      new Item(std::move(item));  // left as it is: the process ends
      return;
    }
    if (item.always || !has_device_error(device_)) {
      try {
        item.work();
      } catch (const c10::Error& error) {
        set_device_error(device_, error.what_without_backtrace());
      } catch (const std::exception& error) {
        set_device_error(device_, error.what());
      }
    }
    item.work = nullptr;
    --shared.busy;
    std::lock_guard<std::mutex> lock(mutex_);
    ++finished_;
    drained_.notify_all();
  }
}

void Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = enqueued_;
  drained_.wait(lock, [this, target] { return finished_ >= target; });
}

void Stream::synchronize() {
  count_host_sync("stream.synchronize");
  check_device(device_);
  without_gil([this] { drain(); });
  check_device(device_);
}

bool Stream::query() {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ == enqueued_;
}

Stream& stream_by_id(int device, int64_t id) {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto found = shared.streams.find({device, id});
  if (found != shared.streams.end()) return *found->second;
  TORCH_CHECK(id == 0, "emu error: device ", device, " has no stream ", id);
  auto* stream = new Stream(device, 0);
  shared.streams[{device, 0}] = stream;
  return *stream;
}

Stream& default_stream(int device) { return stream_by_id(device, 0); }

Stream& current_stream(int device) {
  auto found = thread_streams.find(device);
  return found != thread_streams.end() ? *found->second : default_stream(device);
}

void set_current_stream(Stream& stream) { thread_streams[stream.device()] = &stream; }

Stream& new_stream(int device) { return add_stream(device); }

void Event::Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  reached_changed.wait(lock, [this] { return reached; });
}

std::shared_ptr<Event::Mark> Event::mark() {
  std::lock_guard<std::mutex> lock(mutex_);
  return mark_;
}

void Event::record(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  mark->device = stream.device();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    mark_ = mark;
  }
  stream.enqueue_always([mark] {
    std::lock_guard<std::mutex> lock(mark->mutex);
    mark->time = std::chrono::steady_clock::now();
    mark->reached = true;
    mark->reached_changed.notify_all();
  });
}

void Event::block(Stream& stream) {
  if (auto recorded = mark()) {
    stream.enqueue_always([recorded] { recorded->wait(); });
  }
}

bool Event::query() {
  auto recorded = mark();
  if (!recorded) return true;
  check_device(recorded->device);
  std::lock_guard<std::mutex> lock(recorded->mutex);
  return recorded->reached;
}

void Event::synchronize() {
  count_host_sync("event.synchronize");
  auto recorded = mark();
  if (!recorded) return;
  without_gil([&recorded] { recorded->wait(); });
  check_device(recorded->device);
}

double Event::elapsed_ms(Event& later) {
  auto first = mark();
  auto last = later.mark();
  TORCH_CHECK(first && last, "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK(query() && later.query(), "Both events must be completed before calculating elapsed time.");
  return std::chrono::duration<double, std::milli>(last->time - first->time).count();
}

void synchronize_device(int device) {
  count_host_sync("synchronize");
  check_device(device);
  const auto streams = streams_of(device);
  without_gil([&streams] {
    for (auto* stream : streams) stream->drain();
  });
  check_device(device);
}

void set_device_error(int device, const std::string& why) {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.errors.emplace(device, why).second) ++shared.error_count;
}

bool has_device_error(int device) {
  auto& shared = process();
  if (shared.error_count == 0) return false;
  std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.errors.count(device) > 0;
}

void check_device(int device) {
  if (!has_device_error(device)) return;
  auto& shared = process();
  std::string why;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    why = shared.errors[device];
  }
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kAssertTriggered,
      "emu error: device-side assert triggered\nOn emu:" + std::to_string(device) + ": " + why +
          "\nErrors of the device are reported at a later call, so the stack trace below may be of an unrelated line.");
}

void count_host_sync(const std::string& kind) {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  ++shared.host_syncs[kind];
}

std::map<std::string, int64_t> host_syncs() {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  return shared.host_syncs;
}

void reset_host_syncs() {
  auto& shared = process();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.host_syncs.clear();
}

}  // namespace emu
