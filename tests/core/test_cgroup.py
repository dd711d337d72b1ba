"""Control group limits from recorded texts of both versions."""

from __future__ import annotations

import pytest

from pytest_kvcache.core import cgroup

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_GROUPS = "4:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n9:name=systemd:/\n0::/\n"
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_GROUPS = "0::/user.slice/user-1000.slice/run.scope\n"
UNLIMITED_V1 = "9223372036854771712\n"


def files(groups: str, mounts: str, **more: str) -> cgroup.Read:
    found = {"/proc/self/cgroup": groups, "/proc/self/mountinfo": mounts, **more}
    return found.get


def test_v1_walks_up_in_the_hierarchy_of_the_controller() -> None:
    version, directories = cgroup.group_directories(V1_GROUPS, V1_MOUNTS, "cpu")
    assert version == 1
    top = "/sys/fs/cgroup/cpu,cpuacct"
    assert directories == [f"{top}/jobs/one", f"{top}/jobs", top]


def test_v2_walks_up_to_the_mount() -> None:
    version, directories = cgroup.group_directories(V2_GROUPS, V2_MOUNTS, "memory")
    assert version == 2
    assert directories[0] == "/sys/fs/cgroup/user.slice/user-1000.slice/run.scope"
    assert directories[-1] == "/sys/fs/cgroup"
    assert len(directories) == 4


@pytest.mark.parametrize(
    ("groups", "root"),
    [
        ("0::/docker/abc", "/docker/abc"),  # mounted at our own group, host's path shown
        ("0::/docker/abc", "/docker/other"),
        ("0::/docker/abcdef", "/docker/abc"),  # a prefix of the name is not a parent
        ("0::/../elsewhere", "/"),  # outside our cgroup namespace
        ("0::/", "/"),
    ],
)
def test_inside_a_container_the_mount_point_is_our_group(groups: str, root: str) -> None:
    mounts = f"30 23 0:26 {root} /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    assert cgroup.group_directories(groups, mounts, "cpu") == (2, ["/sys/fs/cgroup"])


@pytest.mark.parametrize("groups", ["", "garbage", "0::/x"])
def test_without_a_mount_nothing_is_known(groups: str) -> None:
    read = files(groups, "")
    assert cgroup.group_directories(groups, "", "cpu") == (0, [])
    assert cgroup.cpu_quota_cores(read) is None
    assert cgroup.memory_limit_bytes(read) is None
    assert cgroup.throttled_s(read) is None


def test_v1_limits_take_the_smallest_level() -> None:
    cpu, memory = "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/memory"
    read = files(
        V1_GROUPS,
        V1_MOUNTS,
        **{
            f"{cpu}/jobs/one/cpu.cfs_quota_us": "-1\n",
            f"{cpu}/jobs/one/cpu.cfs_period_us": "100000\n",
            f"{cpu}/jobs/cpu.cfs_quota_us": "150000\n",
            f"{cpu}/jobs/cpu.cfs_period_us": "100000\n",
            f"{cpu}/jobs/cpu.stat": "nr_periods 10\nnr_throttled 2\nthrottled_time 1500000000\n",
            f"{memory}/jobs/one/memory.limit_in_bytes": "2147483648\n",
            f"{memory}/jobs/memory.limit_in_bytes": "1073741824\n",
            f"{memory}/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert cgroup.cpu_quota_cores(read) == 1.5
    assert cgroup.memory_limit_bytes(read) == 1 << 30
    assert cgroup.throttled_s(read) == 1.5


def test_v2_limits_take_the_smallest_level() -> None:
    top = "/sys/fs/cgroup"
    read = files(
        V2_GROUPS,
        V2_MOUNTS,
        **{
            f"{top}/user.slice/user-1000.slice/run.scope/cpu.max": "max 100000\n",
            f"{top}/user.slice/user-1000.slice/cpu.max": "50000 100000\n",
            f"{top}/user.slice/cpu.max": "200000 100000\n",
            f"{top}/user.slice/memory.max": "max\n",
            f"{top}/user.slice/user-1000.slice/cpu.stat": "usage_usec 7\nnr_throttled 1\nthrottled_usec 250000\n",
            f"{top}/cpu.stat": "usage_usec 99\n",
        },
    )
    assert cgroup.cpu_quota_cores(read) == 0.5
    assert cgroup.memory_limit_bytes(read) is None
    assert cgroup.throttled_s(read) == 0.25


@pytest.mark.parametrize("text", ["", "max 100000", "-1 100000", "100000", "100000 0", "a b"])
def test_no_cpu_limit(text: str) -> None:
    assert cgroup.parse_cpu_max(text) is None


@pytest.mark.parametrize("text", ["", "max", UNLIMITED_V1, "-1"])
def test_no_memory_limit(text: str) -> None:
    assert cgroup.parse_memory_limit(text) is None


def test_escaped_mount_points() -> None:
    mounts = r"30 23 0:26 / /mnt/my\040groups rw - cgroup2 cgroup2 rw"
    assert cgroup.group_directories("0::/", mounts, "cpu") == (2, ["/mnt/my groups"])
