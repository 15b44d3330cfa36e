// Sockets between all ranks of one communicator, all on this host.
//
// A pair of ranks shares one stream socket without any framing: as with NCCL, ranks that call different collectives or
// pass different sizes are not noticed, and hang or get garbage.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emu {

// What to send to a peer, or where to put what a peer sends.
struct Piece {
  int peer;
  char* data;
  size_t num_bytes;
};

class Mesh {
 public:
  // Connects this rank with all others, which find each other through `key` in the store. Blocks until every rank has
  // come, and nothing but the store's time-out can end that. Raises where two ranks give the same device identity.
  static std::shared_ptr<Mesh> meet(c10d::Store& store, const std::string& key, int rank, int size,
                                    const std::string& device_identity);

  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;
  ~Mesh();

  // Sends and receives all pieces, those of one peer in their order. Returns false when aborted. A peer that is gone is
  // noted as `error`, and the exchange stays pending until `abort`.
  bool exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives);

  // Waits; returns false when aborted.
  bool pause(double seconds);

  // Ends the pending exchange and all later ones. The peers see this rank as gone.
  void abort();

  bool aborted() const { return aborted_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // What went wrong with a peer, or nothing.
  std::string error();

 private:
  Mesh(int rank, int size);
  void note_error(const std::string& why);
  bool wait_for_abort();

  const int rank_;
  const int size_;
  int abort_fd_;
  std::vector<int> fds_;  // by rank; -1 for this rank
  std::atomic<bool> aborted_{false};
  std::mutex error_mutex_;
  std::string error_;
};

}  // namespace emu
