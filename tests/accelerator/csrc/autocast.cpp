// Autocast for the device: the operations that PyTorch names for every backend, cast by two boxed kernels.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "boxed.h"

namespace emu {

namespace {

#define EMU_NAME(name) "aten::" #name
#define EMU_NAME_OVERLOAD(name, overload) "aten::" #name "." #overload
#define EMU_PICK(first, second, macro, ...) macro
#define EMU_OPERATION(...) EMU_PICK(__VA_ARGS__, EMU_NAME_OVERLOAD, EMU_NAME)(__VA_ARGS__),

const std::vector<const char*> kLower = {AT_FORALL_LOWER_PRECISION_FP(EMU_OPERATION)};
const std::vector<const char*> kFull = {AT_FORALL_FP32(EMU_OPERATION) AT_FORALL_FP32_SET_OPT_DTYPE(EMU_OPERATION)};

void call_with(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  for (size_t index = stack->size() - count; index < stack->size(); ++index) {
    replace_tensors((*stack)[index], [dtype](const at::Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kEmu) : tensor;
    });
  }
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_with(op, stack, at::autocast::get_autocast_dtype(kEmu));
}

void full(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call_with(op, stack, c10::ScalarType::Float); }

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const auto* name : kLower) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower>());
  for (const auto* name : kFull) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&full>());
}

}  // namespace emu
