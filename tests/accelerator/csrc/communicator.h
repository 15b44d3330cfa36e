// One communicator: a mesh of sockets, a stream of its own, and the collectives that run on it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mesh.h"
#include "runtime.h"

namespace emu {

// The memory of a tensor. Holds the storage and not the tensor, which may belong to Python.
struct Buffer {
  c10::Storage storage;
  char* data = nullptr;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  Buffer() = default;
  explicit Buffer(const at::Tensor& tensor);

  size_t num_bytes() const { return numel * c10::elementSize(dtype); }
  // The part of `numel` elements that starts at the element `start`.
  Buffer part(int64_t start, int64_t numel) const;
  // A CPU tensor over this memory.
  at::Tensor view() const;
};

class Communicator {
 public:
  using Reduction = c10d::ReduceOp::RedOpType;

  Communicator(std::shared_ptr<Mesh> mesh, int device);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Runs on the stream, after those before. Once aborted it does nothing.
  using Transport = std::function<void(Communicator&)>;
  static void run(const std::shared_ptr<Communicator>& communicator, Transport transport);

  // What follows is for transports. They return at an abort too, with whatever has come in the buffers.
  void broadcast(const Buffer& buffer, int root);
  void all_reduce(const Buffer& input, const Buffer& output, Reduction reduction);
  void reduce(const Buffer& input, const Buffer& output, Reduction reduction, int root);
  // Sends part `i` of `inputs` to rank `i`, and receives part `i` of `outputs` from it; an empty list sends nothing.
  void all_to_all(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs);
  void reduce_scatter(const std::vector<Buffer>& inputs, const Buffer& output, Reduction reduction);
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives);

  void abort() { mesh_->abort(); }
  bool aborted() const { return mesh_->aborted(); }
  std::string error() { return mesh_->error(); }
  int rank() const { return mesh_->rank(); }
  int size() const { return mesh_->size(); }
  int device() const { return device_; }
  Stream& stream() { return stream_; }

  // How long every transport of this process waits before it begins, for tests.
  static void set_delay(double seconds);
  // Waits until no communicator on the device has a transport that runs.
  static bool wait_until_idle(int device, std::chrono::milliseconds limit);

 private:
  // Reduces what all ranks have sent, in the order of their ranks.
  void reduce_received(const Buffer& own, std::vector<at::Tensor>& received, const Buffer& output, Reduction reduction);

  const std::shared_ptr<Mesh> mesh_;
  const int device_;
  Stream& stream_;
};

}  // namespace emu
