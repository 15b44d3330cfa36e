// What a collective returns: as c10d::ProcessGroupNCCL::WorkNCCL behaves towards the host.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace emu {

// What a work and the watchdog share; it holds no tensors, which the watchdog must not be the last to release.
struct WorkState {
  std::string group;  // begins each line of the log
  std::shared_ptr<Communicator> communicator;
  c10d::OpType kind = c10d::OpType::UNKNOWN;
  uint64_t seq = 0;
  int64_t numel_in = 0;
  int64_t numel_out = 0;
  std::chrono::milliseconds timeout{0};
  std::chrono::steady_clock::time_point started;
  Event end;

  // True once the stream has passed the end; also of a part of a coalesced call, whose end is never recorded.
  bool is_finished() { return end.query(); }
  std::chrono::milliseconds age() const;
  // WorkECCL(SeqNum=1, OpType=ALLREDUCE, ...)
  std::string describe() const;
  std::string describe_timeout() const;
  // The error of the communicator, or nothing; an aborted one is not asked.
  std::exception_ptr peer_error() const;
};

class WorkECCL : public c10d::Work {
 public:
  WorkECCL(std::shared_ptr<WorkState> state, int rank, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override { state_->communicator->abort(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return state_->seq; }

 private:
  friend class ProcessGroupECCL;
  void mark_future(at::Device device);
  void block_host(std::chrono::milliseconds timeout);

  const std::shared_ptr<WorkState> state_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool is_barrier_ = false;
  bool is_blocking_ = false;
};

}  // namespace emu
