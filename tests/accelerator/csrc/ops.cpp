// The operations. Few have a kernel of their own; the rest go through one fallback: the host learns the outputs' shapes
// from the Meta backend, allocates them, and enqueues a closure that runs the CPU kernel over the same memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <unordered_set>
#include <unordered_map>

#include "boxed.h"
#include "generator.h"
#include "memory.h"

namespace emu {

namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_emu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kEmu; }

Stream& stream_of(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

void wait_for(Stream& stream, const std::string& why) {
  count_host_sync(why);
  check_device(stream.device());
  without_gil([&stream] { stream.drain(); });
  check_device(stream.device());
}

// ---------------------------------------------------------------- memory and views

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "emu tensors are strided");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "emu tensors are strided");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys, c10::dtype_or_default(dtype));
}

void reshape(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t bytes =
      at::detail::computeStorageNbytes(size, stride, tensor.dtype().itemsize(), static_cast<size_t>(impl->storage_offset()));
  if (c10::multiply_integers(size) > 0 && bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  impl->set_sizes_and_strides(size, stride);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size) {
    std::vector<int64_t> strides(size.size());
    int64_t step = 1;
    for (size_t dim = size.size(); dim-- > 0;) {
      strides[dim] = step;
      step *= std::max<int64_t>(size[dim], 1);
    }
    reshape(self, size, strides);
  }
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage_(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_empty_(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- copies

// The host's side of a copy: its memory is held while the copy is in flight, not the tensor.
at::Tensor held(const at::Tensor& tensor) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void enqueue_copy(Stream& stream, const at::Tensor& source, const at::Tensor& target) {
  stream.enqueue([source, target] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    target.copy_(source);
  });
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& stream = stream_of(target);
  const bool pinned = is_pinned(source.storage().data());
  if (non_blocking && !pinned) {
    // Memory that the driver cannot read by itself is staged before the call returns.
    enqueue_copy(stream, source.clone(), cpu_alias(target));
    return;
  }
  enqueue_copy(stream, held(source), cpu_alias(target));
  if (!non_blocking) wait_for(stream, "copy to device");
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& stream = stream_of(source);
  enqueue_copy(stream, cpu_alias(source), held(target));
  if (!non_blocking || !is_pinned(target.storage().data())) wait_for(stream, "copy to host");
}

void copy_between(const at::Tensor& source, const at::Tensor& target) {
  auto& from = stream_of(source);
  auto& to = stream_of(target);
  if (&from == &to) {
    enqueue_copy(from, cpu_alias(source), cpu_alias(target));
    return;
  }
  Event ready, done;
  ready.record(to);
  ready.block(from);
  enqueue_copy(from, cpu_alias(source), cpu_alias(target));
  done.record(from);
  done.block(to);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_device((is_emu(source) ? source : target).device().index());
  if (target.numel() == 0 || source.is_same(target)) return target;
  if (is_emu(source) && is_emu(target)) {
    copy_between(source, target);
  } else if (is_emu(source)) {
    copy_to_host(source, target, non_blocking);
  } else {
    copy_to_device(source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar_dense(const at::Tensor& self) {
  wait_for(stream_of(self), "item");
  return at::_local_scalar_dense(cpu_alias(self));
}

// ---------------------------------------------------------------- the fallback

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  IValue copy = value;
  replace_tensors(copy, [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_emu(tensor) && tensor.dim() == 0) return tensor;  // a number of the host stays one
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(*stack) {
    const auto values = torch::jit::last(stack_, schema_.arguments().size());
    arguments_.assign(values.begin(), values.end());
    device_ = find_device();
  }

  void run() {
    check_device(device_);
    const c10::DeviceGuard guard(c10::Device(kEmu, static_cast<c10::DeviceIndex>(device_)));
    bring_indices();
    if (is_data_dependent() || (!infer() && !is_in_place())) {
      run_now();
    } else {
      run_later();
    }
    torch::jit::drop(stack_, schema_.arguments().size());
    for (auto& value : returns_) torch::jit::push(stack_, std::move(value));
  }

 private:
  int find_device() {
    std::optional<at::Tensor> first;
    std::optional<at::Tensor> host;
    for (const auto& value : arguments_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_emu(tensor)) {
          if (tensor.dim() > 0) host = tensor;
        } else if (!first.has_value()) {
          first = tensor;
        } else {
          TORCH_CHECK(first->device() == tensor.device(), two_devices(first->device(), tensor.device()));
        }
      });
    }
    if (host.has_value() && first.has_value() && !takes_host_tensors()) {
      TORCH_CHECK(false, two_devices(first->device(), host->device()));
    }
    if (first.has_value()) return first->device().index();
    for (const auto& value : arguments_) {
      if (value.isDevice() && value.toDevice().type() == kEmu && value.toDevice().has_index()) return value.toDevice().index();
    }
    return current_device();
  }

  std::string two_devices(c10::Device one, c10::Device other) const {
    return c10::str("Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
                    "! (when calling ", name_, ")");
  }

  bool is_index() const {
    return name_ == "aten::index" || name_ == "aten::index_put_" || name_ == "aten::_index_put_impl_" ||
           name_ == "aten::index_put" || name_ == "aten::_unsafe_index" || name_ == "aten::_unsafe_index_put";
  }

  bool takes_host_tensors() const {
    return is_index() || name_.rfind("aten::_foreach", 0) == 0 || name_ == "aten::_pack_padded_sequence" ||
           name_ == "aten::_ctc_loss" || name_ == "aten::_ctc_loss_backward";
  }

  // Indices may be on the host, as on CUDA: they are copied.
  void bring_indices() {
    if (!is_index()) return;
    const c10::Device device(kEmu, static_cast<c10::DeviceIndex>(device_));
    for (auto& value : arguments_) {
      if (!value.isOptionalTensorList() && !value.isTensorList()) continue;
      replace_tensors(value, [&device](const at::Tensor& tensor) {
        return tensor.defined() && !is_emu(tensor) ? tensor.to(device) : tensor;
      });
    }
  }

  bool has_mask() const {
    bool found = false;
    for (const auto& value : arguments_) {
      if (!value.isOptionalTensorList() && !value.isTensorList()) continue;
      each_tensor(value, [&found](const at::Tensor& tensor) {
        found = found || tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte;
      });
    }
    return found;
  }

  bool is_data_dependent() const {
    if (is_index()) {
      if (!has_mask()) return false;
      const bool fills = name_.find("index_put") != std::string::npos && arguments_[2].toTensor().numel() == 1;
      return !fills;
    }
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) return true;
    if (schema_.returns().empty()) return false;
    for (const auto& value : schema_.returns()) {
      const auto kind = value.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
    }
    return false;
  }

  // Only writes into arguments, whose shapes it leaves: then no Meta kernel is needed.
  bool is_in_place() const {
    for (const auto& argument : schema_.arguments()) {
      if (argument.is_out()) return false;
    }
    for (const auto& value : schema_.returns()) {
      if (aliased(value) < 0 || !value.alias_info()->isWrite()) return false;
    }
    return true;
  }

  // What the kernel gets in place of the arguments.
  template <typename Visit>
  Stack replaced(const Visit& visit, c10::DeviceType device) const {
    Stack values = arguments_;
    for (auto& value : values) {
      if (value.isDevice()) {
        if (value.toDevice().type() == kEmu) value = c10::Device(device);
      } else {
        replace_tensors(value, visit);
      }
    }
    return values;
  }

  // Asks the Meta backend for the outputs; false where it cannot know them.
  bool infer() {
    static auto* const unknown = new std::unordered_set<c10::OperatorName>();
    static auto* const mutex = new std::mutex();
    {
      std::lock_guard<std::mutex> lock(*mutex);
      if (unknown->count(schema_.operator_name()) > 0) return false;
    }
    std::unordered_map<c10::TensorImpl*, at::Tensor> metas;
    metas_ = replaced(
        [&metas](const at::Tensor& tensor) -> at::Tensor {
          if (!tensor.defined()) return tensor;
          auto& meta = metas[tensor.unsafeGetTensorImpl()];
          if (!meta.defined()) meta = to_meta(tensor);
          return meta;
        },
        c10::DeviceType::Meta);
    for (auto& value : metas_) {
      if (value.isGenerator()) value = IValue();
    }
    results_ = metas_;
    bool known = true;
    try {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op_.callBoxed(&results_);
    } catch (pybind11::error_already_set& error) {
      const pybind11::gil_scoped_acquire gil;
      // Python's decomposition of a mean divides by the number of rows; the kernel of no row gives NaN.
      if (error.matches(PyExc_ZeroDivisionError)) return false;
      if (!error.matches(PyExc_NotImplementedError)) throw;
      known = false;
    } catch (python_error& error) {
      const pybind11::gil_scoped_acquire gil;
      error.persist();  // takes it from the interpreter, which keeps it until then
      if (PyErr_GivenExceptionMatches(error.type, PyExc_ZeroDivisionError)) return false;
      if (!PyErr_GivenExceptionMatches(error.type, PyExc_NotImplementedError)) throw;
      known = false;
    } catch (const c10::NotImplementedError&) {
      known = false;
    }
    if (known) return true;
    std::lock_guard<std::mutex> lock(*mutex);
    unknown->insert(schema_.operator_name());
    return false;
  }

  // The argument that a return is an alias of, or -1.
  int aliased(const c10::Argument& value) const {
    const auto* alias = value.alias_info();
    if (alias == nullptr) return -1;
    const auto& arguments = schema_.arguments();
    for (size_t index = 0; index < arguments.size(); ++index) {
      const auto* other = arguments[index].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int>(index);
    }
    return -1;
  }

  at::Tensor allocate(const at::Tensor& like) const {
    if (!like.defined()) return like;
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(kEmu, static_cast<c10::DeviceIndex>(device_)));
  }

  void resize_outputs() {
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto* alias = schema_.arguments()[index].alias_info();
      if (alias == nullptr || !alias->isWrite() || !arguments_[index].isTensor()) continue;
      const auto& tensor = arguments_[index].toTensor();
      if (!tensor.defined()) continue;
      const auto& meta = metas_[index].toTensor();
      if (tensor.sizes() != meta.sizes()) reshape(tensor, meta.sizes(), meta.strides());
    }
  }

  // Fills returns_ from what Meta gave; `fresh` are the ones whose values the kernel's own outputs hold.
  void allocate_returns(std::vector<std::pair<size_t, IValue>>& fresh) {
    for (size_t index = 0; index < schema_.returns().size(); ++index) {
      const auto& declared = schema_.returns()[index];
      const int argument = aliased(declared);
      if (argument >= 0 && declared.alias_info()->isWrite()) {
        returns_.push_back(arguments_[argument]);
      } else if (argument >= 0 && results_[index].isTensor()) {
        const auto& meta = results_[index].toTensor();
        const auto& base = arguments_[argument].toTensor();
        returns_.emplace_back(at::native::as_strided_tensorimpl(base, meta.sizes(), meta.strides(), base.storage_offset()));
      } else {
        IValue value = results_[index];
        replace_tensors(value, [this](const at::Tensor& meta) { return allocate(meta); });
        returns_.push_back(value);
        IValue target = value;
        replace_tensors(target, [](const at::Tensor& tensor) { return cpu_alias(tensor); });
        fresh.emplace_back(index, std::move(target));
      }
    }
  }

  Stack kernel_arguments() {
    Stack values = replaced(
        [](const at::Tensor& tensor) -> at::Tensor {
          if (!tensor.defined()) return tensor;
          if (is_emu(tensor)) return cpu_alias(tensor);
          if (tensor.dim() > 0) return tensor;
          auto copy = tensor.detach().clone();  // a number of the host is read when the call is made
          if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copy;
        },
        c10::DeviceType::CPU);
    for (size_t index = 0; index < values.size(); ++index) {
      const auto& type = schema_.arguments()[index].type();
      if (!type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) continue;
      auto generator = values[index].isNone() ? default_generator(device_) : values[index].toGenerator();
      TORCH_CHECK(generator.device().type() == kEmu, "Expected a 'emu' device type for generator but found '",
                  generator.device().type(), "'");
      values[index] = generator.get<Generator>()->next();
    }
    for (size_t index = 0; index < values.size(); ++index) {
      // The kernel sizes its `out` as it likes; what it leaves there is copied.
      if (!schema_.arguments()[index].is_out() || !values[index].isTensor()) continue;
      values[index] = at::empty({0}, values[index].toTensor().options());
    }
    return values;
  }

  static void fill(const std::string& name, const IValue& target, const IValue& result) {
    if (target.isTensor()) {
      const auto& to = target.toTensor();
      if (!to.defined()) return;
      const auto& from = result.toTensor();
      // In eval mode the CPU's kernel has no statistics of the batch to return, and nothing reads them.
      if (from.defined() && from.numel() == 0 && name.find("batch_norm") != std::string::npos) return;
      TORCH_CHECK(from.defined() && from.sizes() == to.sizes(), name, " on the CPU returned a tensor of ",
                  from.defined() ? c10::str(from.sizes()) : "no", " sizes where Meta had said ", to.sizes());
      if (to.numel() > 0) to.copy_(from);
    } else if (target.isTensorList()) {
      const auto to = target.toTensorVector();
      const auto from = result.toTensorVector();
      for (size_t index = 0; index < to.size(); ++index) fill(name, to[index], from[index]);
    }
  }

  void run_later() {
    resize_outputs();
    std::vector<std::pair<size_t, IValue>> fresh;
    allocate_returns(fresh);
    Stack values = kernel_arguments();
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    for (size_t index = 0; index < values.size(); ++index) {
      if (!schema_.arguments()[index].is_out() || !values[index].isTensor()) continue;
      outs.emplace_back(cpu_alias(arguments_[index].toTensor()), values[index].toTensor());
    }
    current_stream(device_).enqueue(
        [op = op_, values = std::move(values), fresh = std::move(fresh), outs = std::move(outs), name = name_]() mutable {
          const at::AutoDispatchBelowADInplaceOrView guard;
          op.callBoxed(&values);
          for (auto& [index, target] : fresh) fill(name, target, values[index]);
          for (auto& [target, result] : outs) fill(name, target, result);
        });
  }

  // Waits for the device and runs the kernel in this thread.
  void run_now() {
    wait_for(current_stream(device_), "data-dependent " + name_.substr(name_.find("::") + 2));
    Stack values = kernel_arguments();
    const auto& arguments = schema_.arguments();
    const Stack kept = values;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op_.callBoxed(&values);
    }
    for (size_t index = 0; index < kept.size(); ++index) {
      if (!arguments[index].is_out() || !kept[index].isTensor()) continue;
      const auto& result = kept[index].toTensor();
      const auto& out = arguments_[index].toTensor();
      if (out.sizes() != result.sizes()) reshape(out, result.sizes(), result.strides());
      cpu_alias(out).copy_(result);
    }
    for (size_t index = 0; index < schema_.returns().size(); ++index) {
      const int argument = aliased(schema_.returns()[index]);
      if (argument >= 0) {
        returns_.push_back(arguments_[argument]);
        continue;
      }
      IValue value = values[index];
      replace_tensors(value, [this](const at::Tensor& result) {
        auto tensor = allocate(result);
        if (tensor.defined() && tensor.numel() > 0) cpu_alias(tensor).copy_(result);
        return tensor;
      });
      returns_.push_back(std::move(value));
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack& stack_;
  Stack arguments_;
  int device_;
  Stack metas_;    // the arguments that the Meta backend got
  Stack results_;  // what it returned
  Stack returns_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// ---------------------------------------------------------------- operations that the fallback would get wrong

// The CPU's takes no generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  mask.bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage_);
  library.impl("set_.source_Storage", &set_whole_storage_);
  library.impl("set_.source_Tensor", &set_tensor_);
  library.impl("set_", &set_empty_);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("native_dropout", &native_dropout);
  // Without these PyTorch would look for convolution_overrideable.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace emu
