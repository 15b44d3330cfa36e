// Where each source file adds what it offers to the Python module: a static `emu::Bindings x(function)`.
#pragma once

#include <torch/extension.h>

#include <vector>

namespace emu {

using Binder = void (*)(pybind11::module_& module);

std::vector<Binder>& binders();

struct Bindings {
  explicit Bindings(Binder binder) { binders().push_back(binder); }
};

}  // namespace emu
