// The backend `eccl` of c10d: as c10d::ProcessGroupNCCL behaves towards the host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "communicator.h"
#include "work.h"

namespace emu {

class ProcessGroupECCL : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("eccl") {}
    c10::intrusive_ptr<ProcessGroupECCL> split_from;
  };

  ProcessGroupECCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~ProcessGroupECCL() override;

  const std::string getBackendName() const override { return "eccl"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  // Only counts here, as NCCL's: each rank begins with 0.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  void eagerConnectSingleDevice(at::Device device) override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // What ranks outside a new group do while those inside split this group's communicator.
  void perform_nocolor_split(at::Device device);
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work send(Tensors& tensors, int peer, int tag) override;
  Work recv(Tensors& tensors, int peer, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  // One call of the user's: what to show for it, and what to do for it on the communicator.
  struct Call {
    c10d::OpType kind;
    const char* title;
    Tensors inputs;
    Tensors outputs;
    bool is_async;
    bool is_barrier = false;
  };
  // What is coalesced between startCoalescing and endCoalescing.
  struct Coalesced {
    bool is_active = false;
    bool has_collective = false;
    bool has_p2p = false;
    bool is_async = false;
    std::shared_ptr<Communicator> communicator;
    std::vector<Communicator::Transport> transports;
    std::vector<Buffer> buffers;  // what the pieces below point into
    std::vector<Piece> sends;
    std::vector<Piece> receives;
  };

  Work collective(Call call, Communicator::Transport transport);
  Work point_to_point(Call call, int peer);
  Work launch(const Call& call, std::shared_ptr<Communicator> communicator, uint64_t seq, Communicator::Transport transport);
  c10::intrusive_ptr<WorkECCL> make_work(const Call& call, std::shared_ptr<Communicator> communicator, uint64_t seq);
  std::shared_ptr<Communicator> communicator_of(const std::string& key, at::Device device, int rank, int size);
  std::shared_ptr<Communicator> device_communicator(at::Device device);
  void coalesce_with(const std::shared_ptr<Communicator>& communicator);
  at::Device barrier_device(const c10d::BarrierOptions& options);
  std::vector<std::shared_ptr<Communicator>> communicators();
  std::string log_prefix() const;

  void watch();
  bool look_at(WorkState& state);
  void handle(const std::exception_ptr& error);
  void end_watchdog();

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const int error_handling_;
  const bool is_blocking_;
  const std::chrono::milliseconds watch_interval_;

  std::mutex mutex_;  // of what the next lines hold; never held while a communicator is made
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  uint64_t num_keys_ = 0;
  uint64_t num_splits_ = 0;
  uint64_t num_collectives_ = 0;
  uint64_t num_p2p_ = 0;
  int last_device_ = -1;
  bool is_eager_ = false;
  std::atomic<bool> is_aborted_{false};
  bool is_shut_down_ = false;
  Coalesced coalesced_;

  std::mutex watch_mutex_;
  std::condition_variable watch_changed_;
  std::list<std::shared_ptr<WorkState>> watched_;
  bool is_ending_ = false;
  std::atomic<bool> has_timed_out_{false};
  std::thread watchdog_;
};

}  // namespace emu
