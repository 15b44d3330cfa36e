#include "process_group.h"

#include <c10/util/Logging.h>
#include <signal.h>

#include <cstdlib>

namespace emu {

namespace {

// Between two looks of the watchdog. With EMU_WATCH_INTERVAL_MS a test chooses who meets an error first.
constexpr int kWatchIntervalMs = 100;

// As TORCH_NCCL_ASYNC_ERROR_HANDLING: what the watchdog does about an error or a time-out.
constexpr int kNoHandling = 0;
constexpr int kCleanUpOnly = 2;
constexpr int kSkipCleanUp = 3;

int from_environment(std::initializer_list<const char*> variables, int otherwise) {
  for (const char* variable : variables) {
    const char* text = std::getenv(variable);
    if (text != nullptr && *text != '\0') return std::atoi(text);
  }
  return otherwise;
}

std::string device_identity(int device) {
  const char* host = std::getenv("EMU_HOST_ID");
  return c10::str(host == nullptr ? "" : host, host == nullptr ? "" : "/", physical_device(device));
}

std::string pair_key(int rank, int peer) { return c10::str(std::min(rank, peer), ":", std::max(rank, peer)); }

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

int64_t count(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  return numel;
}

}  // namespace

ProcessGroupECCL::ProcessGroupECCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                   c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      error_handling_(from_environment({"EMU_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}, kSkipCleanUp)),
      is_blocking_(from_environment({"EMU_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"}, 0) != 0),
      watch_interval_(from_environment({"EMU_WATCH_INTERVAL_MS"}, kWatchIntervalMs)) {
  init();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  watchdog_ = std::thread([this] { watch(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ProcessGroupECCL::~ProcessGroupECCL() {
  if (!is_shut_down_) {
    is_aborted_ = true;
    for (const auto& communicator : communicators()) communicator->abort();
  }
  without_gil([this] { end_watchdog(); });
}

std::string ProcessGroupECCL::log_prefix() const {
  return c10::str("[PG GUID ", pg_uid_, "(", pg_desc_, ") Rank ", rank_, "] ");
}

uint64_t ProcessGroupECCL::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_collectives_;
}

std::vector<std::shared_ptr<Communicator>> ProcessGroupECCL::communicators() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& [key, communicator] : communicators_) all.push_back(communicator);
  return all;
}

// Communicators

std::shared_ptr<Communicator> ProcessGroupECCL::communicator_of(const std::string& key, at::Device device, int rank,
                                                                int size) {
  const bool is_pair = key.find(':') != std::string::npos;
  std::string store_key = key;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last_device_ = device.index();
    auto found = communicators_.find(key);
    if (is_aborted_ || (found != communicators_.end() && found->second->aborted())) {
      C10_THROW_ERROR(DistBackendError, c10::str("ECCL communicator was aborted on rank ", rank_, "."));
    }
    if (found != communicators_.end()) return found->second;
    if (!is_pair) store_key = std::to_string(num_keys_++);
  }
  std::shared_ptr<Mesh> mesh;
  without_gil([&] {
    if (options_->split_from && !is_pair) options_->split_from->perform_nocolor_split(device);
    mesh = Mesh::meet(*store_, store_key, rank, size, device_identity(device.index()));
  });
  auto communicator = std::make_shared<Communicator>(mesh, device.index());
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_aborted_) {
    communicator->abort();
    C10_THROW_ERROR(DistBackendError, c10::str("ECCL communicator was aborted on rank ", rank_, "."));
  }
  communicators_[key] = communicator;
  return communicator;
}

std::shared_ptr<Communicator> ProcessGroupECCL::device_communicator(at::Device device) {
  return communicator_of(std::to_string(device.index()), device, rank_, size_);
}

void ProcessGroupECCL::eagerConnectSingleDevice(at::Device device) {
  device_communicator(device);
  is_eager_ = true;
}

void ProcessGroupECCL::perform_nocolor_split(at::Device device) {
  device_communicator(device);
  std::string key;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    key = c10::str("split:", num_splits_++);
  }
  // All ranks of the communicator that is split must come, also those outside the new one.
  without_gil([&] { Mesh::meet(*store_, key, rank_, size_, std::to_string(rank_)); });
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupECCL::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const at::Device device(at::kPrivateUse1, bound_device_id_ ? bound_device_id_->index() : current_device());
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    perform_nocolor_split(device);
    return nullptr;
  }
  auto split_options = c10::make_intrusive<Options>();
  split_options->timeout = options ? options->timeout : options_->timeout;
  split_options->split_from = c10::intrusive_ptr<ProcessGroupECCL>::unsafe_reclaim_from_nonowning(this);
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    split_options->global_ranks_in_group.push_back(global.empty() ? rank : global[rank]);
  }
  auto group = c10::make_intrusive<ProcessGroupECCL>(store->clone(), static_cast<int>(own - ranks.begin()),
                                                     static_cast<int>(ranks.size()), split_options);
  group->eagerConnectSingleDevice(device);
  return group;
}

void ProcessGroupECCL::abort() {
  if (is_aborted_.exchange(true)) return;
  const auto all = communicators();
  for (const auto& communicator : all) communicator->abort();
  // NCCL frees device memory now, which waits for every kernel on the device, those of other communicators included.
  without_gil([&] {
    for (const auto& communicator : all) {
      if (Communicator::wait_until_idle(communicator->device(), options_->timeout)) continue;
      C10_THROW_ERROR(DistBackendError, c10::str(log_prefix(), "ProcessGroup abort timed out after ",
                                                 options_->timeout.count(), " milliseconds"));
    }
  });
}

void ProcessGroupECCL::shutdown() {
  without_gil([this] {
    for (const auto& communicator : communicators()) communicator->stream().drain();
    end_watchdog();
  });
  std::lock_guard<std::mutex> lock(mutex_);
  is_shut_down_ = true;
  is_aborted_ = true;
  communicators_.clear();
}

c10d::ErrorType ProcessGroupECCL::getError() {
  if (has_timed_out_) return c10d::ErrorType::TIMEOUT;
  for (const auto& communicator : communicators()) {
    if (!communicator->error().empty()) return c10d::ErrorType::REMOTE_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

// Calls

c10::intrusive_ptr<WorkECCL> ProcessGroupECCL::make_work(const Call& call, std::shared_ptr<Communicator> communicator,
                                                         uint64_t seq) {
  auto state = std::make_shared<WorkState>();
  state->group = log_prefix();
  state->communicator = std::move(communicator);
  state->kind = call.kind;
  state->seq = seq;
  state->numel_in = count(call.inputs);
  state->numel_out = count(call.outputs);
  state->timeout = options_->timeout;
  state->started = std::chrono::steady_clock::now();
  auto work = c10::make_intrusive<WorkECCL>(state, rank_, call.title, call.inputs, call.outputs);
  work->is_barrier_ = call.is_barrier;
  work->is_blocking_ = is_blocking_;
  return work;
}

ProcessGroupECCL::Work ProcessGroupECCL::launch(const Call& call, std::shared_ptr<Communicator> communicator, uint64_t seq,
                                                Communicator::Transport transport) {
  auto work = make_work(call, communicator, seq);
  Stream& current = current_stream(communicator->device());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Event start;
    start.record(current);
    start.block(communicator->stream());
    Communicator::run(communicator, std::move(transport));
    work->state_->end.record(communicator->stream());
  }
  work->mark_future(at::Device(at::kPrivateUse1, communicator->device()));
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    watched_.push_back(work->state_);
    if (watched_.size() == 1) watch_changed_.notify_one();
  }
  if (call.is_async) return work;
  // Since torch 2.8 a synchronous call of NCCL runs on the current stream and returns no work.
  work->synchronize();
  if (call.is_barrier) current.synchronize();
  return nullptr;
}

void ProcessGroupECCL::coalesce_with(const std::shared_ptr<Communicator>& communicator) {
  TORCH_CHECK(!coalesced_.communicator || coalesced_.communicator == communicator,
              "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread.");
  coalesced_.communicator = communicator;
}

ProcessGroupECCL::Work ProcessGroupECCL::collective(Call call, Communicator::Transport transport) {
  const auto& first = call.inputs.empty() ? call.outputs : call.inputs;
  uint64_t seq = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!coalesced_.is_active || !coalesced_.has_collective) ++num_collectives_;
    seq = num_collectives_;
  }
  auto communicator = device_communicator(first.at(0).device());
  if (!coalesced_.is_active) return launch(call, communicator, seq, std::move(transport));
  coalesce_with(communicator);
  coalesced_.has_collective = true;
  coalesced_.is_async = call.is_async;
  coalesced_.transports.push_back(std::move(transport));
  if (!call.is_async) return nullptr;
  auto work = make_work(call, communicator, seq);
  work->mark_future(first[0].device());
  return work;
}

ProcessGroupECCL::Work ProcessGroupECCL::point_to_point(Call call, int peer) {
  const bool is_send = call.kind == c10d::OpType::SEND;
  const Buffer buffer((is_send ? call.inputs : call.outputs).at(0));
  const at::Device device = (is_send ? call.inputs : call.outputs)[0].device();
  uint64_t seq = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!coalesced_.is_active || !coalesced_.has_p2p) ++num_p2p_;
    seq = num_p2p_;
  }
  if (is_eager_ || coalesced_.is_active) {
    auto communicator = device_communicator(device);
    const Piece piece{peer, buffer.data, buffer.num_bytes()};
    if (coalesced_.is_active) {
      coalesce_with(communicator);
      coalesced_.has_p2p = coalesced_.is_async = true;
      coalesced_.buffers.push_back(buffer);
      (is_send ? coalesced_.sends : coalesced_.receives).push_back(piece);
      return nullptr;
    }
    TORCH_WARN_ONCE("An unbatched P2P op (send/recv) was called on this ProcessGroup with size ", size_,
                    ". In eager initialization mode, unbatched P2P ops are serialized with all other ops of the group.");
    return launch(call, communicator, seq, [buffer, piece, is_send](Communicator& self) {
      self.exchange(is_send ? std::vector<Piece>{piece} : std::vector<Piece>{},
                    is_send ? std::vector<Piece>{} : std::vector<Piece>{piece});
    });
  }
  const bool is_self = peer == rank_;
  auto communicator = communicator_of(pair_key(rank_, peer), device, rank_ <= peer ? 0 : 1, is_self ? 1 : 2);
  const Piece piece{is_self || peer < rank_ ? 0 : 1, buffer.data, buffer.num_bytes()};
  return launch(call, communicator, seq, [buffer, piece, is_send](Communicator& self) {
    self.exchange(is_send ? std::vector<Piece>{piece} : std::vector<Piece>{},
                  is_send ? std::vector<Piece>{} : std::vector<Piece>{piece});
  });
}

void ProcessGroupECCL::startCoalescing() {
  coalesced_ = Coalesced();
  coalesced_.is_active = true;
}

ProcessGroupECCL::Work ProcessGroupECCL::endCoalescing() {
  auto coalesced = std::exchange(coalesced_, Coalesced());
  if (!coalesced.communicator) return nullptr;
  uint64_t seq = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    seq = coalesced.has_p2p ? num_p2p_ : num_collectives_;
  }
  const Call call{c10d::OpType::COALESCED, "eccl:coalesced", {}, {}, coalesced.is_async};
  auto communicator = coalesced.communicator;
  coalesced.communicator = nullptr;
  return launch(call, communicator, seq, [coalesced = std::move(coalesced)](Communicator& self) {
    for (const auto& transport : coalesced.transports) transport(self);
    self.exchange(coalesced.sends, coalesced.receives);
  });
}

// The watchdog

void ProcessGroupECCL::watch() {
  pthread_setname_np(pthread_self(), "pt_eccl_watchdg");
  try {
    std::unique_lock<std::mutex> lock(watch_mutex_);
    while (!is_ending_) {
      if (watched_.empty()) {
        watch_changed_.wait(lock);
        continue;
      }
      if (watch_changed_.wait_for(lock, watch_interval_, [this] { return is_ending_; })) continue;
      auto looked_at = watched_;
      lock.unlock();
      std::erase_if(looked_at, [this](const auto& state) { return !look_at(*state); });
      lock.lock();
      std::erase_if(watched_, [&](const auto& state) {
        return std::find(looked_at.begin(), looked_at.end(), state) != looked_at.end();
      });
    }
  } catch (const std::exception&) {
    const auto message = c10::str(log_prefix(), "Process group watchdog thread terminated with exception: ",
                                  what(std::current_exception()));
    LOG(ERROR) << message;
    C10_THROW_ERROR(DistBackendError, message);  // which ends the process
  }
}

// True when the work is over.
bool ProcessGroupECCL::look_at(WorkState& state) {
  if (auto error = state.peer_error()) {
    LOG(ERROR) << state.group << "found async exception when checking for ECCL errors: " << what(error);
    handle(error);
    return true;
  }
  if (state.is_finished()) return true;
  if (state.age() < state.timeout) return false;
  const auto message = state.describe_timeout();
  LOG(ERROR) << message;
  has_timed_out_ = true;
  handle(std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message)));
  return true;
}

void ProcessGroupECCL::handle(const std::exception_ptr& error) {
  if (error_handling_ != kNoHandling && error_handling_ != kSkipCleanUp) {
    is_aborted_ = true;
    for (const auto& communicator : communicators()) communicator->abort();
  }
  LOG(ERROR) << log_prefix()
             << "Some ECCL operations have failed or timed out. Due to the asynchronous nature of EMU kernels, "
                "subsequent EMU operations might run on corrupted/incomplete data.";
  if (error_handling_ == kNoHandling || error_handling_ == kCleanUpOnly) return;
  LOG(ERROR) << log_prefix() << "To avoid data inconsistency, we are taking the entire process down.";
  std::rethrow_exception(error);
}

void ProcessGroupECCL::end_watchdog() {
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    is_ending_ = true;
    watch_changed_.notify_all();
  }
  if (watchdog_.joinable()) watchdog_.join();
}

}  // namespace emu
