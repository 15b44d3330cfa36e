# SPDX-License-Identifier: Apache-2.0
"""`TlsListener` and `connect`: an encrypted connection in which both ends prove that they belong to one session.

The parent's certificate is made for one session and pinned by the nodes. A node proves itself with a key, which it got
on its standard input: the first bytes that it sends. Nothing is unpickled before they were compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import queue
import secrets
import select
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddpilot.errors import LaunchError

CANNOT_CONNECT = "this node cannot connect to the notebook's machine"
"""In what a host process writes if it cannot connect."""

_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 10.0
_MAX_PENDING = 64
_PROOF_BYTES = 4 + 32


class TlsStream:
    """A TLS connection as a `Stream`: one thread may read while a different one writes, unlike with `SSLSocket`."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._raw = raw
        self.address = str(raw.getsockname()[0])
        """Address of this end."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._tls_lock, self._send_lock = threading.Lock(), threading.Lock()
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(raw, select.POLLIN)
        raw.settimeout(_HANDSHAKE_S)
        self._shake_hands()
        raw.settimeout(None)

    def _shake_hands(self) -> None:
        deadline_s = time.monotonic() + _HANDSHAKE_S
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                data = self._raw.recv(_CHUNK_BYTES)
                if not data or time.monotonic() > deadline_s:
                    raise ConnectionError("the other end left during the handshake") from None
                self._incoming.write(data)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.sendall(self._outgoing.read())

    def read(self, limit_s: float) -> bytes | None:
        """Return the next bytes, as `Stream.read`."""
        data, self._unread = self._unread or self._read_decrypted(), b""
        if data or not self._poll.poll(limit_s * 1000):
            return data or None
        received = self._raw.recv(_CHUNK_BYTES)
        if not received:
            return b""
        with self._tls_lock:
            self._incoming.write(received)
        return self._read_decrypted() or None

    def unread(self, data: bytes) -> None:
        """Return `data` at the next `read`."""
        self._unread = data

    def _read_decrypted(self) -> bytes:
        parts = []
        with self._tls_lock:
            while True:
                try:
                    part = self._tls.read(_CHUNK_BYTES)
                except ssl.SSLWantReadError:
                    break
                if not part:
                    break
                parts.append(part)
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            with self._send_lock:
                with self._tls_lock:
                    self._tls.write(view[:_CHUNK_BYTES])
                    encrypted = self._outgoing.read()
                self._raw.sendall(encrypted)
            view = view[_CHUNK_BYTES:]

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


class TlsListener:
    """Accepts one connection from each of `num_nodes` nodes, each with a key of its own.

    Raises LaunchError if no certificate can be made.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._session_key = secrets.token_bytes(32)
        self._context, self.certificate = _make_certificate()
        self._socket = socket.create_server(("", 0), backlog=num_nodes + 16)
        self.port = int(self._socket.getsockname()[1])
        """The port, on all addresses of this machine."""
        self._lock = threading.Lock()
        self._accepted: dict[int, TlsStream] = {}
        self._num_pending = 0
        self._is_closed = False
        threading.Thread(target=self._run, name="ddpilot-listener", daemon=True).start()

    def key(self, node_rank: int) -> str:
        """Return the key with which a node proves that it is node `node_rank`, as hexadecimal digits."""
        return hmac.new(self._session_key, str(node_rank).encode(), hashlib.sha256).hexdigest()

    def take(self, node_rank: int) -> TlsStream | None:
        """Return the connection of a node, once it has connected."""
        with self._lock:
            return self._accepted.get(node_rank)

    def close(self) -> None:
        """Stop listening; connections that were accepted stay open."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                raw, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                is_full = self._num_pending >= _MAX_PENDING
                self._num_pending += not is_full
            if is_full:
                raw.close()
            else:
                threading.Thread(target=self._admit, args=(raw,), name="ddpilot-admit", daemon=True).start()

    def _admit(self, raw: socket.socket) -> None:
        """Keep the connection if it proves to be from a node that has not connected yet; close it otherwise."""
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = TlsStream(raw, self._context, is_server=True)
            node_rank = self._read_proof(stream)
            with self._lock:
                if node_rank is not None and node_rank not in self._accepted and not self._is_closed:
                    self._accepted[node_rank] = stream
                    return
            stream.close()
        except (OSError, ValueError):  # ssl.SSLError is an OSError: not one of this session's nodes
            raw.close()
        finally:
            with self._lock:
                self._num_pending -= 1

    def _read_proof(self, stream: TlsStream) -> int | None:
        proof, deadline_s = b"", time.monotonic() + _HANDSHAKE_S
        while len(proof) < _PROOF_BYTES:
            data = stream.read(max(0.0, deadline_s - time.monotonic()))
            if data == b"" or (data is None and time.monotonic() >= deadline_s):
                return None
            proof += data or b""
        node_rank = int.from_bytes(proof[:4], "big")
        is_right = hmac.compare_digest(proof[4:_PROOF_BYTES], bytes.fromhex(self.key(node_rank)))
        stream.unread(proof[_PROOF_BYTES:])  # the node's first message may follow at once
        return node_rank if is_right and node_rank < self._num_nodes else None


def connect(addresses: Sequence[str], port: int, certificate: str, key: str, node_rank: int) -> TlsStream:
    """Connect to the parent at that one of `addresses` where a server with its certificate answers first.

    Addresses in a network of this machine come before others, which a gateway may reach for a while only.

    Raises OSError with the reason for each address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is compared, not a name in it
    context.load_verify_locations(cadata=certificate)
    results: queue.SimpleQueue[TlsStream | str] = queue.SimpleQueue()

    def try_one(address: str) -> None:
        try:
            raw = socket.create_connection((address, port), timeout=_HANDSHAKE_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            results.put(TlsStream(raw, context, is_server=False))
        except OSError as error:
            results.put(f"{address}:{port}: {error}")

    near = _near(addresses)
    reasons = []
    for group in (near, [address for address in addresses if address not in near]):
        for address in group:
            threading.Thread(target=try_one, args=(address,), daemon=True).start()
        for _ in group:
            found = results.get()
            if isinstance(found, TlsStream):
                found.write(node_rank.to_bytes(4, "big") + bytes.fromhex(key))
                return found
            reasons.append(found)
    raise OSError("; ".join(reasons))


def _near(addresses: Sequence[str]) -> list[str]:
    """Return those of `addresses` that are in a network of one of this machine's interfaces."""
    networks = [
        ipaddress.ip_network(f"{each.address}/{each.netmask}", strict=False)
        for own in psutil.net_if_addrs().values()
        for each in own
        if each.family == socket.AF_INET and each.netmask
    ]
    return [address for address in addresses if any(ipaddress.ip_address(address) in each for each in networks)]


def _make_certificate() -> tuple[ssl.SSLContext, str]:
    """Return the context of a server with a new key and a certificate of its own, and that certificate as PEM.

    The standard library cannot make one, so the `openssl` command does. Its files exist for a moment, with mode 0600 in
    a folder with mode 0700.
    """
    did = "encrypting the connections to the nodes"
    if shutil.which("openssl") is None:
        raise LaunchError(did, found="the `openssl` command is not installed here", fix="Install it (package openssl)")
    with tempfile.TemporaryDirectory(prefix="ddpilot-tls-") as folder:
        key, certificate = Path(folder, "key.pem"), Path(folder, "cert.pem")
        os.close(os.open(key, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "365", "-subj", "/CN=ddpilot session", "-keyout", str(key), "-out", str(certificate)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise LaunchError(did, found=f"`openssl req` failed: {done.stderr[-500:]}", fix="Check `openssl version`")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        return context, certificate.read_text()
