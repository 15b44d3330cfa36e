// SPDX-License-Identifier: Apache-2.0
//
// Writes ordinary steps into a rank's journal, as journal.py does. All of it needs Python's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "ring.h"

namespace {

namespace py = pybind11;

constexpr int kJournalVersion = 2;
constexpr uint64_t kNumWritten = 8, kNumSteps = 10, kStepWords = 7;

// `steps_at`: where there is room for `num_steps` of them; `mark`: a page that reads as zero in a forked process.
class Steps {
 public:
  Steps(const py::buffer& journal, uint64_t steps_at, uint64_t num_steps, const py::buffer& mark)
      : journal_(journal.request(true)), mark_(mark.request()), steps_at_(steps_at), num_steps_(num_steps) {}

  uint64_t next_index() { return next_index_++; }

  // Returns whether it has: not where there is no room for `events`.
  bool write(int64_t unit, int64_t number, int64_t sequence_number, const std::string& events) {
    uint64_t text = 0;
    if (events.size() > sizeof text) return false;
    if (static_cast<const volatile char*>(mark_.ptr)[0] == 0) return true;
    std::memcpy(&text, events.data(), events.size());
    const uint64_t index = next_index();
    const std::array<uint64_t, kStepWords> words{index, now_ns(), as_word(unit), as_word(number),
                                                 as_word(sequence_number), text, index};
    const uint64_t at = (steps_at_ + num_written_ % num_steps_ * sizeof words) / sizeof(uint64_t);
    // In this order: whoever reads at any time knows by the first and the last one that all is there.
    for (size_t place = 0; place < kStepWords; ++place) put(at + place, words[place]);
    put(kNumSteps, ++num_written_);
    put(kNumWritten, index);
    return true;
  }

 private:
  static uint64_t as_word(int64_t value) { return static_cast<uint64_t>(value); }

  void put(uint64_t place, uint64_t value) {
    __atomic_store_n(static_cast<uint64_t*>(journal_.ptr) + place, value, __ATOMIC_RELEASE);
  }

  const py::buffer_info journal_, mark_;
  const uint64_t steps_at_, num_steps_;
  uint64_t next_index_ = 1, num_written_ = 0;
};

// The two functions of `Steps`: for a class of its own pybind looks up in each call what that belongs to.
py::tuple write_steps_into(const py::buffer& journal, uint64_t steps_at, uint64_t num_steps, const py::buffer& mark) {
  const auto steps = std::make_shared<Steps>(journal, steps_at, num_steps, mark);
  return py::make_tuple(py::cpp_function([steps] { return steps->next_index(); }),
                        py::cpp_function([steps](int64_t unit, int64_t number, int64_t sequence_number,
                                                 const std::string& events) {
                          return steps->write(unit, number, sequence_number, events);
                        }));
}

}  // namespace
