"""NVML played back: what the functions of nvidia-ml-py answered for each card, errors and bytes included.

A recording is JSON-plain. `system` holds answers without a card, each of `cards` those of one: a value, `{"error": name}`,
`{"bytes": text}`, `{"struct": {...}}`, a list of these, or `{"by": {argument: answer}}` for functions with a second argument. What was not
recorded does not exist, as in an older binding.
"""

import copy
import types

CONSTANTS = {
    "NVML_CLOCK_GRAPHICS": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0, "NVML_AFFINITY_SCOPE_NODE": 0,
}  # fmt: skip

SYSTEM = {"nvmlSystemGetDriverVersion": "580.159.04", "nvmlSystemGetCudaDriverVersion_v2": 13000}
H200 = {
    "nvmlDeviceGetUUID": "GPU-0a000000-0000-4000-8000-000000000000",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetPciInfo": {"struct": {"busId": "00000000:1A:00.0"}},
    "nvmlDeviceGetMemoryInfo": {"struct": {"total": 150754820096}},
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetVbiosVersion": "96.00.A5.00.01",
    "nvmlDeviceGetInforomImageVersion": "G525.0225.00.05",
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
    "nvmlDeviceGetMaxClockInfo": {"by": {1: 1980, 2: 3201}},
    "nvmlDeviceGetApplicationsClock": {"by": {0: 1980, 2: 3201}},
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetNvLinkState": {"by": dict.fromkeys(range(18), 1)},
    "nvmlDeviceGetMemoryAffinity": [0b10, 0],
    "nvmlDeviceGetCpuAffinity": [0xFFFF0000, 1],
    "nvmlDeviceGetClockInfo": {"by": {1: 345, 2: 3201}},
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
}


def card(recording=H200, **changes):
    """A copy of a recording; `UUID="GPU-1"` stands for nvmlDeviceGetUUID, None takes an answer out."""
    full = {**copy.deepcopy(recording), **{f"nvmlDeviceGet{k}": v for k, v in changes.items()}}
    return {k: v for k, v in full.items() if v is not None}


def numbered(n, **changes):
    """The n-th of several equal cards."""
    return card(UUID=f"GPU-{n}a000000-0000-4000-8000-000000000000", PciInfo={"struct": {"busId": f"00000000:{n + 1}A:00.0"}}, **changes)


def mig_slice(n, profile, model="NVIDIA H200", **changes):
    """A MIG slice of a card; most questions about one are refused."""
    answers = {
        "UUID": f"MIG-{n}c000000-0000-5000-8000-000000000000", "Name": f"{model} MIG {profile}", "GpuInstanceId": n,
        "ComputeInstanceId": 0, "MemoryInfo": {"struct": {"total": 17716740096}},
    }  # fmt: skip
    return {k: v for k, v in {f"nvmlDeviceGet{k}": v for k, v in {**answers, **changes}.items()}.items() if v is not None}


def sliced(recording, *slices):
    """A card in MIG mode with these slices."""
    found = {"by": {**{i: s for i, s in enumerate(slices)}, **{i: {"error": "NotFound"} for i in range(len(slices), 7)}}}
    return card(recording, MigMode=[1, 1], MaxMigDeviceCount=7, MigDeviceHandleByIndex=found)


class RecordedNvml(types.SimpleNamespace):
    """Stands for the module `pynvml`. `init` is `ok` or the name of the error that nvmlInit raises."""

    def __init__(self, *cards, system=SYSTEM, init="ok", near=20):
        super().__init__(**CONSTANTS)
        self.cards, self.system, self.init, self.near, self.open = list(cards), system, init, near, 0
        self.NVMLError = type("NVMLError", (Exception,), {})

    def error(self, name):
        return type(f"NVMLError_{name.removeprefix('NVMLError_')}", (self.NVMLError,), {})()

    def nvmlInit(self):
        if self.init != "ok":
            raise self.error(self.init)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.answer(self.cards[index]) if "error" in self.cards[index] else self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for each in self.everything():
            if each.get("nvmlDeviceGetUUID") == uuid:
                return each
        raise self.error("NotFound")

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 0 if a is b else self.near

    def __getattr__(self, name):
        if name.startswith("nvmlSystem") and name in self.system:
            return lambda: self.answer(self.system[name])
        if name.startswith("nvmlDevice") and any(name in c for c in self.everything()):
            return lambda handle, *args: self.ask(handle, name, args)
        raise AttributeError(name)

    def everything(self):
        for each in self.cards:
            yield each
            yield from (s for s in each.get("nvmlDeviceGetMigDeviceHandleByIndex", {}).get("by", {}).values() if isinstance(s, dict))

    def ask(self, handle, name, args):
        if not self.open:
            raise self.error("Uninitialized")
        if name not in handle:
            raise self.error("NotSupported")
        answer = handle[name]
        if isinstance(answer, dict) and "by" in answer:
            answer = answer["by"].get(args[0], {"error": "InvalidArgument"})
        return self.answer(answer)

    def answer(self, answer):
        if isinstance(answer, dict) and "error" in answer:
            raise self.error(answer["error"])
        if isinstance(answer, dict) and "bytes" in answer:
            return answer["bytes"].encode()
        if isinstance(answer, dict) and "struct" in answer:
            return types.SimpleNamespace(**{k: self.answer(v) for k, v in answer["struct"].items()})
        return [self.answer(each) for each in answer] if isinstance(answer, list) else answer
