// The emulated accelerator's runtime: devices, streams and events, as the CUDA runtime gives them to PyTorch.
//
// A stream is a queue of closures that one thread of its own runs in order. To enqueue never waits. Nothing here starts a
// thread before the first closure is enqueued, so a process may fork after `import torch`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace emu {

// The devices that this process sees: EMU_NUM_DEVICES (default 2), narrowed by EMU_VISIBLE_DEVICES ("0", "1,0").
int num_devices();

// The physical number of the visible device `device`, which its uuid is made of.
int physical_device(int device);

// The calling thread's device.
int current_device();
void set_current_device(int device);

// True once this process has used a device (a tensor, a stream, `torch.emu.init`).
bool initialized();

// Marks the device as used. Raises in a process forked from one that used it, as CUDA does.
void initialize();

// True once this process has put memory or work on this device, which on CUDA costs a context.
bool has_context(int device);
void note_context(int device);

// True in a process forked from one that had used the device.
bool in_bad_fork();

class Stream {
 public:
  Stream(int device, int64_t id) : device_(device), id_(id) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Puts the closure at the end of the queue and returns at once. A closure that throws puts its device into the sticky
  // error state: the closures queued after it on that device are dropped without running, and every later call that
  // uses the device raises. A closure runs without the GIL and must not hold Python objects.
  void enqueue(std::function<void()> work);

  // As enqueue, but runs on a device in the error state too: for what others wait for (events, the ends of works).
  void enqueue_always(std::function<void()> work);

  // Makes the host wait until everything enqueued before has run (counted as "stream.synchronize"); releases the GIL
  // while it waits; raises the device's sticky error.
  void synchronize();

  // True when everything enqueued so far has run.
  bool query();

  // As synchronize, but neither counted nor raising.
  void drain();

  int device() const { return device_; }
  int64_t id() const { return id_; }

 private:
  struct Item {
    std::function<void()> work;
    bool always;
  };
  void push(Item item);
  void run();

  const int device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::condition_variable drained_;
  std::deque<Item> queue_;
  uint64_t enqueued_ = 0;
  uint64_t finished_ = 0;
  bool started_ = false;
};

// Streams live as long as the process. The current stream belongs to the calling thread; id 0 is the default stream.
Stream& current_stream(int device);
Stream& default_stream(int device);
Stream& new_stream(int device);
Stream& stream_by_id(int device, int64_t id);
void set_current_stream(Stream& stream);

class Event {
 public:
  // Puts a mark at the end of the stream. Recording again replaces the earlier mark.
  void record(Stream& stream);
  // Makes what is enqueued on the stream from here on wait for the mark; the host does not wait. An event that was never
  // recorded blocks nothing.
  void block(Stream& stream);
  // True when the mark was reached, or was never made.
  bool query();
  // Makes the host wait for the mark (counted as "event.synchronize"); releases the GIL; raises the sticky error.
  void synchronize();
  // Milliseconds from this event's mark to the later one's; both must have been reached.
  double elapsed_ms(Event& later);

 private:
  struct Mark {
    int device = 0;
    std::mutex mutex;
    std::condition_variable reached_changed;
    bool reached = false;
    std::chrono::steady_clock::time_point time;
    void wait();
  };
  std::shared_ptr<Mark> mark();

  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

// Makes the host wait for all streams of the device (counted as "synchronize").
void synchronize_device(int device);

// Sticky errors. `check_device` raises torch.AcceleratorError when the device is in the error state.
void set_device_error(int device, const std::string& why);
bool has_device_error(int device);
void check_device(int device);

// The host's waits for the device since the start or the last reset, by kind.
void count_host_sync(const std::string& kind);
std::map<std::string, int64_t> host_syncs();
void reset_host_syncs();

// Runs `wait` without the GIL, where the calling thread holds it.
void without_gil(const std::function<void()>& wait);

}  // namespace emu
