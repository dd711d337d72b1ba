"""Limits that control groups put on this process, v1 and v2. Pure: files come through the `read` passed in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Read = Callable[[str], str | None]
"""The text of a file, or None when it cannot be read."""

UNLIMITED_BYTES = 1 << 60
"""v1 writes "no limit" as the largest page-aligned 64-bit number; nothing real comes near this."""


def _own_group(cgroup: str, controller: str) -> tuple[int, str] | None:
    """(version, path of our group) from /proc/self/cgroup; a controller that v1 lists is governed by v1 alone."""
    unified = None
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return 1, path
        if number == "0" and not controllers:
            unified = 2, path
    return unified


def _mounts(mountinfo: str, version: int, controller: str) -> Iterator[tuple[str, str]]:
    """(root, mount point) of the mounts that show this controller's hierarchy, from /proc/self/mountinfo."""
    for line in mountinfo.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else (kind[0] == "cgroup" and controller in kind[2].split(",")):
            root, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), f) for f in fields[3:5])
            yield root, point


def group_directories(cgroup: str, mountinfo: str, controller: str) -> tuple[int, list[str]]:
    """(version, directories from our own group up to the mount point); (0, []) when there are none.

    Inside a container the mount's root is often our own group while /proc/self/cgroup shows the host's path, and a
    cgroup namespace shows paths such as `/../x`: what does not lie below the root is looked up at the mount point.
    """
    own = _own_group(cgroup, controller)
    mount = next(_mounts(mountinfo, own[0], controller), None) if own else None
    if own is None or mount is None:
        return 0, []
    root, point = mount
    path, root = own[1].rstrip("/"), root.rstrip("/")
    below = path[len(root) :] if (path + "/").startswith(root + "/") else ""
    names = [n for n in below.split("/") if n]
    if ".." in names:
        names = []
    return own[0], ["/".join([point, *names[:depth]]) for depth in range(len(names), -1, -1)]


def _directories(read: Read, controller: str) -> tuple[int, list[str]]:
    return group_directories(read("/proc/self/cgroup") or "", read("/proc/self/mountinfo") or "", controller)


def parse_cpu_max(text: str) -> float | None:
    """Cores from v2 `cpu.max` ("max 100000" or "150000 100000"), or from v1 quota and period joined by a space."""
    words = text.split()
    if len(words) != 2 or not all(w.isdigit() for w in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def parse_memory_limit(text: str) -> int | None:
    """Bytes from v2 `memory.max` or v1 `memory.limit_in_bytes`; None when unlimited."""
    word = text.strip()
    return int(word) if word.isdigit() and int(word) < UNLIMITED_BYTES else None


def parse_throttled(text: str) -> float | None:
    """Seconds for which a CPU quota held the group back, from `cpu.stat` of either version."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("throttled_usec", "throttled_time") and value.strip().isdigit():
            return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return None


def cpu_quota_cores(read: Read) -> float | None:
    """The smallest CPU quota from our group up to the root, in cores; None when unlimited."""
    version, directories = _directories(read, "cpu")
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    texts = (" ".join(read(f"{d}/{f}") or "" for f in files) for d in directories)
    return min((q for q in map(parse_cpu_max, texts) if q is not None), default=None)


def memory_limit_bytes(read: Read) -> int | None:
    """The smallest memory limit from our group up to the root; None when unlimited."""
    version, directories = _directories(read, "memory")
    file = "memory.max" if version == 2 else "memory.limit_in_bytes"
    texts = (read(f"{d}/{file}") or "" for d in directories)
    return min((b for b in map(parse_memory_limit, texts) if b is not None), default=None)


def throttled_s(read: Read) -> float | None:
    """Throttled seconds so far, summed from our group up to the root: each level counts only its own quota."""
    _, directories = _directories(read, "cpu")
    known = [t for t in (parse_throttled(read(f"{d}/cpu.stat") or "") for d in directories) if t is not None]
    return sum(known) if known else None
