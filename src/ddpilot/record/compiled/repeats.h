// SPDX-License-Identifier: Apache-2.0
//
// What collectives there were, and how one like them is written.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <unistd.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "alike.h"
#include "ring.h"
#include "trail.h"
#include "unfinished.h"

namespace {

constexpr size_t kMaxRepeats = 20000;

// A collective while it is looked for, and, where it is not known, while Python describes it.
struct Search {
  std::string key;
  c10d::ProcessGroup* group = nullptr;
  Trail trail;
};

thread_local Search* missed = nullptr;

struct Repeat {
  Usual usual;
  uint32_t role;
  int64_t group;
  int64_t num_bytes;
  bool tells_failure;
  Trail trail;
};

struct Group {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> kept;  // keeps the address from becoming another's, not the group alive
  bool is_left_out;
};

// All that is Python's, or is found by an address of Python's: it needs Python's lock.
struct Known {
  py::buffer_info ring, next_seqs;
  TrailFinder trails;
  std::unordered_map<std::string, Repeat> repeats;
  std::unordered_map<c10d::ProcessGroup*, Group> groups;
};

class Repeats {
 public:
  Repeats(const py::buffer& ring, uint64_t num_records, const py::buffer& next_seqs, py::function classify)
      : known_(new Known{ring.request(true), next_seqs.request(true), TrailFinder(std::move(classify)), {}, {}}),
        ring_(known_->ring.ptr, num_records),
        unfinished(ring_) {}

  ~Repeats() {
    // At the end of the process, when there is no Python any more that could free it.
    if (known_) new std::shared_ptr<Known>(known_);
  }

  Repeats(const Repeats&) = delete;
  Repeats& operator=(const Repeats&) = delete;

  // Writes the record and returns true where the collective is like one before. Needs Python's lock.
  bool begin(const Plan& plan, const c10::IValue* args, size_t num_args, Search& search, Ticket& ticket) {
    const auto known = known_;  // another thread may close this while a trail is found
    if (!known) return false;
    search.group = args[plan.group_at].toCustomClass<c10d::ProcessGroup>().get();
    const auto group = known->groups.find(search.group);
    if (group != known->groups.end() && group->second.is_left_out) return false;
    const uint64_t start_ns = now_ns();
    search.trail = known->trails.find();
    search.key = Key(plan, search.group, search.trail, args, num_args).text();
    const auto found = known->repeats.find(search.key);
    if (!known_ || found == known->repeats.end()) return false;
    const Repeat& repeat = found->second;
    const int op = plan.reduce_op_at < 0 ? -1 : args[plan.reduce_op_at].toCustomClass<c10d::ReduceOp>()->op_;
    auto& next_seq = static_cast<int64_t*>(known->next_seqs.ptr)[repeat.group];
    const uint64_t index = ring_.write({start_ns, next_seq, thread_id(), repeat.role, op}, repeat.usual);
    ++next_seq;
    ticket = {index, repeat.num_bytes, repeat.tells_failure};
    return true;
  }

  // The collective that this thread describes now is to be written so when it comes again.
  void learn(const std::string& usual, uint32_t role, int64_t group, int64_t num_bytes, bool tells_failure) {
    TORCH_CHECK(usual.size() == kUsualBytes, "the usual part of a record has ", usual.size(), " bytes");
    TORCH_CHECK(group >= 0 && group < known().next_seqs.size, "no counter for group ", group);
    if (missed == nullptr || missed->key.empty()) return;
    if (known().repeats.size() >= kMaxRepeats) forget();
    remember(missed->group, false);
    Repeat repeat{{}, role, group, num_bytes, tells_failure, missed->trail};
    usual.copy(repeat.usual.data(), kUsualBytes);
    known().repeats.insert_or_assign(missed->key, std::move(repeat));
  }

  // All collectives of the group of the one that this thread describes now go on to Python.
  void leave_group_out() {
    if (missed != nullptr && missed->group != nullptr) remember(missed->group, true);
  }

  void forget() { known().repeats.clear(); }

  uint64_t next_index() { return ring_.next_index(); }

  void catch_up(uint64_t at_ns) {
    const py::gil_scoped_release release;
    unfinished.ask_all(at_ns);
  }

  void close() {
    {
      const py::gil_scoped_release release;
      unfinished.close();
    }
    known_.reset();
  }

 private:
  static uint64_t thread_id() {
    thread_local const auto id = static_cast<uint64_t>(syscall(SYS_gettid));
    return id;
  }

  Known& known() {
    TORCH_CHECK(known_ != nullptr, "the recording is over");
    return *known_;
  }

  void remember(c10d::ProcessGroup* group, bool is_left_out) {
    auto& groups = known().groups;
    if (const auto found = groups.find(group); found != groups.end()) {
      found->second.is_left_out |= is_left_out;
      return;
    }
    for (auto one = groups.begin(); one != groups.end();) one = one->second.kept.expired() ? groups.erase(one) : ++one;
    const auto whole = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group);
    groups.emplace(group, Group{c10::weak_intrusive_ptr<c10d::ProcessGroup>(whole), is_left_out});
  }

  std::shared_ptr<Known> known_;
  Ring ring_;

 public:
  // Needs no lock of Python's.
  Unfinished unfinished;
};

}  // namespace
