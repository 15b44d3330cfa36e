// SPDX-License-Identifier: Apache-2.0
//
// A key that is the same for collectives whose records differ by number, time, thread and reduce-op only.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "trail.h"

namespace {

constexpr size_t kMaxKeyBytes = 4096;
constexpr int kNoWork = -2, kOnlyResult = -1;

// What of an operator's arguments and results is what; see operations.py.
struct Plan {
  uint32_t number;
  size_t group_at;
  int reduce_op_at;
  int work_at;
};

class Key {
 public:
  // Throws `NotAlike` where there is an argument of a kind that is not known here.
  Key(const Plan& plan, const c10d::ProcessGroup* group, const Trail& trail, const c10::IValue* args, size_t num_args)
      : has_places_(trail.in_reducer) {
    add(plan.number);
    add(static_cast<const void*>(group));
    for (const auto* code : {&trail.user, &trail.called, &trail.ddp}) add(static_cast<const void*>(code->ptr()));
    add(trail.at);
    add(trail.in_reducer);
    add(trail.callers.size());
    for (const auto& [code, at] : trail.callers) {
      add(static_cast<const void*>(code.ptr()));
      add(at);
    }
    for (size_t at = 0; at < num_args; ++at)
      if (at != plan.group_at && static_cast<int>(at) != plan.reduce_op_at) add_value(args[at]);
    if (text_.size() > kMaxKeyBytes) throw NotAlike();
  }

  std::string text() && { return std::move(text_); }

 private:
  template <typename T>
  void add(const T& value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void add_value(const c10::IValue& value) {
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isList()) {
      const auto items = value.toListRef();
      add('L');
      add(items.size());
      for (const auto& item : items) add_value(item);
    } else if (value.isInt()) {
      add('I');
      add(value.toInt());
    } else if (value.isBool()) {
      add(value.toBool() ? 'Y' : 'N');
    } else if (value.isNone()) {
      add('0');
    } else {
      throw NotAlike();
    }
  }

  void add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != c10::kStrided) throw NotAlike();
    add('T');
    add(tensor.scalar_type());
    add(tensor.device());
    add(tensor.dim());
    for (const auto size : tensor.sizes()) add(size);
    if (has_places_) {
      // Nothing else tells a bucket from another one that is as long; the reducer keeps them where they are.
      add(tensor.unsafeGetTensorImpl()->storage().data());
      add(tensor.storage_offset());
    }
  }

  const bool has_places_;
  std::string text_;
};

}  // namespace
