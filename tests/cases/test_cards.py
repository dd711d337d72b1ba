"""The cases about which cards a server is given and what they are called; energy and memory are not looked at here."""

import sys

import pytest

from pytest_kvcache.core.cards import split_mig
from pytest_kvcache.core.fingerprint import identity_differences
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import nvml

from ..recorded_nvml import RecordedNvml
from .catalogue import EXACT, cases, problems

REASONS = {
    "different versions": "driver_library_mismatch",
    "libnvidia-ml.so.1": "nvml_library_not_found",
    "no permission": "no_permission",
    "fallen off the bus": "gpu_lost",
    "leaves no GPU visible": "no_visible_gpu",
}
OURS = {"devices", "gpu_name"}
READABLE = {"nvml_index", "uuid", "pci_bus_id", "name", "readings", "processes"}


def about_cards(case):
    """Cases that say which cards, or that there are none to ask; of whole cards, in the words known here."""
    expected = case["expected"]
    asked = OURS & set(expected) or expected.get("unavailable_reason") == "no_visible_gpu" or case["init"] != "ok"
    return asked and all(set(d) <= READABLE for d in case["devices"])


NVML = [p for p in cases("nvml") if about_cards(p.values[0])]
NAMES = cases("gpu_name")


def recording(device):
    return {
        "nvmlDeviceGetUUID": device["uuid"], "nvmlDeviceGetName": device["name"],
        "nvmlDeviceGetPciInfo": {"struct": {"busId": device["pci_bus_id"]}},
    }  # fmt: skip


@pytest.mark.parametrize("case", NVML)
def test_case_which_cards(case, monkeypatch):
    in_order = sorted(case["devices"], key=lambda d: d["nvml_index"])
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(*map(recording, in_order), init=case["init"]))
    monkeypatch.setattr(nvml, "cuda_order", lambda env: ["CUDA" + u[3:] for u in case["cuda_order"]])
    found = {"unavailable_reason": None}
    try:
        used = nvml.gpus_in_use(case["env"])
        found |= {"devices": [d["uuid"] for d in used], "gpu_name": nvml.gpu_parts(case["env"])[0]["gpu"]}
    except UserError as e:
        found |= {"devices": [], "gpu_name": None, "unavailable_reason": next(r for words, r in REASONS.items() if words in str(e))}
    others = set(case["expected"]) - OURS - ({"unavailable_reason"} if not found["devices"] else set())
    assert not problems(case, found, {}, EXACT, others)


def identity(name):
    text = name["bytes"] if isinstance(name, dict) else name
    gpu, mig = split_mig(text)
    return {"identity": {"gpu": gpu, **({"mig": mig} if mig else {})}}


@pytest.mark.parametrize("case", NAMES)
def test_case_names_of_cards(case):
    rows = case["rows"]
    assert [split_mig(r["name"])[1] for r in rows] == [r.get("mig") for r in rows]
    for a in rows:
        for b in rows:
            kind = [[r.get(k) for k in ("family", "form", "memory_gb", "mig", "vgpu")] for r in (a, b)]
            refused = identity_differences(identity(a["name"]), identity(b["name"]))
            assert refused or kind[0] == kind[1], f"{a['name']} and {b['name']} are two things"
