#include "mesh.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>

namespace emu {

namespace {

constexpr size_t kTextBytes = 104;
constexpr const char* kPeerGone = "remote process exited or there was a network error";

// What each rank says of itself when it connects.
struct Hello {
  int32_t rank;
  char device[kTextBytes];
  char address[kTextBytes];
};

// Rank 0's answer when all have come; `error` is empty where they may go on.
struct Welcome {
  char error[256];
};

template <size_t N>
void put_text(char (&target)[N], const std::string& text) {
  std::memset(target, 0, N);
  std::memcpy(target, text.data(), std::min(text.size(), N - 1));
}

[[noreturn]] void raise_error(const std::string& why) {
  C10_THROW_ERROR(DistBackendError, "ECCL error: " + why);
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int new_socket() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) raise_error(std::string("system error: socket: ") + std::strerror(errno));
  return fd;
}

std::string listen_somewhere(Descriptor& listener, int backlog) {
  static std::atomic<int> count{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string name = "eccl." + std::to_string(::getpid()) + "." + std::to_string(++count) + "." + std::to_string(now);
  listener.fd = new_socket();
  socklen_t length = 0;
  const auto address = abstract_address(name, length);
  if (::bind(listener.fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(listener.fd, backlog) != 0) {
    raise_error(std::string("system error: bind: ") + std::strerror(errno));
  }
  return name;
}

int connect_to(const std::string& name) {
  Descriptor made{new_socket()};
  socklen_t length = 0;
  const auto address = abstract_address(name, length);
  while (::connect(made.fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EINTR) raise_error(kPeerGone);
  }
  return std::exchange(made.fd, -1);
}

int accept_one(int listener) {
  while (true) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd >= 0) return fd;
    if (errno != EINTR && errno != ECONNABORTED) raise_error(std::string("system error: accept: ") + std::strerror(errno));
  }
}

template <typename T>
bool read_all(int fd, T* values, size_t count) {
  auto* data = reinterpret_cast<char*>(values);
  size_t left = count * sizeof(T);
  while (left > 0) {
    const ssize_t got = ::recv(fd, data, left, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    data += got;
    left -= static_cast<size_t>(got);
  }
  return true;
}

template <typename T>
bool write_all(int fd, const T* values, size_t count) {
  const auto* data = reinterpret_cast<const char*>(values);
  size_t left = count * sizeof(T);
  while (left > 0) {
    const ssize_t sent = ::send(fd, data, left, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    data += sent;
    left -= static_cast<size_t>(sent);
  }
  return true;
}

std::string find_address(c10d::Store& store, const std::string& key, int rank) {
  try {
    return store.get_to_str(key);
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("[", rank, "] is setting up ECCL communicator and retrieving the unique id from [0] via c10d "
                             "key-value store by key '", key, "', but store->get('", key, "') got error: ", error.what()));
  }
}

std::string find_duplicate(const std::vector<Hello>& members) {
  for (size_t later = 1; later < members.size(); ++later) {
    for (size_t earlier = 0; earlier < later; ++earlier) {
      if (std::string(members[later].device) == members[earlier].device) {
        return c10::str("invalid usage. Last error: Duplicate GPU detected : rank ", later, " and rank ", earlier,
                        " both on EMU device ", members[later].device);
      }
    }
  }
  return "";
}

// Rank 0's part: waits for all others, whose sockets it puts into `fds`, and tells each of them who the others are.
std::vector<Hello> welcome_all(int listener, const Hello& own, std::vector<int>& fds) {
  std::vector<Hello> members(fds.size());
  members[0] = own;
  for (size_t num_here = 1; num_here < fds.size();) {
    Descriptor peer{accept_one(listener)};
    Hello hello{};
    if (!read_all(peer.fd, &hello, 1)) continue;  // it died; NCCL goes on waiting as well
    if (hello.rank <= 0 || hello.rank >= static_cast<int>(fds.size()) || fds[hello.rank] >= 0) continue;
    members[hello.rank] = hello;
    fds[hello.rank] = std::exchange(peer.fd, -1);
    ++num_here;
  }
  Welcome welcome{};
  put_text(welcome.error, find_duplicate(members));
  for (size_t rank = 1; rank < fds.size(); ++rank) {
    write_all(fds[rank], &welcome, 1);  // a peer that died meanwhile is seen by the first collective
    write_all(fds[rank], members.data(), members.size());
  }
  if (welcome.error[0] != '\0') raise_error(welcome.error);
  return members;
}

// The other ranks' part: connect to rank 0, then to each lower rank, and be connected to by each higher one.
void join(const std::string& hub, int listener, const Hello& own, std::vector<int>& fds) {
  fds[0] = connect_to(hub);
  std::vector<Hello> members(fds.size());
  Welcome welcome{};
  if (!write_all(fds[0], &own, 1) || !read_all(fds[0], &welcome, 1) || !read_all(fds[0], members.data(), members.size())) {
    raise_error(kPeerGone);
  }
  if (welcome.error[0] != '\0') raise_error(welcome.error);
  for (int lower = 1; lower < own.rank; ++lower) {
    fds[lower] = connect_to(members[lower].address);
    write_all(fds[lower], &own, 1);
  }
  for (size_t num_left = fds.size() - 1 - own.rank; num_left > 0;) {
    Descriptor peer{accept_one(listener)};
    Hello hello{};
    if (!read_all(peer.fd, &hello, 1) || fds[hello.rank] >= 0) continue;
    fds[hello.rank] = std::exchange(peer.fd, -1);
    --num_left;
  }
}

// The pieces of one peer that are left to do, in order.
struct Left {
  std::deque<Piece> pieces;

  void add(const Piece& piece) {
    if (piece.num_bytes > 0) pieces.push_back(piece);
  }
  void advance(size_t num_bytes) {
    auto& first = pieces.front();
    first.data += num_bytes;
    first.num_bytes -= num_bytes;
    if (first.num_bytes == 0) pieces.pop_front();
  }
};

void copy_to_self(Left& send, Left& receive) {
  while (!send.pieces.empty() && !receive.pieces.empty()) {
    const size_t num_bytes = std::min(send.pieces.front().num_bytes, receive.pieces.front().num_bytes);
    std::memmove(receive.pieces.front().data, send.pieces.front().data, num_bytes);
    send.advance(num_bytes);
    receive.advance(num_bytes);
  }
}

// Moves what can be moved now; false where the peer is gone.
bool move(int fd, Left& send, Left& receive) {
  while (!send.pieces.empty()) {
    const auto& piece = send.pieces.front();
    const ssize_t sent = ::send(fd, piece.data, piece.num_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      send.advance(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      return false;
    }
  }
  while (!receive.pieces.empty()) {
    const auto& piece = receive.pieces.front();
    const ssize_t got = ::recv(fd, piece.data, piece.num_bytes, MSG_DONTWAIT);
    if (got > 0) {
      receive.advance(static_cast<size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    } else if (got == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

Mesh::Mesh(int rank, int size) : rank_(rank), size_(size), abort_fd_(::eventfd(0, EFD_CLOEXEC)), fds_(size, -1) {}

Mesh::~Mesh() {
  for (const int fd : fds_) {
    if (fd >= 0) ::close(fd);
  }
  ::close(abort_fd_);
}

std::shared_ptr<Mesh> Mesh::meet(c10d::Store& store, const std::string& key, int rank, int size,
                                 const std::string& device_identity) {
  std::shared_ptr<Mesh> mesh(new Mesh(rank, size));
  if (size == 1) return mesh;
  Descriptor listener;
  Hello own{};
  own.rank = rank;
  put_text(own.device, device_identity);
  put_text(own.address, listen_somewhere(listener, size));
  if (rank == 0) {
    store.set(key, own.address);
    welcome_all(listener.fd, own, mesh->fds_);
  } else {
    join(find_address(store, key, rank), listener.fd, own, mesh->fds_);
  }
  return mesh;
}

bool Mesh::exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives) {
  if (aborted_) return false;
  std::vector<Left> to(size_), from(size_);
  for (const auto& piece : sends) to[piece.peer].add(piece);
  for (const auto& piece : receives) from[piece.peer].add(piece);
  copy_to_self(to[rank_], from[rank_]);
  while (!aborted_) {
    std::vector<pollfd> polled{{abort_fd_, POLLIN, 0}};
    std::vector<int> peers{-1};
    bool is_done = to[rank_].pieces.empty() && from[rank_].pieces.empty();
    for (int peer = 0; peer < size_; ++peer) {
      const int events = (to[peer].pieces.empty() ? 0 : POLLOUT) | (from[peer].pieces.empty() ? 0 : POLLIN);
      if (events == 0 || peer == rank_) continue;
      is_done = false;
      polled.push_back({fds_[peer], static_cast<short>(events), 0});
      peers.push_back(peer);
    }
    if (is_done) return true;
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    for (size_t at = 1; at < polled.size(); ++at) {
      if (polled[at].revents == 0 || move(polled[at].fd, to[peers[at]], from[peers[at]])) continue;
      if (aborted_) return false;
      note_error(c10::str(kPeerGone, " (rank ", peers[at], ")"));
      return wait_for_abort();
    }
  }
  return false;
}

bool Mesh::wait_for_abort() {
  pollfd polled{abort_fd_, POLLIN, 0};
  while (!aborted_) ::poll(&polled, 1, -1);
  return false;
}

bool Mesh::pause(double seconds) {
  pollfd polled{abort_fd_, POLLIN, 0};
  ::poll(&polled, 1, static_cast<int>(std::lround(seconds * 1000)));
  return !aborted_;
}

void Mesh::abort() {
  if (aborted_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(abort_fd_, &one, sizeof(one));
  for (const int fd : fds_) {
    if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
  }
}

void Mesh::note_error(const std::string& why) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_.empty()) error_ = why;
}

std::string Mesh::error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

}  // namespace emu
