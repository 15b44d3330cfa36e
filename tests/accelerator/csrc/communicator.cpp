#include "communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdlib>
#include <cstring>

namespace emu {

namespace {

// Streams and counts that outlive all communicators, and the process' static objects.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::vector<Stream*>> unused_streams;
  std::map<int, int> num_running;
  double delay_s = 0;
};

double delay_from_environment() {
  const char* text = std::getenv("EMU_COLLECTIVE_DELAY_S");  // "0.5", or "1:0.5" for rank 1 alone
  if (text == nullptr || *text == '\0') return 0;
  const char* colon = std::strchr(text, ':');
  if (colon == nullptr) return std::atof(text);
  const char* rank = std::getenv("RANK");
  return rank != nullptr && std::atoi(rank) == std::atoi(text) ? std::atof(colon + 1) : 0;
}

Shared& shared() {
  static Shared* const all = [] {
    auto* made = new Shared();
    made->delay_s = delay_from_environment();
    return made;
  }();
  return *all;
}

Stream& take_stream(int device) {
  {
    std::lock_guard<std::mutex> lock(shared().mutex);
    auto& unused = shared().unused_streams[device];
    if (!unused.empty()) {
      auto* stream = unused.back();
      unused.pop_back();
      return *stream;
    }
  }
  return new_stream(device);
}

// Counts a transport as running while it lives.
struct Running {
  explicit Running(int device) : device(device) {
    std::lock_guard<std::mutex> lock(shared().mutex);
    ++shared().num_running[device];
  }
  ~Running() {
    std::lock_guard<std::mutex> lock(shared().mutex);
    --shared().num_running[device];
    shared().changed.notify_all();
  }
  const int device;
};

void accumulate(at::Tensor& sum, const at::Tensor& values, Communicator::Reduction reduction) {
  switch (reduction) {
    case c10d::ReduceOp::MIN:
      at::minimum_out(sum, sum, values);
      break;
    case c10d::ReduceOp::MAX:
      at::maximum_out(sum, sum, values);
      break;
    case c10d::ReduceOp::PRODUCT:
      sum.mul_(values);
      break;
    default:
      if (sum.scalar_type() == at::kBool) {
        sum.logical_or_(values);
      } else {
        sum.add_(values);
      }
  }
}

void finish_average(at::Tensor& sum, int size) {
  if (at::isIntegralType(sum.scalar_type(), /*includeBool=*/false)) {
    sum.div_(size, "trunc");
  } else {
    sum.div_(size);
  }
}

}  // namespace

Buffer::Buffer(const at::Tensor& tensor)
    : storage(tensor.storage()),
      data(static_cast<char*>(tensor.data_ptr())),
      numel(tensor.numel()),
      dtype(tensor.scalar_type()) {}

Buffer Buffer::part(int64_t start, int64_t count) const {
  Buffer part = *this;
  part.data += start * static_cast<int64_t>(c10::elementSize(dtype));
  part.numel = count;
  return part;
}

at::Tensor Buffer::view() const { return at::from_blob(data, {numel}, at::TensorOptions().dtype(dtype).device(at::kCPU)); }

Communicator::Communicator(std::shared_ptr<Mesh> mesh, int device)
    : mesh_(std::move(mesh)), device_(device), stream_(take_stream(device)) {}

Communicator::~Communicator() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().unused_streams[device_].push_back(&stream_);
}

void Communicator::run(const std::shared_ptr<Communicator>& communicator, Transport transport) {
  communicator->stream_.enqueue([communicator, transport = std::move(transport)] {
    Running running(communicator->device_);
    double delay_s = 0;
    {
      std::lock_guard<std::mutex> lock(shared().mutex);
      delay_s = shared().delay_s;
    }
    if (delay_s > 0 && !communicator->mesh_->pause(delay_s)) return;
    if (communicator->aborted()) return;
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    transport(*communicator);
  });
}

void Communicator::set_delay(double seconds) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().delay_s = seconds;
}

bool Communicator::wait_until_idle(int device, std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(shared().mutex);
  return shared().changed.wait_for(lock, limit, [device] { return shared().num_running[device] == 0; });
}

void Communicator::exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives) {
  mesh_->exchange(sends, receives);
}

void Communicator::broadcast(const Buffer& buffer, int root) {
  if (rank() != root) {
    mesh_->exchange({}, {{root, buffer.data, buffer.num_bytes()}});
    return;
  }
  std::vector<Piece> sends;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != root) sends.push_back({peer, buffer.data, buffer.num_bytes()});
  }
  mesh_->exchange(sends, {});
}

void Communicator::all_to_all(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs) {
  std::vector<Piece> sends, receives;
  for (size_t peer = 0; peer < inputs.size(); ++peer) {
    sends.push_back({static_cast<int>(peer), inputs[peer].data, inputs[peer].num_bytes()});
  }
  for (size_t peer = 0; peer < outputs.size(); ++peer) {
    receives.push_back({static_cast<int>(peer), outputs[peer].data, outputs[peer].num_bytes()});
  }
  mesh_->exchange(sends, receives);
}

void Communicator::reduce_received(const Buffer& own, std::vector<at::Tensor>& received, const Buffer& output,
                                   Reduction reduction) {
  at::Tensor sum;
  for (int peer = 0; peer < size(); ++peer) {
    const at::Tensor values = peer == rank() ? own.view() : received[peer];
    if (peer == 0) {
      sum = values.clone();
    } else {
      accumulate(sum, values, reduction);
    }
  }
  if (reduction == c10d::ReduceOp::AVG) finish_average(sum, size());
  output.view().copy_(sum);
}

void Communicator::all_reduce(const Buffer& input, const Buffer& output, Reduction reduction) {
  reduce_scatter(std::vector<Buffer>(size(), input), output, reduction);
}

void Communicator::reduce_scatter(const std::vector<Buffer>& inputs, const Buffer& output, Reduction reduction) {
  std::vector<at::Tensor> received(size());
  std::vector<Piece> sends, receives;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    received[peer] = at::zeros({output.numel}, at::TensorOptions().dtype(output.dtype));
    sends.push_back({peer, inputs[peer].data, inputs[peer].num_bytes()});
    receives.push_back({peer, static_cast<char*>(received[peer].data_ptr()), output.num_bytes()});
  }
  // After an abort too: as with NCCL the buffers then hold what had come so far.
  mesh_->exchange(sends, receives);
  Buffer own = inputs[rank()];
  own.numel = output.numel;
  reduce_received(own, received, output, reduction);
}

void Communicator::reduce(const Buffer& input, const Buffer& output, Reduction reduction, int root) {
  if (rank() != root) {
    mesh_->exchange({{root, input.data, input.num_bytes()}}, {});
    return;
  }
  std::vector<at::Tensor> received(size());
  std::vector<Piece> receives;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == root) continue;
    received[peer] = at::zeros({output.numel}, at::TensorOptions().dtype(output.dtype));
    receives.push_back({peer, static_cast<char*>(received[peer].data_ptr()), output.num_bytes()});
  }
  mesh_->exchange({}, receives);
  reduce_received(input, received, output, reduction);
}

}  // namespace emu
