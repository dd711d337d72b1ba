"""The cards as NVML tells of them, and which of them a server is given."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import nvml
from pytest_kvcache.harness.nvml import gpu_parts, gpus_in_use, nvidia_gpus

from ..recorded_nvml import H200, RecordedNvml, card, mig_slice, numbered, sliced

ERRORS = ("NotSupported", "NoPermission", "Unknown", "GpuIsLost", "FunctionNotFound", "Timeout", "LibRmVersionMismatch")


ASK_CUDA = nvml.cuda_order


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """What CUDA says of its order, and how often it is asked: that of the bus, where nothing else is set."""
    asked = []

    def says(*uuids):
        monkeypatch.setattr(nvml, "cuda_order", lambda env: asked.append(env) or list(uuids))
        return asked

    nvml._cuda_order.cache_clear()
    monkeypatch.setattr(nvml, "cuda_order", lambda env: ["CUDA" + c["uuid"][3:] for c in nvidia_gpus()])
    return says


@pytest.fixture
def play(monkeypatch):
    def use(*cards, **more):
        fake = RecordedNvml(*cards, **more)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return use


def names(env):
    return [d.get("mig_uuid") or d["uuid"] for d in gpus_in_use(env)]


def uuid(n):
    return numbered(n)["nvmlDeviceGetUUID"]


# --- readings ------------------------------------------------------------------------------------------------------


def test_everything_that_a_card_tells(play):
    fake = play(H200)
    assert gpu_parts({}) == (
        {"gpu": "NVIDIA H200", "mig": None, "gpu_power_limit_w": 700},
        {
            "gpu_count": 1, "gpu_mig_mode": "off", "driver": "580.159.04", "cuda_driver": "13.0", "gpu_memory_mib": 143771,
            "gpu_vbios": "96.00.A5.00.01", "gpu_inforom": "G525.0225.00.05", "gpu_ecc": "on",
            "gpu_power_limit_default_w": 700, "gpu_clock_max_mhz": 1980, "gpu_memory_clock_max_mhz": 3201,
            "gpu_clock_application_mhz": 1980, "gpu_memory_clock_application_mhz": 3201, "gpu_persistence": "on",
            "gpu_compute_mode": "default", "gpu_pcie_generation_max": 5, "gpu_pcie_width_max": 16, "gpu_nvlinks": 18,
            "gpu_numa_nodes": "1", "gpu_cpus": "16-31, 64",
        },
        {
            "gpu_clock_mhz": 345, "gpu_memory_clock_mhz": 3201, "gpu_temperature_c": 31, "gpu_pcie_generation": 5, "gpu_pcie_width": 16,
            "gpu_uuids": ["GPU-0a000000-0000-4000-8000-000000000000"], "gpu_mig_uuids": None, "gpu_pci": ["00000000:1A:00.0"],
            "gpu_topology": None,
        },
    )  # fmt: skip
    assert fake.open == 0, "every nvmlInit has its nvmlShutdown"


@given(answers=st.dictionaries(st.sampled_from(sorted(H200)), st.sampled_from(ERRORS)))
def test_any_readings_that_fail_are_absent_and_take_no_other_down(answers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", RecordedNvml(H200))
        (whole,) = nvidia_gpus()
        patch.setitem(sys.modules, "pynvml", RecordedNvml({**H200, **{name: {"error": e} for name, e in answers.items()}}))
        (found,) = nvidia_gpus()
        lost = len(
            [n for n in answers if n not in ("nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetApplicationsClock", "nvmlDeviceGetClockInfo")]
        )
        lost += 2 * (len(answers) - lost)
        assert found.items() <= whole.items()
        assert len(found) == len(whole) - lost
        identity, subject, context = gpu_parts({})
        assert json.loads(json.dumps([identity, subject, context])) == [identity, subject, context]
        assert 0 not in [*subject.values(), *context.values()]


ZEROS = {
    "nvmlDeviceGetEnforcedPowerLimit": 0, "nvmlDeviceGetPowerManagementDefaultLimit": 0, "nvmlDeviceGetMaxPcieLinkGeneration": 0,
    "nvmlDeviceGetMaxPcieLinkWidth": 0, "nvmlDeviceGetCurrPcieLinkGeneration": 0, "nvmlDeviceGetCurrPcieLinkWidth": 0,
    "nvmlDeviceGetMemoryInfo": {"struct": {"total": 0}}, "nvmlDeviceGetMaxClockInfo": {"by": {1: 0, 2: 0}},
    "nvmlDeviceGetApplicationsClock": {"by": {0: 0, 2: 0}}, "nvmlDeviceGetClockInfo": {"by": {1: 0, 2: 0}},
    "nvmlDeviceGetMemoryAffinity": [0], "nvmlDeviceGetCpuAffinity": [0, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", ZEROS)
def test_a_zero_that_cannot_be_is_absent(play, name):
    play({**H200, name: ZEROS[name]})
    _, subject, context = gpu_parts({})
    assert 0 not in [*subject.values(), *context.values()]
    assert "" not in [*subject.values(), *context.values()]


def test_a_card_that_cannot_be_opened_keeps_its_place(play):
    play({"error": "GpuIsLost"}, H200)
    assert nvidia_gpus()[0] == {"index": 0}
    assert names({"CUDA_VISIBLE_DEVICES": H200["nvmlDeviceGetUUID"]}) == [H200["nvmlDeviceGetUUID"]]


def test_an_old_binding_answers_in_bytes_and_knows_less(play):
    texts = {k: {"bytes": v} for k, v in H200.items() if isinstance(v, str)}
    few = card({**H200, **texts}, MigMode=None, InforomImageVersion=None, MemoryAffinity=None)
    play(
        card(few, PciInfo={"struct": {"busId": {"bytes": "00000000:1A:00.0"}}}), system={"nvmlSystemGetDriverVersion": {"bytes": "570.86"}}
    )
    identity, subject, context = gpu_parts({})
    assert identity["gpu"] == "NVIDIA H200"
    assert (subject["driver"], subject["gpu_vbios"]) == ("570.86", "96.00.A5.00.01")
    assert context["gpu_uuids"] == [H200["nvmlDeviceGetUUID"]]
    assert (subject["gpu_mig_mode"], subject["gpu_inforom"], subject["cuda_driver"]) == (None, None, None)
    json.dumps([identity, subject, context])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LibraryNotFound", "libnvidia-ml.so.1"),
        ("DriverNotLoaded", "kernel module"),
        ("LibRmVersionMismatch", "reboot, or reload the driver"),
        ("NoPermission", "/dev/nvidia"),
        ("GpuIsLost", "fallen off the bus"),
        ("Unknown", "check that nvidia-smi works"),
    ],
)
def test_no_driver_is_one_line_that_says_why_and_what_to_do(play, error, words):
    play(init=error)
    with pytest.raises(UserError) as caught:
        nvidia_gpus()
    line = str(caught.value)
    assert line.startswith(f"no NVIDIA driver answers here (NVMLError_{error}): ")
    assert words in line
    assert "--kv-gpu=cpu" in line
    assert "\n" not in line


def test_a_driver_that_fails_after_its_start_is_one_line_too(play):
    fake = play(H200)

    def lost():
        raise fake.error("GpuIsLost")

    fake.nvmlDeviceGetCount = lost
    with pytest.raises(UserError, match=r"no NVIDIA driver answers here \(NVMLError_GpuIsLost\)"):
        nvidia_gpus()
    assert fake.open == 0


def test_no_package_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="pip install nvidia-ml-py"):
        nvidia_gpus()


def test_every_function_that_is_called_exists_in_the_binding():
    binding = pytest.importorskip("pynvml")
    tree = ast.parse(Path(nvml.__file__).read_text())
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.lower().startswith("nvml")} - {"nvml"}
    assert len(called) > 25
    assert not [name for name in called if not hasattr(binding, name)]


# --- several cards -------------------------------------------------------------------------------------------------


def test_several_equal_cards_say_it_once_and_what_differs_in_their_order(play):
    play(numbered(0), numbered(1, VbiosVersion="97.00"), numbered(2, EnforcedPowerLimit=350500))
    identity, subject, context = gpu_parts({})
    assert identity["gpu"] == "NVIDIA H200"
    assert subject["gpu_count"] == 3
    assert subject["gpu_ecc"] == "on"
    assert subject["gpu_vbios"] == "96.00.A5.00.01, 97.00, 96.00.A5.00.01"
    assert identity["gpu_power_limit_w"] == "700, 700, 350.5"
    assert context["gpu_uuids"] == [uuid(0), uuid(1), uuid(2)]
    assert context["gpu_topology"] == ["0-1 several PCIe switches", "0-2 several PCIe switches", "1-2 several PCIe switches"]


def test_only_the_cards_in_use_are_told_of(play):
    play(numbered(0, VbiosVersion="1"), numbered(1, VbiosVersion="2"))
    _, subject, context = gpu_parts({"CUDA_VISIBLE_DEVICES": "1"})
    assert (subject["gpu_count"], subject["gpu_vbios"]) == (1, "2")
    assert (context["gpu_uuids"], context["gpu_topology"]) == ([uuid(1)], None)


def test_among_equal_cards_the_order_of_the_bus_will_do_when_cuda_cannot_be_asked(play, cuda, monkeypatch):
    play(numbered(0), numbered(1))
    cuda("CUDA" + uuid(1)[3:], "CUDA" + uuid(0)[3:])
    assert names({"CUDA_VISIBLE_DEVICES": "0"}) == [uuid(1)]
    child(monkeypatch, code=1, err="no CUDA here")
    monkeypatch.setattr(nvml, "cuda_order", ASK_CUDA)
    assert names({"CUDA_VISIBLE_DEVICES": "0"}) == [uuid(0)]
    play(numbered(0), numbered(1, Name="NVIDIA L4"))
    with pytest.raises(UserError, match=r"GPUs of several kinds, and CUDA does not say which it takes first \(no CUDA here\)"):
        names({"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    "source", ["sys.stdout.buffer.write(b'CUDA-1 \\xff'); sys.exit(0)", "sys.stderr.buffer.write(b'\\xff'); sys.exit(3)"]
)
def test_bytes_that_are_no_text_are_no_fault_of_ours(monkeypatch, source):
    monkeypatch.setattr(nvml, "_CUDA_ORDER", "import sys; " + source)
    nvml._cuda_order.cache_clear()
    if "stdout" in source:
        assert ASK_CUDA({}) == ["CUDA-1", "\ufffd"]
    else:
        with pytest.raises(UserError, match="\\(\ufffd\\)"):
            ASK_CUDA({})
    nvml._cuda_order.cache_clear()


FAST_FIRST = {"CUDA_VISIBLE_DEVICES": "0"}
BY_BUS = {**FAST_FIRST, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("env", "first"), [(FAST_FIRST, 1), (BY_BUS, 0), ({"CUDA_VISIBLE_DEVICES": uuid(0)}, 0)])
def test_an_index_among_unequal_cards_counts_in_cudas_order(play, cuda, env, first):
    asked = cuda("CUDA" + uuid(1)[3:], "CUDA" + uuid(0)[3:])
    play(numbered(0, Name="NVIDIA GeForce RTX 3090"), numbered(1, Name="NVIDIA GeForce RTX 4090"))
    assert names(env) == [uuid(first)]
    assert gpu_parts(env)[0]["gpu"] == ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090")[first]
    assert bool(asked) == (env is FAST_FIRST)


def test_a_card_that_nvml_does_not_show_keeps_its_place_in_cudas_order(play, cuda):
    cuda("CUDA-ffff", "CUDA" + uuid(0)[3:])
    play(numbered(0), numbered(1, Name="NVIDIA L4"))
    assert names({"CUDA_VISIBLE_DEVICES": "1"}) == [uuid(0)]


@pytest.mark.parametrize("chosen", ["", "-1", "NoDevFiles", "7", "GPU-ffff", "MIG-ffff", "0,0"])
def test_a_server_that_would_see_no_card_is_one_line(play, chosen):
    play(numbered(0), numbered(1))
    with pytest.raises(UserError) as caught:
        gpus_in_use({"CUDA_VISIBLE_DEVICES": chosen})
    assert str(caught.value) == (
        f"CUDA_VISIBLE_DEVICES={chosen!r} leaves no GPU visible; unset it or name one of {uuid(0)} (NVIDIA H200), {uuid(1)} (NVIDIA H200)"
    )


def test_a_cuda_that_gives_out_no_card_is_one_line(play, cuda):
    cuda()
    play(numbered(0), numbered(1))
    with pytest.raises(UserError, match=r"^CUDA by itself leaves no GPU visible; set CUDA_VISIBLE_DEVICES to one of GPU-0a"):
        gpus_in_use({})


def test_a_machine_without_a_card_is_one_line(play):
    play()
    with pytest.raises(UserError, match=r"this machine has no NVIDIA GPU; .*--kv-gpu=cpu"):
        gpu_parts({})


# --- MIG -----------------------------------------------------------------------------------------------------------

SMALL, LARGE = mig_slice(1, "1g.18gb"), mig_slice(2, "3g.71gb", MemoryInfo={"struct": {"total": 75161927680}})


@pytest.mark.parametrize(
    "chosen", [LARGE["nvmlDeviceGetUUID"], "MIG-2c00", f"MIG-{H200['nvmlDeviceGetUUID']}/2/0", "MIG-GPU-0a00/2/0"]
)  # fmt: skip
def test_a_slice_is_known_by_all_its_names(play, cuda, chosen):
    play(sliced(H200, SMALL, LARGE))
    identity, subject, context = gpu_parts({"CUDA_VISIBLE_DEVICES": chosen})
    assert identity == {"gpu": "NVIDIA H200", "mig": "3g.71gb", "gpu_power_limit_w": 700}
    assert (subject["gpu_mig_mode"], subject["gpu_memory_mib"]) == ("on", 71680)
    assert (context["gpu_uuids"], context["gpu_mig_uuids"]) == ([H200["nvmlDeviceGetUUID"]], [LARGE["nvmlDeviceGetUUID"]])


def test_a_process_is_given_one_slice(play, cuda):
    both = f"{SMALL['nvmlDeviceGetUUID']},{LARGE['nvmlDeviceGetUUID']}"
    play(sliced(H200, SMALL, LARGE))
    assert names({"CUDA_VISIBLE_DEVICES": both}) == [SMALL["nvmlDeviceGetUUID"]]


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_which_slice_comes_first_is_cudas_word(play, cuda, env):
    asked = cuda("CUDA" + LARGE["nvmlDeviceGetUUID"][3:])
    play(sliced(H200, SMALL, LARGE))
    assert names(env) == [LARGE["nvmlDeviceGetUUID"]]
    assert asked


def test_a_slice_alone_needs_no_word_of_cuda(play, cuda):
    asked = cuda()
    play(sliced(H200, SMALL))
    assert names({}) == [SMALL["nvmlDeviceGetUUID"]]
    assert not asked


@pytest.mark.parametrize("hidden", [sliced(H200), sliced(H200, mig_slice(1, "1g.18gb", Name={"error": "NoPermission"}))])
def test_a_slice_of_unknown_profile_is_not_taken_for_a_whole_card(play, hidden):
    play(hidden)
    identity, subject, _ = gpu_parts({})
    assert identity == {"gpu": "NVIDIA H200", "mig": "unknown", "gpu_power_limit_w": 700}
    assert subject["gpu_memory_mib"] != 143771


# --- CUDA's own word -----------------------------------------------------------------------------------------------


def child(monkeypatch, **answer):
    seen = []

    def run(argv, *, env, **_):
        seen.append(env)
        if "error" in answer:
            raise answer["error"]
        return subprocess.CompletedProcess(argv, answer.get("code", 0), answer.get("out", ""), answer.get("err", ""))

    monkeypatch.setattr(nvml.subprocess, "run", run)
    return seen


def test_cuda_is_asked_as_if_nothing_hid_a_card(monkeypatch):
    seen = child(monkeypatch, out="CUDA-1\nCUDA-0\n")
    assert ASK_CUDA({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == ["CUDA-1", "CUDA-0"]
    assert seen == [{"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"code": 1, "err": "Traceback\nOSError: libcuda.so.1: cannot open"}, "OSError: libcuda.so.1: cannot open"),
        ({"code": 1, "err": "cuInit gives error 100"}, "cuInit gives error 100"),
        ({"code": -11}, "exit status -11"),
        ({"error": subprocess.TimeoutExpired("x", 30)}, "no answer in 30 s"),
        ({"error": OSError("no more processes")}, "no more processes"),
    ],
)
def test_a_cuda_that_cannot_be_asked_is_one_line_and_never_a_guess(monkeypatch, answer, why):
    child(monkeypatch, **answer)
    with pytest.raises(UserError) as caught:
        ASK_CUDA({})
    assert f"({why}): name the card by its UUID in CUDA_VISIBLE_DEVICES" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_question_to_cuda_runs_here_and_fails_in_one_line_without_a_library():
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", nvml._CUDA_ORDER.replace("libcuda", "libnone")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("OSError: libnone.so.1")
