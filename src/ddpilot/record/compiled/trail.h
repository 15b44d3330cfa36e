// SPDX-License-Identifier: Apache-2.0
//
// Which line of the user's asked for a collective: the same walk as in sites.py. All of it needs Python's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;

// As in sites.py.
enum Kind : int { kUser = 1, kLibrary, kInner, kWrapper, kEngine, kDdp, kHook, kOurs, kStarter };

constexpr size_t kMaxKinds = 20000;
constexpr size_t kMaxCallers = 5;
constexpr int kMaxFrames = 16;

// What cannot be told apart here goes on to Python.
struct NotAlike {};

// The way from a collective out to the user's line.
struct Trail {
  py::object user;  // code objects, which a key keeps alive: an address must not become another's
  int at = 0;
  py::object called;
  py::object ddp;
  bool in_reducer = false;
  std::vector<std::pair<py::object, int>> callers;  // the user's frames around it, innermost first
};

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// `classify` says of a file what the code in it is, and may let other threads run.
class TrailFinder {
 public:
  explicit TrailFinder(py::function classify) : classify_(std::move(classify)), main_thread_(find_main_thread()) {}

  // Throws `NotAlike` for what torch's communication hooks ask for: their tensors are made anew each time.
  Trail find() {
    auto* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
    Trail trail = walk(py::reinterpret_borrow<py::object>(frame));
    if (!trail.user && trail.in_reducer && main_thread_ != nullptr) {
      auto* main = reinterpret_cast<PyObject*>(PyThreadState_GetFrame(main_thread_));
      Trail waiting = walk(py::reinterpret_steal<py::object>(main));
      trail.user = std::move(waiting.user);
      trail.at = waiting.at;
      trail.called = std::move(waiting.called);
      trail.callers = std::move(waiting.callers);
    }
    return trail;
  }

 private:
  static PyThreadState* find_main_thread() {
    const auto ident = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
    auto* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (thread != nullptr && thread->thread_id != ident) thread = PyThreadState_Next(thread);
    return thread;
  }

  Trail walk(py::object frame) {
    Trail trail, nearest;
    bool has_nearest = false;
    trail.in_reducer = !frame;
    for (bool is_innermost = true; frame; is_innermost = false) {
      auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
      auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
      const int kind = kind_of(code);
      if (kind == kUser) {
        if (!is_module(code)) add_callers(trail, back_of(frame));
        trail.user = std::move(code);
        trail.at = last_instruction(frame);
        return trail;
      }
      if (kind == kHook) throw NotAlike();
      if (kind == kDdp && !trail.ddp) trail.ddp = code;
      if (kind == kEngine && is_innermost) trail.in_reducer = true;
      const bool is_ours = kind == kOurs || kind == kStarter;
      if (!has_nearest && (kind == kLibrary || is_ours)) {
        has_nearest = true;
        nearest = trail;
        if (is_ours) {
          nearest.called = code;
        } else {
          nearest.user = code;
          nearest.at = last_instruction(frame);
        }
      }
      if (kind == kStarter) break;
      if (kind != kWrapper) trail.called = std::move(code);
      frame = back_of(frame);
    }
    return has_nearest ? nearest : trail;
  }

  // As `SiteFinder.callers`.
  void add_callers(Trail& trail, py::object frame) {
    for (int at = 0; frame && at < kMaxFrames; ++at) {
      auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
      auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
      const int kind = kind_of(code);
      if (kind == kOurs || kind == kStarter) return;
      if (kind == kUser) {
        const bool is_last = is_module(code) || trail.callers.size() + 1 == kMaxCallers;
        trail.callers.emplace_back(std::move(code), last_instruction(frame));
        if (is_last) return;
      }
      frame = back_of(frame);
    }
  }

  static py::object back_of(const py::object& frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }

  static bool is_module(const py::object& code) {
    return PyUnicode_CompareWithASCIIString(reinterpret_cast<PyCodeObject*>(code.ptr())->co_name, "<module>") == 0;
  }

  static int last_instruction(const py::object& frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr()));
#else
    return frame.attr("f_lasti").cast<int>();
#endif
  }

  int kind_of(const py::object& code) {
    const auto found = kinds_.find(code.ptr());
    if (found != kinds_.end()) return found->second.second;
    const int kind = classify_(code.attr("co_filename")).cast<int>();
    if (kinds_.size() >= kMaxKinds) kinds_.clear();
    kinds_.emplace(code.ptr(), std::make_pair(code, kind));
    return kind;
  }

  const py::function classify_;
  PyThreadState* const main_thread_;
  std::unordered_map<PyObject*, std::pair<py::object, int>> kinds_;
};

}  // namespace
