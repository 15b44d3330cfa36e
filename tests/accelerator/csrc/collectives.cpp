// The calls of the backend `eccl`: what each checks, and what it does on the communicator.
#include "process_group.h"

namespace emu {

namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

void check_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return;
    default:
      C10_THROW_ERROR(TypeError, c10::str("Input tensor data type is not supported for ECCL process group: ", type));
  }
}

void check(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != at::kPrivateUse1 || tensor.layout() != at::kStrided) {
    C10_THROW_ERROR(ValueError, "Tensors must be EMU and dense");
  }
  if (!tensor.is_contiguous(tensor.suggest_memory_format())) C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
  check_type(tensor.scalar_type());
}

void check(const Tensors& tensors) {
  if (tensors.empty()) C10_THROW_ERROR(ValueError, "Tensor list must be nonempty");
  for (const auto& tensor : tensors) check(tensor);
}

template <typename T>
T& only(std::vector<T>& values) {
  if (values.size() != 1) {
    C10_THROW_ERROR(ValueError,
                    "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread. "
                    "The support for such usage has been deprecated.");
  }
  return values[0];
}

at::Tensor& only_checked(Tensors& tensors) {
  auto& tensor = only(tensors);
  check(tensor);
  return tensor;
}

void check_parts(const Tensors& parts, const at::Tensor& like, int size) {
  check(parts);
  if (static_cast<int>(parts.size()) != size) {
    C10_THROW_ERROR(ValueError, c10::str("Tensor list should have one tensor per rank: ", parts.size(), " for ", size));
  }
  if (parts[0].scalar_type() != like.scalar_type()) C10_THROW_ERROR(TypeError, "Tensors must have identical type");
}

void check_multiple(const at::Tensor& whole, const at::Tensor& part, int size, const char* what) {
  check(whole);
  check(part);
  if (whole.scalar_type() != part.scalar_type()) {
    C10_THROW_ERROR(TypeError, "output tensor must have the same type as input tensor");
  }
  if (whole.numel() != part.numel() * size) C10_THROW_ERROR(ValueError, what);
}

// As NCCL, complex numbers are reduced as pairs of real ones.
Buffer reducible(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return Buffer(tensor);
  TORCH_CHECK(c10d::isComplexViewAsRealAllowed(op), "this reduction does not support complex tensors");
  return Buffer(at::view_as_real(tensor));
}

Communicator::Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  switch (op.op_) {
    case c10d::ReduceOp::BAND:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND with ECCL");
    case c10d::ReduceOp::BOR:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BOR with ECCL");
    case c10d::ReduceOp::BXOR:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BXOR with ECCL");
    case c10d::ReduceOp::AVG:
      if (tensor.scalar_type() == at::kBool) C10_THROW_ERROR(TypeError, "Cannot use ReduceOp.AVG with boolean inputs");
      break;
    case c10d::ReduceOp::PREMUL_SUM:
      C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.PREMUL_SUM with ECCL");
    default:
      break;
  }
  return op.op_;
}

std::vector<Buffer> buffers_of(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

std::vector<Buffer> equal_parts(const Buffer& whole, int size) {
  std::vector<Buffer> parts;
  const int64_t numel = whole.numel / size;
  for (int part = 0; part < size; ++part) parts.push_back(whole.part(part * numel, numel));
  return parts;
}

// The parts of dimension 0 that `sizes` gives, or equal ones.
std::vector<Buffer> split_parts(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int size) {
  const Buffer whole(tensor);
  if (sizes.empty()) {
    TORCH_CHECK(tensor.size(0) % size == 0, "Tensor's dim 0 does not divide equally across group size");
    return equal_parts(whole, size);
  }
  TORCH_CHECK(static_cast<int>(sizes.size()) == size, "Number of tensor splits not equal to group size");
  const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
  std::vector<Buffer> parts;
  int64_t start = 0;
  for (const int64_t rows : sizes) {
    parts.push_back(whole.part(start * row, rows * row));
    start += rows;
  }
  TORCH_CHECK(start == tensor.size(0), "Split sizes doesn't match total dim 0 size");
  return parts;
}

Communicator::Transport all_gather_into(const Buffer& input, std::vector<Buffer> outputs) {
  return [input, outputs = std::move(outputs)](Communicator& self) {
    self.all_to_all(std::vector<Buffer>(outputs.size(), input), outputs);
  };
}

Communicator::Transport one_after_the_other(std::vector<Communicator::Transport> transports) {
  return [transports = std::move(transports)](Communicator& self) {
    for (const auto& transport : transports) transport(self);
  };
}

}  // namespace

using Group = ProcessGroupECCL;

Group::Work Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto& tensor = only_checked(tensors);
  const int root = static_cast<int>(options.rootRank);
  return collective({OpType::BROADCAST, "eccl:broadcast", {tensor}, {tensor}, options.asyncOp},
                    [buffer = Buffer(tensor), root](Communicator& self) { self.broadcast(buffer, root); });
}

Group::Work Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto& tensor = only_checked(tensors);
  const auto buffer = reducible(tensor, options.reduceOp);
  const auto reduction = reduction_of(options.reduceOp, tensor);
  return collective({OpType::ALLREDUCE, "eccl:all_reduce", {tensor}, {tensor}, options.asyncOp},
                    [buffer, reduction](Communicator& self) { self.all_reduce(buffer, buffer, reduction); });
}

Group::Work Group::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  check(tensors);
  std::vector<Communicator::Transport> transports;
  for (const auto& tensor : tensors) {
    const auto buffer = reducible(tensor, options.reduceOp);
    const auto reduction = reduction_of(options.reduceOp, tensor);
    transports.push_back([buffer, reduction](Communicator& self) { self.all_reduce(buffer, buffer, reduction); });
  }
  return collective({OpType::COALESCED, "eccl:allreduce_coalesced", tensors, tensors, options.asyncOp},
                    one_after_the_other(std::move(transports)));
}

Group::Work Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto& tensor = only_checked(tensors);
  const auto buffer = reducible(tensor, options.reduceOp);
  const auto reduction = reduction_of(options.reduceOp, tensor);
  const int root = static_cast<int>(options.rootRank);
  return collective({OpType::REDUCE, "eccl:reduce", {tensor}, {tensor}, options.asyncOp},
                    [buffer, reduction, root](Communicator& self) { self.reduce(buffer, buffer, reduction, root); });
}

Group::Work Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto& input = only_checked(inputs);
  auto& parts = only(outputs);
  check_parts(parts, input, size_);
  return collective({OpType::ALLGATHER, "eccl:all_gather", {input}, parts, options.asyncOp},
                    all_gather_into(Buffer(input), buffers_of(parts)));
}

Group::Work Group::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  check_multiple(output, input, size_, "output tensor size must be equal to world_size times input tensor size");
  return collective({OpType::_ALLGATHER_BASE, "eccl:_all_gather_base", {input}, {output}, options.asyncOp},
                    all_gather_into(Buffer(input), equal_parts(Buffer(output), size_)));
}

Group::Work Group::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& options) {
  std::vector<Communicator::Transport> transports;
  for (size_t at = 0; at < inputs.size(); ++at) {
    check_multiple(outputs.at(at), inputs[at], size_,
                   "output tensor size must be equal to world_size times input tensor size");
    transports.push_back(all_gather_into(Buffer(inputs[at]), equal_parts(Buffer(outputs[at]), size_)));
  }
  return collective({OpType::COALESCED, "eccl:all_gather_into_tensor_coalesced", inputs, outputs, options.asyncOp},
                    one_after_the_other(std::move(transports)));
}

Group::Work Group::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ReduceScatterOptions& options) {
  auto& output = only_checked(outputs);
  auto& parts = only(inputs);
  check_parts(parts, output, size_);
  const auto reduction = reduction_of(options.reduceOp, output);
  std::vector<Buffer> buffers;
  for (const auto& part : parts) buffers.push_back(reducible(part, options.reduceOp));
  return collective({OpType::REDUCE_SCATTER, "eccl:reduce_scatter", parts, {output}, options.asyncOp},
                    [buffers, target = reducible(output, options.reduceOp), reduction](Communicator& self) {
                      self.reduce_scatter(buffers, target, reduction);
                    });
}

Group::Work Group::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  check_multiple(input, output, size_, "input tensor must be the same size as output size times world size");
  const auto reduction = reduction_of(options.reduceOp, output);
  const auto buffers = equal_parts(reducible(input, options.reduceOp), size_);
  return collective({OpType::_REDUCE_SCATTER_BASE, "eccl:_reduce_scatter_base", {input}, {output}, options.asyncOp},
                    [buffers, target = reducible(output, options.reduceOp), reduction](Communicator& self) {
                      self.reduce_scatter(buffers, target, reduction);
                    });
}

Group::Work Group::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  std::vector<Communicator::Transport> transports;
  for (size_t at = 0; at < inputs.size(); ++at) {
    check_multiple(inputs[at], outputs.at(at), size_, "input tensor must be the same size as output size times world size");
    const auto reduction = reduction_of(options.reduceOp, outputs[at]);
    const auto buffers = equal_parts(reducible(inputs[at], options.reduceOp), size_);
    transports.push_back([buffers, target = reducible(outputs[at], options.reduceOp), reduction](Communicator& self) {
      self.reduce_scatter(buffers, target, reduction);
    });
  }
  return collective({OpType::COALESCED, "eccl:reduce_scatter_tensor_coalesced", inputs, outputs, options.asyncOp},
                    one_after_the_other(std::move(transports)));
}

Group::Work Group::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                 std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  check(input);
  check(output);
  const auto from = split_parts(input, input_sizes, size_);
  const auto to = split_parts(output, output_sizes, size_);
  return collective({OpType::ALLTOALL_BASE, "eccl:all_to_all", {input}, {output}, options.asyncOp},
                    [from, to](Communicator& self) { self.all_to_all(from, to); });
}

Group::Work Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_parts(inputs, outputs.at(0), size_);
  check_parts(outputs, inputs[0], size_);
  return collective({OpType::ALLTOALL, "eccl:all_to_all", inputs, outputs, options.asyncOp},
                    [from = buffers_of(inputs), to = buffers_of(outputs)](Communicator& self) {
                      self.all_to_all(from, to);
                    });
}

Group::Work Group::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto& input = only_checked(inputs);
  const int root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (rank_ == root) {
    parts = only(outputs);
    check_parts(parts, input, size_);
  }
  return collective({OpType::GATHER, "eccl:gather", {input}, parts, options.asyncOp},
                    [from = Buffer(input), to = buffers_of(parts), root](Communicator& self) {
                      std::vector<Buffer> sent(self.size());
                      sent[root] = from;
                      self.all_to_all(sent, to);
                    });
}

Group::Work Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto& output = only_checked(outputs);
  const int root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (rank_ == root) {
    parts = only(inputs);
    check_parts(parts, output, size_);
  }
  return collective({OpType::SCATTER, "eccl:scatter", parts, {output}, options.asyncOp},
                    [from = buffers_of(parts), to = Buffer(output), root](Communicator& self) {
                      std::vector<Buffer> received(self.size());
                      received[root] = to;
                      self.all_to_all(from, received);
                    });
}

Group::Work Group::send(Tensors& tensors, int peer, int /*tag*/) {
  auto& tensor = only_checked(tensors);
  return point_to_point({OpType::SEND, "eccl:send", {tensor}, {}, true}, peer);
}

Group::Work Group::recv(Tensors& tensors, int peer, int /*tag*/) {
  auto& tensor = only_checked(tensors);
  return point_to_point({OpType::RECV, "eccl:recv", {}, {tensor}, true}, peer);
}

at::Device Group::barrier_device(const c10d::BarrierOptions& options) {
  if (options.device && options.device->type() == at::kPrivateUse1) return *options.device;
  if (!options.device_ids.empty()) return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(options.device_ids[0])};
  if (bound_device_id_) return *bound_device_id_;
  if (last_device_ >= 0) return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(last_device_)};
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(rank_ % num_devices())};
}

Group::Work Group::barrier(const c10d::BarrierOptions& options) {
  at::Device device = barrier_device(options);
  if (!device.has_index()) device.set_index(static_cast<c10::DeviceIndex>(current_device()));
  const at::Tensor tensor = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kFloat));
  Call call{OpType::ALLREDUCE, "eccl:all_reduce_barrier", {tensor}, {tensor}, options.asyncOp};
  call.is_barrier = true;
  return collective(call, [buffer = Buffer(tensor)](Communicator& self) { self.all_reduce(buffer, buffer, c10d::ReduceOp::SUM); });
}

}  // namespace emu
