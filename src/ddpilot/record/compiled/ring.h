// SPDX-License-Identifier: Apache-2.0
//
// Writes records into the mapped file, as ring.py does and where layout.py says.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLayoutVersion = 1;
constexpr uint64_t kHeaderBytes = 4096, kRecordBytes = 128;
constexpr size_t kFreshBytes = 36, kUsualBytes = 40;
constexpr uint64_t kNumBegun = 8;
constexpr uint64_t kReduceOp = 10, kPendingNs = 11, kEndNs = 12, kOutcome = 13;
constexpr uint64_t kDone = 1, kFailed = 2, kUnknown = 3;

using Usual = std::array<char, kUsualBytes>;

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t n = 0; n < 256; ++n) {
    uint32_t value = n;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0xEDB88320U ^ (value >> 1) : value >> 1;
    table[n] = value;
  }
  return table;
}

constexpr auto kCrcTable = make_crc_table();

uint32_t crc32(const char* data, size_t size) {
  uint32_t value = ~0U;
  for (size_t at = 0; at < size; ++at)
    value = kCrcTable[(value ^ static_cast<uint8_t>(data[at])) & 0xFF] ^ (value >> 8);
  return ~value;
}

uint64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000U + static_cast<uint64_t>(time.tv_nsec);
}

// What differs between records that are alike.
struct Fresh {
  uint64_t start_ns;
  int64_t seq;
  uint64_t thread;
  uint32_t role;
  int reduce_op;  // below 0: none
};

class Ring {
 public:
  Ring(void* base, uint64_t num_records) : base_(static_cast<char*>(base)), num_records_(num_records) {}

  uint64_t next_index() { return next_index_++; }

  // The index of the new record, which is complete before it is counted.
  uint64_t write(const Fresh& fresh, const Usual& usual) {
    const uint64_t index = next_index();
    std::array<char, kFreshBytes + kUsualBytes + sizeof(uint32_t)> record{};
    char* at = record.data();
    put(at, index);
    put(at, fresh.start_ns);
    put(at, fresh.seq);
    put(at, fresh.thread);
    put(at, fresh.role);
    put(at, usual);
    put(at, crc32(record.data(), kFreshBytes + kUsualBytes));
    std::memcpy(base_ + place_of(index), record.data(), record.size());
    if (fresh.reduce_op >= 0) word(index, kReduceOp) = index << 8 | static_cast<uint64_t>(fresh.reduce_op & 0xFF);
    std::atomic_thread_fence(std::memory_order_release);
    reinterpret_cast<uint64_t*>(base_)[kNumBegun] = index;
    return index;
  }

  void finish(uint64_t index, uint64_t end_ns, uint64_t outcome) {
    write_word(index, kEndNs, end_ns);
    write_word(index, kOutcome, index << 2 | outcome);
  }

  void still_pending(uint64_t index, uint64_t at_ns) { write_word(index, kPendingNs, at_ns); }

 private:
  template <typename T>
  static void put(char*& at, const T& value) {
    std::memcpy(at, &value, sizeof value);
    at += sizeof value;
  }

  // Unless the record has been overwritten.
  void write_word(uint64_t index, uint64_t number, uint64_t value) {
    if (word(index, 0) == index) word(index, number) = value;
  }

  uint64_t place_of(uint64_t index) const { return kHeaderBytes + index % num_records_ * kRecordBytes; }

  uint64_t& word(uint64_t index, uint64_t number) const {
    return reinterpret_cast<uint64_t*>(base_ + place_of(index))[number];
  }

  char* const base_;
  const uint64_t num_records_;
  std::atomic<uint64_t> next_index_{1};
};

}  // namespace
