// SPDX-License-Identifier: Apache-2.0
//
// The collectives that are not known to be over. Under the lock in here nothing waits, calls Python or frees a tensor.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "ring.h"

namespace {

// As in pending.py.
constexpr size_t kMaxWorks = 4096, kNumAsked = 4;
constexpr int64_t kMaxBytes = 64 << 20;

// The record of a collective.
struct Ticket {
  uint64_t index;
  int64_t num_bytes;
  bool tells_failure;
};

using Work = c10::intrusive_ptr<c10d::Work>;

// Writes into `ring` until `close`.
class Unfinished {
 public:
  explicit Unfinished(Ring& ring) : ring_(ring) {}

  // It has started; without a work nobody can say when it is over.
  void add(const Ticket& ticket, Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return;
    if (!work || works_.size() >= kMaxWorks || num_bytes_ > kMaxBytes) {
      ring_.finish(ticket.index, 0, kUnknown);
      return;
    }
    num_bytes_ += ticket.num_bytes;
    works_.emplace_back(ticket, std::move(work));
  }

  // It is over without having been added.
  void end(const Ticket& ticket, uint64_t outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_closed_) ring_.finish(ticket.index, now_ns(), outcome);
  }

  // The oldest ones, until one is not over.
  void ask_oldest() {
    for (size_t count = 0; count < kNumAsked; ++count) {
      Work over;  // freed without the lock
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_closed_ || works_.empty() || !is_over(works_.front(), now_ns())) return;
      over = std::move(works_.front().second);
      works_.pop_front();
    }
  }

  void ask_all(uint64_t at_ns) {
    std::vector<Work> over;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return;
    std::deque<Entry> left;
    for (auto& one : works_) {
      if (is_over(one, at_ns)) {
        over.push_back(std::move(one.second));
      } else {
        ring_.still_pending(one.first.index, at_ns);
        left.push_back(std::move(one));
      }
    }
    works_.swap(left);
  }

  void close() {
    std::deque<Entry> works;
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    works.swap(works_);
  }

 private:
  using Entry = std::pair<Ticket, Work>;

  bool is_over(const Entry& entry, uint64_t at_ns) {
    const auto& [ticket, work] = entry;
    if (!work->isCompleted()) return false;
    const bool has_failed = ticket.tells_failure && work->getFuture()->hasError();
    ring_.finish(ticket.index, at_ns, has_failed ? kFailed : kDone);
    num_bytes_ -= ticket.num_bytes;
    return true;
  }

  Ring& ring_;
  std::mutex mutex_;
  bool is_closed_ = false;
  std::deque<Entry> works_;
  int64_t num_bytes_ = 0;
};

}  // namespace
