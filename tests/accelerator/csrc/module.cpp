// The Python module: each source file's bindings.
#include "bindings.h"

namespace emu {

std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

}  // namespace emu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  for (auto binder : emu::binders()) binder(module);
}
