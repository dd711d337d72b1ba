"""One thread, one epoll loop, plain sockets: sends requests on time, stamps bytes as they arrive, keeps them for later.

Nothing is parsed while the load runs but the head of each answer and what may be its end. The kernel stamps the segments
(SO_TIMESTAMPNS, Linux), so that a delay of this loop is in no latency; a read that brings several segments has the stamp of
the newest, and over TLS a record that of the segment which made it whole. Sends of an open loop are woken by a timerfd at
absolute deadlines and caught up between two reads; they never wait for an answer.
"""

from __future__ import annotations

import select
import struct
import sys
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from ..core.load import Load, Target
from .connections import BUSY, CONNECT_TIMEOUT, IDLE, Conn, Connections, Endpoint, now
from .incoming import Done, Incoming
from .timer import Timer, WallClock

MS, S = 10**6, 10**9
READ_SIZE = 262144
LINGER = 20 * MS  # how long after [DONE] the end of the body is waited for, so that the connection can be used again
HOLDS, PROBE = 3, 16  # after so many waits in vain the server is one that holds answers open: every 16th is waited for still
SILENT = 300 * MS  # a complete answer without an end mark is at its end when nothing has come for so long
EARLY = 100_000  # ns before a send is due that the loop wakes and then spins: waking alone takes 50 to 100 us
SPARE, AHEAD, SPARE_EVERY = 8, 300 * MS, 20 * MS  # connections that an open loop keeps ready for what is due within AHEAD
HEARTBEAT = 20 * MS
KEPT = 256 * 2**20  # bytes of finished answers kept undecoded; beyond, they are decoded while the load runs
LAG_STEP, LAG_STEPS = 14, 8192  # the histogram of read lags has steps of 2^14 ns
_stamp = struct.Struct("qq").unpack_from


class Wire:
    """Drives one load against one target. `digest` takes a finished request to pieces; it is called after the load, and
    during it only when more than KEPT bytes wait. `asleep` is a file descriptor whose end means that nobody wants this."""

    def __init__(self, target: Target, load: Load, digest: Callable[[Done], None], *, asleep: int | None = None) -> None:
        self.load, self.digest, self.asleep = load, digest, asleep
        self.endpoint = Endpoint(target)
        self.pool = Connections(self.endpoint)
        self.count = len(load.bodies)
        self.due: list[int] = []
        self.lingering: list[Conn] = []
        self.idle_slots: deque[int] = deque()  # closed loop: streams that go on with another connection, by when they were free
        self.timer = Timer()
        self.finished: deque[Done] = deque()
        self.kept = self.left = self.next = self.loaded = 0
        self.memory = bytearray(READ_SIZE)
        self.view, self.buffers = memoryview(self.memory), (self.memory,)
        self.clock = WallClock()
        self.reads = self.spare_after = self.beat = self.held = self.early = 0
        self.read_lag, self.slot_gaps, self.send_lag, self.loop_lag = [0] * LAG_STEPS, array("q"), array("q"), array("q")

    @property
    def kernel(self) -> bool:
        return self.endpoint.kernel_stamps

    @property
    def clock_steps(self) -> int:
        return self.clock.steps

    # --- the load ---

    def connect(self) -> None:
        """Open the connections that the load will need at its start. A failure is met again, and recorded, by a request."""
        self.endpoint.find()
        first = self.load.due_s or ()
        for _ in range(min(self.load.concurrency, self.count) if self.load.concurrency else _soon(first, 0.0)):
            self._open(-1, 0)
        give_up = now() + CONNECT_TIMEOUT
        while self.pool.opening and now() < give_up:
            self._turn(100)

    def run(self, start: int) -> None:
        """The load, from `start` (ns) until every request has ended."""
        timer = self.timer
        while now() < start - 2 * MS:
            time.sleep(0.001)
        try:
            self.begin(start)
            self.beat = start
            self.pool.epoll.register(timer.fd, select.EPOLLIN)
            timer.at(self._wake())
            if self.asleep is not None:
                self.pool.epoll.register(self.asleep, select.EPOLLIN)
            while now() < start:
                pass
            self._loop(timer)
        finally:
            self.close()
        self.loaded = now()

    def begin(self, start: int) -> None:
        """Every request is to come: at its moment after `start`, or when its stream is free."""
        self.left = self.count
        if self.load.due_s is not None:
            self.due = [start + int(s * S) for s in self.load.due_s]
            sparse = self.load.due_s[-1] * S > 10 * EARLY * self.count if self.due else False
            self.early = EARLY if sparse else 0  # at thousands a second it would spin all the time
        self.idle_slots.extend([0] * min(self.load.concurrency or 0, self.left))

    def close(self) -> None:
        """Close every connection."""
        self.pool.close_all()
        self.timer.close()

    def digest_all(self) -> None:
        """Take what has finished to pieces."""
        while self.finished:
            self.digest(self.finished.popleft())

    def turns(self, reads: int, patience_s: float = 10.0) -> None:
        """Turn until so many more reads have been handled; for a replay. TimeoutError when they do not come."""
        wanted, give_up = self.reads + reads, now() + int(patience_s * S)
        while self.reads < wanted:
            self._turn(100)
            if now() > give_up:
                raise TimeoutError(f"{wanted - self.reads} of {reads} reads did not come within {patience_s:g} s")

    def _loop(self, timer: Timer) -> None:
        look = now() + 100 * MS
        while self.left:
            self.start_slots()
            self._turn(1 if self.lingering else 100, timer)
            at = now()
            if self.next < len(self.due):
                self._send_due(at)
                self._keep_spare(at)
            timer.at(self._wake())
            if self.lingering:
                self._stop_lingering(at)
            if at > look:
                look = at + 100 * MS
                self._time_out(at)
            while self.kept > KEPT and self.finished and now() - at < 2 * MS:
                done = self.finished.popleft()
                self.kept -= sum(map(len, done.reads))
                self.digest(done)

    def _wake(self) -> int:
        """When the loop must turn next: for the heartbeat, or for a send."""
        return min(self.beat, self.due[self.next] - self.early) if self.next < len(self.due) else self.beat

    def _beat(self, at: int) -> None:
        while at >= self.beat:  # a beat that was missed counts with the whole delay it had
            self.loop_lag.append(at - self.beat)
            self.beat += HEARTBEAT

    def _keep_spare(self, at: int) -> None:
        if at > self.spare_after and self.next < len(self.due):
            self.spare_after = at + SPARE_EVERY
            if self.pool.ready(at) < _soon(self.due[self.next : self.next + SPARE], at, S):
                self._open(-1, 0)

    def _turn(self, timeout_ms: int, timer: Timer | None = None) -> None:
        """Wait for events and handle each; sends that fall due meanwhile go first."""
        found = self.pool.epoll.poll(timeout_ms / 1000)
        woken = now()
        self.clock.keep(woken)
        for fd, mask in found:
            conn = self.pool.by_fd.get(fd)
            if conn is None:
                if timer and fd == timer.fd:
                    timer.clear()
                    self._beat(now())
                elif fd == self.asleep:
                    sys.exit("the load generator is no longer wanted")
                continue
            if conn.state < IDLE:
                self._opened(conn, self.pool.step(conn, mask))
                continue
            if mask & ~select.EPOLLOUT:
                self._read(conn, woken)
            if mask & select.EPOLLOUT and conn.out is not None and conn.state == BUSY:
                self._go_on_sending(conn)
            if self.due and self.next < len(self.due) and self.due[self.next] <= (at := now()):
                self._send_due(at)

    # --- sending ---

    def _send_due(self, at: int) -> None:
        while self.next < len(self.due) and self.due[self.next] - self.early <= at:
            while at < self.due[self.next]:
                at = now()
            self._send_next()

    def start_slots(self) -> None:
        """Streams of a closed loop that have no connection in use go on with their next request."""
        while self.idle_slots:
            freed = self.idle_slots.popleft()
            if self.next < self.count:
                self._send_next(freed)

    def _send_next(self, freed: int = 0, conn: Conn | None = None) -> None:
        """The next request goes: on `conn`, on a free connection, or on a new one; for a stream that was `freed` at that time."""
        i = self.next
        self.next += 1
        due = self.due[i] if self.due else 0
        conn = conn or self.pool.take(now())
        if conn is None:
            self._open(i, due, freed)
            return
        conn.freed = freed
        self._send(conn, i, due)

    def _send(self, conn: Conn, i: int, due: int) -> None:
        data = self.endpoint.request(self.load.bodies[i])
        if conn.tls:
            data = conn.tls.seal(data)
        conn.state, conn.i, conn.due = BUSY, i, due
        conn.answer, conn.done_at = Incoming(), 0
        conn.sent = conn.heard = conn.moved = now()
        if due:
            self.send_lag.append(conn.sent - due)
        elif conn.freed:
            self.slot_gaps.append(conn.sent - conn.freed - conn.connect)
        try:
            sent = conn.sock.send(data)
        except OSError as e:
            if not isinstance(e, BlockingIOError):
                self._refused(conn, e)
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
            if not isinstance(e, BlockingIOError):
                self._refused(conn, e)
            return
        conn.out = None
        self.pool.epoll.modify(conn.fd, select.EPOLLIN)

    def _refused(self, conn: Conn, error: OSError) -> None:
        """Sending failed: the server may have answered before it hung up."""
        while conn.state == BUSY and self._read(conn, now()):
            pass
        if conn.state == BUSY:
            self._end(conn, f"connection_reset: sending failed: {error}", reuse=False)

    def _open(self, i: int, due: int, freed: int = 0) -> None:
        try:
            conn, problem = self.pool.open(i, due)
        except OSError as e:  # no more file descriptors, say
            if i >= 0:
                at = now()
                self._over(Done(i, due, at, 0, at, f"connection_reset: no connection can be opened: {e}", [], []))
                self._free_stream(at)
            return
        conn.freed = freed
        self._opened(conn, problem)

    def _opened(self, conn: Conn, problem: str) -> None:
        """What is to be done after a step of opening a connection: its request goes, fails, or it waits for one."""
        if problem and conn.i >= 0:
            conn.sent = now()
            conn.connect = conn.sent - conn.opened
            self._end(conn, f"connection_reset: cannot connect to {self.endpoint.host}:{self.endpoint.port}: {problem}", reuse=False)
        elif problem:
            self.pool.close(conn)
            self.spare_after = now() + S
        elif conn.state == IDLE and conn.i >= 0:
            self._send(conn, conn.i, conn.due)
        elif conn.state == IDLE:
            self.pool.idle.append(conn)

    # --- reading ---

    def _read(self, conn: Conn, woken: int) -> bool:
        """Take what has come on a connection; whether there was anything."""
        try:
            if self.endpoint.kernel_stamps:
                size, extra, _, _ = conn.sock.recvmsg_into(self.buffers, 64)
            else:
                size, extra = conn.sock.recv_into(self.memory), None
        except OSError as e:
            if not isinstance(e, BlockingIOError):
                self._lost(conn, "reset")
            return False
        at = stamp = now()
        if not size:
            self._lost(conn, "close")
            return False
        answer = conn.answer
        if extra:
            seconds, ns = _stamp(extra[0][2])
            stamp = self.clock.monotonic(seconds * S + ns)
            if not conn.sent <= stamp <= at:  # the clock was set, or its offset is off by that much
                self.clock.look(at)
                stamp = at
            woken = stamp
        came = self.view[:size]
        data, gone = (conn.tls.open(came), conn.tls.gone) if conn.tls else (bytes(came), "")
        self.reads += 1
        self.read_lag[min(LAG_STEPS - 1, (at - woken) >> LAG_STEP)] += 1
        if not data and not gone:  # a record is not whole yet, or has only news of TLS itself
            conn.heard = at
            return True
        if conn.state != BUSY:  # an answer nobody asked for
            self._lost(conn, "close")
            return True
        conn.heard, steps = at, answer.steps
        end = answer.take(data, stamp)
        if answer.steps > steps:
            conn.moved = at
        if end:
            self.held *= not (conn.done_at and end == "complete")
            self._end(conn, end, reuse=end == "complete" and answer.reusable and not gone)
        elif gone:
            self._lost(conn, gone)
        elif answer.done and self.held >= HOLDS and self.next % PROBE:
            self._end(conn, "complete", reuse=False)
        elif answer.done and not conn.done_at:
            conn.done_at = at
            self.lingering.append(conn)
        return True

    def _lost(self, conn: Conn, how: str) -> None:
        if conn.state == BUSY:
            self._end(conn, how, reuse=False)
            return
        if conn in self.pool.idle:
            self.pool.idle.remove(conn)
            self.spare_after = now() + S  # a server that drops free connections is not offered new ones all the time
        self.pool.close(conn)

    def _end(self, conn: Conn, end: str, *, reuse: bool) -> None:
        """The request is over; the stream of a closed loop goes on at once, the connection of an open one waits."""
        answer = conn.answer
        at = now()
        ended = answer.stamps[-1] if answer.stamps and end == "complete" else at
        self._over(Done(conn.i, conn.due, conn.sent, conn.connect, ended, end, answer.reads, answer.stamps))
        self.kept += answer.size
        reuse = reuse and conn.out is None  # a refusal may come before the whole request is sent
        conn.connect, conn.out = 0, None
        if not reuse:
            self.pool.close(conn)
            self._free_stream(ended)
            return
        conn.state, conn.heard = IDLE, at
        if not self.load.concurrency:
            self.pool.idle.append(conn)
        elif self.next < self.count:
            self._send_next(ended, conn)
        else:
            self.pool.close(conn)

    def _over(self, done: Done) -> None:
        self.finished.append(done)
        self.left -= 1

    def _free_stream(self, at: int) -> None:
        """A stream of a closed loop has no connection any more, and nothing to wait for since `at`."""
        if self.load.concurrency:
            self.idle_slots.append(at)

    def _stop_lingering(self, at: int) -> None:
        held = self.held + 1  # streams of a batch end together: they are one wait
        for conn in self.lingering[:]:
            if conn.state != BUSY or not conn.done_at:
                self.lingering.remove(conn)
            elif at - conn.done_at > LINGER:
                self.lingering.remove(conn)
                self.held = held
                self._end(conn, "complete", reuse=False)

    def _time_out(self, at: int) -> None:
        for conn in list(self.pool.by_fd.values()):
            if conn.state == BUSY and at - conn.heard > SILENT and conn.answer.complete:
                self._end(conn, "complete", reuse=False)
            elif conn.state == BUSY and (limit_s := self._overdue(conn, at)):
                unsent = self._stop_sending()
                words = f"nothing for {limit_s:g} s after {conn.answer.size} bytes" + (f"; {unsent} more were not sent" if unsent else "")
                self._end(conn, f"stall: {words}", reuse=False)
            elif conn.state < IDLE and at - conn.opened > CONNECT_TIMEOUT:
                self._opened(conn, f"no connection within {CONNECT_TIMEOUT // S} s")

    def _overdue(self, conn: Conn, at: int) -> float:
        """The limit that a request has passed, or 0. The first event may be a role without a token, and prefill go on after it."""
        limit_s = self.load.idle_timeout_s if conn.answer.steps > 1 else self.load.first_timeout_s
        if at - conn.heard > limit_s * S:
            return limit_s
        return self.load.progress_timeout_s if at - conn.moved > self.load.progress_timeout_s * S else 0.0

    def _stop_sending(self) -> int:
        """Give up what has not been sent; how many requests that are."""
        unsent = self.count - self.next
        self.next, self.left = self.count, self.left - unsent
        return unsent


def _soon(due: Sequence[float], at: float, second: float = 1.0) -> int:
    """How many of the next requests are due so soon that their connections should be open."""
    return min(SPARE, bisect_right(due, at + AHEAD / S * second))
