// SPDX-License-Identifier: Apache-2.0
//
// Writes the record of a collective that is like one before, without a line of Python; whatever is new goes on to the
// Python kernel, which describes it and says here what is to be written next time. So there is one place that knows what
// a collective is, and here it is only known when two of them are alike: same operator, group, line and arguments.
// Besides, what guard does in every step.

#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <memory>
#include <string>

#include "looks.h"
#include "repeats.h"
#include "steps.h"

#ifdef Py_GIL_DISABLED
#error "this needs a Python that has its global lock"
#endif

namespace {

// A page that reads as zero in a forked process, as in forks.py.
class ForkMark {
 public:
  ForkMark() {
    void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(page != MAP_FAILED, "no page of memory");
    page_ = static_cast<volatile char*>(page);
    TORCH_CHECK(madvise(page, kPageBytes, MADV_WIPEONFORK) == 0, "this system cannot wipe a page on fork");
    page_[0] = 1;
  }
  ~ForkMark() { munmap(const_cast<char*>(page_), kPageBytes); }
  ForkMark(const ForkMark&) = delete;
  ForkMark& operator=(const ForkMark&) = delete;
  bool is_fork() const { return page_[0] == 0; }

 private:
  static constexpr size_t kPageBytes = 4096;
  volatile char* page_;
};

// What this thread describes now. A signal's handler may run another collective within it.
class Description {
 public:
  explicit Description(std::unique_ptr<Search> search) : search_(std::move(search)), before_(missed) {
    missed = search_.get();
  }
  ~Description() {
    missed = before_;
    const Gil gil;
    search_.reset();
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

 private:
  std::unique_ptr<Search> search_;
  Search* const before_;
};

// What torch calls for one operator.
class Kernel : public c10::OperatorKernel {
 public:
  Kernel(std::shared_ptr<Repeats> repeats, std::shared_ptr<const ForkMark> mark, Plan plan)
      : repeats_(std::move(repeats)), mark_(std::move(mark)), plan_(plan) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    static const c10::DispatchKeySet rest(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    static const c10::DispatchKeySet python(c10::DispatchKey::TESTING_ONLY_GenericWrapper);
    if (mark_->is_fork()) {
      op.redispatchBoxed(keys & rest, stack);
      return;
    }
    Ticket ticket{};
    if (auto search = find(op, *stack, ticket)) {
      const Description description(std::move(search));
      op.redispatchBoxed((keys & rest) | python, stack);
      return;
    }
    repeats_->unfinished.ask_oldest();
    try {
      op.redispatchBoxed(keys & rest, stack);
    } catch (...) {
      repeats_->unfinished.end(ticket, kFailed);
      throw;
    }
    follow(op, *stack, ticket);
  }

 private:
  // Nothing where it was found and `ticket` filled in.
  std::unique_ptr<Search> find(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Ticket& ticket) {
    const size_t num_args = op.schema().arguments().size();
    auto search = std::make_unique<Search>();
    const Gil gil;
    try {
      if (repeats_->begin(plan_, &stack[stack.size() - num_args], num_args, *search, ticket)) search.reset();
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // for the next line of Python
    } catch (const std::exception&) {  // whatever it is: Python's side says it, if it finds the same
    } catch (const NotAlike&) {
    }
    return search;
  }

  void follow(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Ticket& ticket) {
    if (plan_.work_at == kNoWork) {
      repeats_->unfinished.end(ticket, kDone);
      return;
    }
    const size_t num_results = op.schema().returns().size();
    const auto at = plan_.work_at == kOnlyResult ? num_results - 1 : static_cast<size_t>(plan_.work_at);
    const auto& result = stack[stack.size() - num_results + at];
    repeats_->unfinished.add(ticket, result.isNone() ? Work() : result.toCustomClass<c10d::Work>());
  }

  const std::shared_ptr<Repeats> repeats_;
  const std::shared_ptr<const ForkMark> mark_;
  const Plan plan_;
};

// Our kernels in torch's dispatcher, until `remove`.
class Kernels {
 public:
  explicit Kernels(std::shared_ptr<Repeats> repeats)
      : repeats_(std::move(repeats)),
        mark_(std::make_shared<ForkMark>()),
        library_(std::make_unique<torch::Library>(
            torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__)) {}

  void add(const std::string& name, size_t group_at, int reduce_op_at, int work_at) {
    auto kernel = std::make_unique<Kernel>(repeats_, mark_, Plan{num_added_++, group_at, reduce_op_at, work_at});
    library_->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void remove() {
    const py::gil_scoped_release release;  // the dispatcher has a lock of its own
    library_.reset();
  }

 private:
  const std::shared_ptr<Repeats> repeats_;
  const std::shared_ptr<const ForkMark> mark_;
  std::unique_ptr<torch::Library> library_;
  uint32_t num_added_ = 0;
};

}  // namespace

PYBIND11_MODULE(ddpilot_repeats, module) {
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("JOURNAL_VERSION") = kJournalVersion;
  module.def("is_surely_finite", &is_surely_finite);
  module.def("look_at_gradients", &look_at_gradients);
  module.def("write_steps_into", &write_steps_into);
  py::class_<Repeats, std::shared_ptr<Repeats>>(module, "Repeats")
      .def(py::init<const py::buffer&, uint64_t, const py::buffer&, py::function>())
      .def("learn", &Repeats::learn)
      .def("leave_group_out", &Repeats::leave_group_out)
      .def("forget", &Repeats::forget)
      .def("next_index", &Repeats::next_index)
      .def("catch_up", &Repeats::catch_up)
      .def("close", &Repeats::close);
  py::class_<Kernels>(module, "Kernels")
      .def(py::init<std::shared_ptr<Repeats>>())
      .def("add", &Kernels::add)
      .def("remove", &Kernels::remove);
}
