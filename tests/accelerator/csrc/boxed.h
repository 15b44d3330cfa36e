// What the boxed kernels share.
#pragma once

#include <ATen/core/ivalue.h>

#include "memory.h"

namespace emu {

// Calls `visit` on each tensor of the value, those in lists included, and puts back what it returns.
template <typename Visit>
void replace_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(visit(*tensor)) : std::nullopt);
    }
    value = list;
  }
}

}  // namespace emu
