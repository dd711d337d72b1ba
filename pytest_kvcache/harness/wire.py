"""One thread, one epoll loop, plain sockets: sends requests on time, stamps bytes as they arrive, keeps them for later.

Nothing is parsed while the load runs but the head of each answer and what may be its end. Over plain HTTP the kernel
stamps the segments (SO_TIMESTAMPNS, Linux), so that a delay of this loop is in no latency; a read that brings several
segments has the stamp of the newest. Over TLS the stamp is taken at the read. Sends of an open loop are woken by a timerfd
at absolute deadlines and caught up between two reads; they never wait for an answer.
"""

from __future__ import annotations

import select
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from ..core.load import Load, Target
from .connections import BUSY, CONNECT_TIMEOUT, IDLE, Conn, Connections, Endpoint, now, would_block
from .incoming import Incoming
from .timer import Timer

MS, S = 10**6, 10**9
READ_SIZE = 262144
LINGER = 50 * MS  # how long after [DONE] the end of the body is waited for, so that the connection can be used again
SPARE = 8  # open connections an open loop keeps ready
KEPT = 256 * 2**20  # bytes of finished answers kept undecoded; beyond, they are decoded while the load runs
CLOCK_EVERY = 20 * MS  # the kernel stamps by the wall clock, which is slewed and may be set
LAG_STEP, LAG_STEPS = 14, 8192  # the histogram of read lags has steps of 2^14 ns
_stamp = struct.Struct("qq").unpack_from


class Done:
    """One request that has ended, undecoded. Times in ns of CLOCK_MONOTONIC; `due` 0 in a closed loop.

    `end` is `complete`, `close`, `reset`, `stall: words` or `class: words`.
    """

    __slots__ = ("connect", "due", "end", "ended", "i", "reads", "sent", "stamps")

    def __init__(self, i: int, due: int, sent: int, connect: int, ended: int, end: str, reads: list[bytes], stamps: list[int]) -> None:
        self.i, self.due, self.sent, self.connect, self.ended, self.end = i, due, sent, connect, ended, end
        self.reads, self.stamps = reads, stamps

    def raw(self) -> tuple[bytes, list[int]]:
        """The bytes of the answer and the offset after each read."""
        return b"".join(self.reads), list(accumulate(map(len, self.reads)))


class Wire:
    """Drives one load against one target. `digest` takes a finished request to pieces; it is called after the load, and
    during it only when more than KEPT bytes wait. `asleep` is a file descriptor whose end means that nobody wants this."""

    def __init__(self, target: Target, load: Load, digest: Callable[[Done], None], *, asleep: int | None = None) -> None:
        self.load, self.digest, self.asleep = load, digest, asleep
        self.endpoint = Endpoint(target)
        self.pool = Connections(self.endpoint)
        self.requests = [self.endpoint.request(body) for body in load.bodies]
        self.due: list[int] = []
        self.lingering: list[Conn] = []
        self.idle_slots = 0  # closed loop: streams that must go on with another connection
        self.finished: deque[Done] = deque()
        self.kept = self.left = self.next = self.loaded = 0
        self.memory = bytearray(READ_SIZE)
        self.view, self.buffers = memoryview(self.memory), (self.memory,)
        self.offset, self.offset_at = 0, 0
        self.read_lag, self.slot_gaps, self.send_lag = [0] * LAG_STEPS, array("q"), array("q")

    @property
    def kernel(self) -> bool:
        return self.endpoint.kernel_stamps

    # --- the load ---

    def connect(self) -> None:
        """Open the connections that the load will need at its start. A failure is met again, and recorded, by a request."""
        self.endpoint.find()
        for _ in range(min(self.load.concurrency, len(self.requests)) if self.load.concurrency else SPARE):
            self._open(-1, 0)
        give_up = now() + CONNECT_TIMEOUT
        while self.pool.opening and now() < give_up:
            self._turn(100)

    def run(self, start: int) -> None:
        """The load, from `start` (ns) until every request has ended."""
        timer = None
        while now() < start - 2 * MS:
            time.sleep(0.001)
        try:
            self.begin(start)
            if self.due:
                timer = Timer()
                self.pool.epoll.register(timer.fd, select.EPOLLIN)
                timer.at(self.due[0])
            if self.asleep is not None:
                self.pool.epoll.register(self.asleep, select.EPOLLIN)
            while now() < start:
                pass
            self._loop(timer)
        finally:
            self.close()
            if timer:
                timer.close()
        self.loaded = now()

    def begin(self, start: int) -> None:
        """Every request is to come: at its moment after `start`, or when its stream is free."""
        self.left = len(self.requests)
        if self.load.due_s is not None:
            self.due = [start + int(s * S) for s in self.load.due_s]
        self.idle_slots = min(self.load.concurrency or 0, self.left)

    def close(self) -> None:
        """Close every connection."""
        self.pool.close_all()

    def digest_all(self) -> None:
        """Take what has finished to pieces."""
        while self.finished:
            self.digest(self.finished.popleft())

    def turns(self, reads: int) -> None:
        """Turn until so many more reads have been handled; for a replay."""
        wanted = sum(self.read_lag) + reads
        while sum(self.read_lag) < wanted:
            self._turn(1000)

    def _loop(self, timer: Timer | None) -> None:
        look = now() + 100 * MS
        while self.left:
            self.start_slots()
            self._turn(10 if self.lingering else 100, timer)
            at = now()
            if timer:
                self._send_due(at)
                if self.next < len(self.due):
                    if len(self.pool.idle) + self.pool.opening < SPARE:
                        self._open(-1, 0)
                    timer.at(self.due[self.next])
            if self.lingering:
                self._stop_lingering(at)
            if at > look:
                look = at + 100 * MS
                self._time_out(at)
            if self.kept > KEPT and self.finished:
                done = self.finished.popleft()
                self.kept -= sum(map(len, done.reads))
                self.digest(done)

    def _turn(self, timeout_ms: int, timer: Timer | None = None) -> None:
        """Wait for events and handle each; sends that fall due meanwhile go first."""
        found = self.pool.epoll.poll(timeout_ms / 1000)
        woken = now()
        if woken - self.offset_at > CLOCK_EVERY:
            self.offset, self.offset_at = time.time_ns() - now(), woken
        for fd, mask in found:
            conn = self.pool.by_fd.get(fd)
            if conn is None:
                if timer and fd == timer.fd:
                    timer.clear()
                elif fd == self.asleep:
                    sys.exit("the load generator is no longer wanted")
                continue
            if conn.state < IDLE:
                self._opened(conn, self.pool.step(conn, mask))
            elif mask & select.EPOLLOUT and conn.out is not None:
                self._go_on_sending(conn)
                if mask & ~select.EPOLLOUT and conn.state in (IDLE, BUSY):
                    self._read(conn, woken)
            else:
                self._read(conn, woken)
            if timer and self.next < len(self.due) and self.due[self.next] <= (at := now()):
                self._send_due(at)

    # --- sending ---

    def _send_due(self, at: int) -> None:
        while self.next < len(self.due) and self.due[self.next] <= at:
            i = self.next
            self.next += 1
            conn = self.pool.take(at)
            if conn is None:
                self._open(i, self.due[i])
            else:
                self._send(conn, i, self.due[i])

    def start_slots(self) -> None:
        """Streams of a closed loop that have no connection in use go on with their next request."""
        while self.idle_slots:
            self.idle_slots -= 1
            if self.next < len(self.requests):
                i = self.next
                self.next += 1
                conn = self.pool.take(now())
                if conn is None:
                    self._open(i, 0)
                else:
                    self._send(conn, i, 0)

    def _send(self, conn: Conn, i: int, due: int) -> None:
        data = self.requests[i]
        conn.state, conn.i, conn.due = BUSY, i, due
        conn.answer, conn.done_at = Incoming(), 0
        conn.sent = conn.heard = now()
        if due:
            self.send_lag.append(conn.sent - due)
        try:
            sent = conn.sock.send(data)
        except OSError as e:
            if not would_block(e):
                self._end(conn, f"connection_reset: sending failed: {e}", reuse=False)
                return
            sent = 0
        if sent < len(data):
            conn.out = memoryview(data)[sent:]
            self.pool.epoll.modify(conn.fd, select.EPOLLIN | select.EPOLLOUT)

    def _go_on_sending(self, conn: Conn) -> None:
        try:
            while conn.out:
                conn.out = conn.out[conn.sock.send(conn.out) :]
        except OSError as e:
            if not would_block(e):
                self._end(conn, f"connection_reset: sending failed: {e}", reuse=False)
            return
        conn.out = None
        self.pool.epoll.modify(conn.fd, select.EPOLLIN)

    def _open(self, i: int, due: int) -> None:
        self._opened(*self.pool.open(i, due))

    def _opened(self, conn: Conn, problem: str) -> None:
        """What is to be done after a step of opening a connection: its request goes, fails, or it waits for one."""
        if problem and conn.i >= 0:
            conn.sent = now()
            conn.connect = conn.sent - conn.opened
            self._end(conn, f"connection_reset: cannot connect to {self.endpoint.host}:{self.endpoint.port}: {problem}", reuse=False)
        elif problem:
            self.pool.close(conn)
        elif conn.state == IDLE and conn.i >= 0:
            self._send(conn, conn.i, conn.due)
        elif conn.state == IDLE:
            self.pool.idle.append(conn)

    # --- reading ---

    def _read(self, conn: Conn, woken: int) -> None:
        try:
            if self.endpoint.kernel_stamps:
                size, extra, _, _ = conn.sock.recvmsg_into(self.buffers, 64)
            else:
                size, extra = conn.sock.recv_into(self.memory), None
        except OSError as e:
            if not would_block(e):
                self._lost(conn, "reset")
            return
        at = stamp = now()
        if not size:
            self._lost(conn, "close")
            return
        if extra:
            seconds, ns = _stamp(extra[0][2])
            stamp = woken = min(at, seconds * S + ns - self.offset)
        self.read_lag[min(LAG_STEPS - 1, (at - woken) >> LAG_STEP)] += 1
        if conn.state != BUSY:  # an answer nobody asked for
            self._lost(conn, "close")
            return
        conn.heard, answer = at, conn.answer
        end = answer.take(bytes(self.view[:size]), stamp)
        if end:
            self._end(conn, end, reuse=end == "complete" and not answer.done and answer.reusable)
        elif answer.done and not conn.done_at:
            conn.done_at = at
            self.lingering.append(conn)
        if self.endpoint.tls and conn.state == BUSY and conn.sock.pending():
            self._read(conn, woken)

    def _lost(self, conn: Conn, how: str) -> None:
        if conn.state == BUSY:
            self._end(conn, how, reuse=False)
            return
        if conn in self.pool.idle:
            self.pool.idle.remove(conn)
        self.pool.close(conn)

    def _end(self, conn: Conn, end: str, *, reuse: bool) -> None:
        """The request is over; the stream of a closed loop goes on at once, the connection of an open one waits."""
        answer = conn.answer
        ended = answer.stamps[-1] if answer.stamps and not end.startswith("stall") else now()
        self.finished.append(Done(conn.i, conn.due, conn.sent, conn.connect, ended, end, answer.reads, answer.stamps))
        self.kept += answer.size
        self.left -= 1
        reuse = reuse and conn.out is None  # a refusal may come before the whole request is sent
        conn.connect, conn.out = 0, None
        if not reuse:
            self.pool.close(conn)
            self.idle_slots += bool(self.load.concurrency)
            return
        conn.state = IDLE
        if not self.load.concurrency:
            self.pool.idle.append(conn)
        elif self.next < len(self.requests):
            self.next += 1
            self._send(conn, self.next - 1, 0)
            self.slot_gaps.append(conn.sent - ended)
        else:
            self.pool.close(conn)

    def _stop_lingering(self, at: int) -> None:
        for conn in self.lingering[:]:
            if conn.state != BUSY or not conn.done_at:
                self.lingering.remove(conn)
            elif at - conn.done_at > LINGER:
                self.lingering.remove(conn)
                self._end(conn, "complete", reuse=False)

    def _time_out(self, at: int) -> None:
        for conn in list(self.pool.by_fd.values()):
            if conn.state == BUSY and at - conn.heard > self.load.idle_timeout_s * S:
                self._end(conn, f"stall: nothing for {self.load.idle_timeout_s:g} s after {conn.answer.size} bytes", reuse=False)
            elif conn.state < IDLE and at - conn.opened > CONNECT_TIMEOUT:
                self._opened(conn, f"no connection within {CONNECT_TIMEOUT // S} s")
