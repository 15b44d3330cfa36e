#include "work.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Logging.h>

#include <thread>

namespace emu {

namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(1);

}  // namespace

std::chrono::milliseconds WorkState::age() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - started);
}

std::string WorkState::describe() const {
  return c10::str("WorkECCL(SeqNum=", seq, ", OpType=", c10d::opTypeToString(kind), ", NumelIn=", numel_in,
                  ", NumelOut=", numel_out, ", Timeout(ms)=", timeout.count(), ")");
}

std::string WorkState::describe_timeout() const {
  return c10::str(group, "Watchdog caught collective operation timeout: ", describe(), " ran for ", age().count(),
                  " milliseconds before timing out.");
}

std::exception_ptr WorkState::peer_error() const {
  if (communicator->aborted()) return nullptr;
  const std::string why = communicator->error();
  if (why.empty()) return nullptr;
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, c10::str("ECCL error: ", why)));
}

WorkECCL::WorkECCL(std::shared_ptr<WorkState> state, int rank, const char* title, const std::vector<at::Tensor>& inputs,
                   std::vector<at::Tensor> outputs)
    : Work(rank, state->kind, title, inputs), state_(std::move(state)), outputs_(std::move(outputs)) {}

bool WorkECCL::isCompleted() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!exception_) exception_ = state_->peer_error();
    if (exception_) return true;
  }
  return state_->is_finished();
}

bool WorkECCL::isSuccess() const { C10_THROW_ERROR(NotImplementedError, "WorkECCL::isSuccess() is deprecated"); }

void WorkECCL::synchronize() { state_->end.block(current_stream(state_->communicator->device())); }

void WorkECCL::block_host(std::chrono::milliseconds timeout) {
  count_host_sync("work.wait");
  const auto limit = timeout == kNoTimeout ? state_->timeout : timeout;
  const auto began = std::chrono::steady_clock::now();
  while (!isCompleted()) {
    if (std::chrono::steady_clock::now() - began >= limit) {
      const auto message = state_->describe_timeout();
      LOG(ERROR) << message;
      std::lock_guard<std::mutex> lock(mutex_);
      exception_ = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
      return;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

bool WorkECCL::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (is_blocking_ || timeout != kNoTimeout) {
    without_gil([this, timeout] { block_host(timeout); });
  } else if (is_barrier_ && !isCompleted()) {
    current_stream(state_->communicator->device()).synchronize();
  }
  if (auto error = exception()) {
    abort();
    std::rethrow_exception(error);
  }
  return true;
}

void WorkECCL::mark_future(at::Device device) {
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<at::Device>{device});
  // The future's consumers wait for the stream that is current here, without the host.
  Stream& before = current_stream(device.index());
  set_current_stream(state_->communicator->stream());
  future_->markCompleted(at::IValue(outputs_));
  set_current_stream(before);
  if (recordFunctionEndCallback_) {
    future_->addCallback([end = recordFunctionEndCallback_](c10::ivalue::Future&) { end(); }, /*uses_future=*/false);
  }
}

}  // namespace emu
