"""CUDA_VISIBLE_DEVICES by the rules of CUDA's own documentation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import cards

FOUR = [{"index": i, "uuid": f"GPU-{i}aaa-bb{i}", "name": "X"} for i in range(4)]


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("2,1", [2, 1]),
        (" 2 , 1 ", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("0,,1", [0]),
        ("0,9,1", [0]),
        ("9", []),
        ("all", []),
        ("none", []),
        ("void", []),
        ("0x1", []),
        ("1.0", []),
        ("1,1", []),
        ("1,GPU-1aaa", []),
        ("GPU-3aaa-bb3", [3]),
        ("GPU-3", [3]),
        ("GPU-", []),
        ("GPU-9", []),
        ("3aaa-bb3", []),
        ("GPU-2,0", [2, 0]),
        ("MIG-", []),
        ("MIG-1", []),
        ("MIG-GPU-1aaa/1/0", []),
    ],
)
def test_what_is_visible(chosen, visible):
    assert [d["index"] for d in cards.visible(FOUR, FOUR, chosen)] == visible


def test_a_uuid_that_is_cut_too_short_names_nothing():
    twins = [{"index": 0, "uuid": "GPU-aa1"}, {"index": 1, "uuid": "GPU-aa2"}]
    assert cards.visible(twins, twins, "GPU-aa") == []
    assert cards.visible(twins, twins, "GPU-aa2") == [twins[1]]


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), unique=True))
def test_an_index_counts_in_the_order_given_and_a_uuid_does_not(order, picked):
    ordered = [FOUR[i] for i in order]
    assert [d["index"] for d in cards.visible(FOUR, ordered, ",".join(map(str, picked)))] == [order[i] for i in picked] or not picked
    assert [d["index"] for d in cards.visible(FOUR, ordered, ",".join(FOUR[i]["uuid"] for i in picked))] == picked


@given(st.text("0123,- GPUMIGa/", max_size=20))
def test_no_value_is_a_traceback_and_no_card_comes_twice(chosen):
    found = cards.visible(FOUR, FOUR, chosen)
    assert len({d["index"] for d in found}) == len(found)


def test_devices_are_cards_and_slices_in_the_order_of_the_bus():
    whole = {"index": 0, "uuid": "GPU-b", "pci": "00000000:B0:00.0", "memory_mib": 80}
    cut = {"index": 1, "uuid": "GPU-a", "pci": "00000000:0a:00.0", "memory_mib": 80, "mig_mode": "on",
           "mig_devices": [{"mig": "1g", "mig_uuid": "MIG-1", "memory_mib": 10}, {"mig": "2g", "mig_uuid": "MIG-2"}]}  # fmt: skip
    found = cards.devices([whole, cut])
    assert [cards.device_id(d) for d in found] == ["MIG-1", "MIG-2", "GPU-b"]
    assert [d.get("memory_mib") for d in found] == [10, None, 80], "a slice has its own memory or none that is known"
    assert all("mig_devices" not in d for d in found)
    assert [d["index"] for d in cards.devices([{"index": 0, "pci": "9"}, {"index": 1}])] == [0, 1], "no order where one place is unknown"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", ("NVIDIA H100 80GB HBM3", "3g.40gb")),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", ("NVIDIA A100-SXM4-80GB", "1c.3g.40gb")),
        ("NVIDIA H200", ("NVIDIA H200", None)),
        ("NVIDIA AMIGO 1", ("NVIDIA AMIGO 1", None)),
        ("", ("", None)),
    ],
)
def test_a_slice_tells_its_card_and_its_profile(name, parts):
    assert cards.split_mig(name) == parts


@given(st.sets(st.integers(0, 300)))
def test_masks_and_ranges_lose_no_number(numbers):
    words = [sum(1 << n - 64 * i for n in numbers if n // 64 == i) for i in range(5)]
    assert cards.set_bits(words) == sorted(numbers)
    spelled = [part.split("-") for part in cards.ranges(numbers).split(", ") if part]
    assert sorted(n for p in spelled for n in range(int(p[0]), int(p[-1]) + 1)) == sorted(numbers)


def test_values_of_several_cards_are_joined():
    assert cards.joined([]) is None
    assert cards.joined([None, None]) is None
    assert cards.joined([5, 5]) == 5
    assert cards.joined([5, None]) == 5
    assert cards.joined([5, 4, 5]) == "5, 4, 5"
