// The Python module `emu_C`.
#include <torch/csrc/utils/pybind.h>

#include <future>

#include "generator.h"
#include "memory.h"
#include "process_group.h"

namespace emu {

namespace {

namespace py = pybind11;

// Keeps the current stream from going on until the function that is returned is called.
py::cpp_function hold_stream(int device) {
  auto* const gate = new std::promise<void>();  // left alone, it stays shut
  current_stream(device).enqueue([opened = gate->get_future().share()] { opened.wait(); });
  return py::cpp_function([gate] { gate->set_value(); });
}

void bind_device(py::module_& module) {
  module.def("hold_stream", &hold_stream);
  module.def("device_count", &num_devices);
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("physical_device", &physical_device);
  module.def("initialize", &initialize);
  module.def("is_initialized", &initialized);
  module.def("is_in_bad_fork", &in_bad_fork);
  module.def("has_context", &has_context);
  module.def("synchronize", &synchronize_device);
  module.def("host_syncs", &host_syncs);
  module.def("reset_host_syncs", &reset_host_syncs);
  module.def("set_device_error", &set_device_error);
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("set_memory_limit", &set_memory_limit);
  module.def("total_memory", &total_memory);
  module.def("set_scribble", &set_scribble);
}

void bind_collectives(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");
  using GroupOptions = ProcessGroupECCL::Options;
  auto group = py::class_<ProcessGroupECCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupECCL>>(module, "ProcessGroupECCL");
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(group, "Options")
      .def(py::init<>())
      .def_readwrite("split_from", &GroupOptions::split_from);
  group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<GroupOptions>& options) {
             return c10::make_intrusive<ProcessGroupECCL>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def("perform_nocolor_split", &ProcessGroupECCL::perform_nocolor_split, py::call_guard<py::gil_scoped_release>());
  module.def("set_collective_delay", &Communicator::set_delay, py::arg("seconds"));
}

}  // namespace

}  // namespace emu

PYBIND11_MODULE(emu_C, module) {
  emu::bind_device(module);
  emu::bind_collectives(module);
}
