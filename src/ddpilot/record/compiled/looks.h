// SPDX-License-Identifier: Apache-2.0
//
// What guard looks at in every step. All of it needs Python's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

constexpr int64_t kMaxElements = 8192;  // of more of them an operator takes less

// `exponent`: its bits, which are all set in what is not finite.
template <typename Bits>
bool are_finite(const void* numbers, int64_t num, Bits exponent) {
  bool is_any = false;
  for (int64_t at = 0; at < num; ++at) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(numbers) + at * sizeof bits, sizeof bits);
    is_any |= (bits & exponent) == exponent;
  }
  return !is_any;
}

// True for a small tensor in the CPU's memory that has finite numbers only; of all else an operator is to tell.
bool is_surely_finite(const py::handle& given) {
  if (!THPVariable_CheckExact(given.ptr())) return false;
  const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
  if (!tensor.is_cpu() || tensor.layout() != c10::kStrided || !tensor.has_storage() || !tensor.is_contiguous())
    return false;
  const int64_t num = tensor.numel();
  const void* numbers = tensor.const_data_ptr();
  if (num > kMaxElements || numbers == nullptr) return false;
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      return are_finite<uint64_t>(numbers, num, 0x7FF0000000000000U);
    case c10::kFloat:
      return are_finite<uint32_t>(numbers, num, 0x7F800000U);
    case c10::kBFloat16:
      return are_finite<uint16_t>(numbers, num, 0x7F80U);
    case c10::kHalf:
      return are_finite<uint16_t>(numbers, num, 0x7C00U);
    default:
      return false;
  }
}

// What a backward changes of the gradients of some parameters, of which it keeps no reference.
class Gradients {
 public:
  explicit Gradients(const py::list& parameters) {
    for (const auto& parameter : parameters)
      if (THPVariable_Check(parameter.ptr()))
        parameters_.emplace_back(THPVariable_Unpack(parameter.ptr()).getIntrusivePtr());
  }

  // What `have_changed` compares with.
  py::bytes state() const {
    std::string state;
    for (const auto& parameter : parameters_) {
      const State one = state_of(parameter);
      state.append(reinterpret_cast<const char*>(&one), sizeof one);
    }
    return state;
  }

  // The first one mostly tells.
  bool have_changed(std::string_view before) const {
    TORCH_CHECK(before.size() == parameters_.size() * sizeof(State), "a state of ", before.size(), " bytes");
    for (size_t place = 0; place < parameters_.size(); ++place) {
      const State one = state_of(parameters_[place]);
      if (std::memcmp(&one, before.data() + place * sizeof one, sizeof one) != 0) return true;
    }
    return false;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using State = std::array<uint64_t, 2>;

  // Where its gradient lies, and how often that was written to; zeros for none.
  static State state_of(const Weak& parameter) {
    const auto held = parameter.lock();
    if (!held) return {};
    const at::TensorBase& gradient = std::as_const(*held).grad();
    if (!gradient.defined()) return {};
    const void* place = gradient.has_storage() ? gradient.storage().data() : gradient.unsafeGetTensorImpl();
    const int64_t version = gradient.is_inference() ? 0 : gradient._version();
    return {reinterpret_cast<uint64_t>(place), static_cast<uint64_t>(version)};
  }

  std::vector<Weak> parameters_;
};

// The two functions of `Gradients`: for a class of its own pybind looks up in each call what that belongs to.
py::tuple look_at_gradients(const py::list& parameters) {
  const auto gradients = std::make_shared<const Gradients>(parameters);
  return py::make_tuple(py::cpp_function([gradients] { return gradients->state(); }),
                        py::cpp_function([gradients](const py::bytes& before) { return gradients->have_changed(before); }));
}

}  // namespace
