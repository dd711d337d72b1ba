"""SGLang, TensorRT-LLM and TGI from the option to the report, as they are documented (tests/documented_server.py): none can run here.

A framework of somebody else's, which an entry point names, goes the same way.
"""

import itertools
import json
import pathlib
import shutil
import string
import sys

import pytest

from pytest_kvcache import frameworks
from pytest_kvcache.core.flags import unsupported
from pytest_kvcache.core.framework import Launch
from pytest_kvcache.core.spec import Arm

from ..documented_server import ENGINES, Refused, parsed
from .conftest import Project

TESTS = pathlib.Path(__file__).parents[1]
SAMPLE = TESTS / "plugin" / "sample_distribution"
CONFTEST = """
# What is told to a server and read from it is looked at here, not how fast it is: whatever else runs on this machine is no matter.
from pytest_kvcache.core import validity
from pytest_kvcache.harness import engine

validity.MAX_FOREIGN_CORES = validity.MAX_STEAL_CORES = validity.MAX_CLIENT_CORES = validity.MAX_SLOT_IDLE = 1e9
validity.MAX_SEND_LAG_MS = validity.MAX_LOOP_LAG_MS = 1e9
engine.QUIET_S = 0.05
"""
SUITE = """
import pytest
from pytest_kvcache import Arm, ClosedLoop

SMALL = ClosedLoop(isl=64, osl=8, concurrency=2, requests=8, profile="smoke", arms=({arm!r},))

@pytest.mark.kv_gates("output_tok_s")
@pytest.mark.parametrize("kv_scenario", [SMALL], ids=str)
def test_small(kv_result, kv_gate):
    kv_gate(kv_result)
"""
VERSIONS = {"sglang": "0.5.23", "tensorrt_llm": "1.2.0", "tgi": "3.3.4"}
CONFIG = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}
TOKEN = 2 * 2 * 2 * 64 * 2  # bytes of the KV cache, at 16 bits; the documented server has 64 MiB where nothing says how much
POOL = 64 * 2**20 // TOKEN
OUTPUT, INPUT = 8 * 8, 8 * 64


@pytest.fixture
def project(tmp_path):
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=3))
    vocab = {f"\u0120{word}": i for i, word in enumerate(itertools.islice(words, 2000))}
    model = tmp_path / "tiny-model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"few bytes")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_small.py").write_text(SUITE.format(arm=Arm()))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tmp").mkdir()
    return Project(tmp_path)


def run(project, framework, *args, arm=None, version=""):
    """A smoke session of one small scenario on a documented server."""
    (project.folder / "test_small.py").write_text(SUITE.format(arm=arm or Arm()))
    command = f"kv_command_{framework}={sys.executable} {TESTS / 'documented_server.py'} {framework} {version or VERSIONS[framework]}"
    model = project.folder / "tiny-model"
    return project.run(f"--kv-framework={framework}", f"--kv-model={model}", "--kv-profile=smoke", "-o", command, *args)


def measured(result):
    """The one measurement of a session: what the server's counters grew by, what its page says, what it resolved."""
    assert result.code == 0, result.out
    (block,) = result.run["blocks"].values()
    (one,) = block["measurements"]
    assert one["valid"], one["invalid"]
    before, after = one["load"]["counters"]
    (environment,) = result.run["environments"].values()
    resolved = {k.rpartition(":")[2]: v for k, v in environment["subject"].items() if k.startswith("resolved:")}
    return {k: after[k] - before[k] for k in before}, one["load"]["cache"], resolved


@pytest.mark.parametrize(("framework", "grown", "cache", "resolved"), [
    ("sglang", {"output": OUTPUT, "input": INPUT, "prefix_queries": INPUT}, {"kv_capacity_tokens": POOL, "waiting": 0}, {
        "attention_backend": "intel_amx", "kv_tokens": POOL, "max_model_len": 2048, "max_requests": 2048, "chunked_prefill_size": 8192,
        "block_size": 1, "dtype": "bfloat16", "kv_dtype": "auto + bfloat16",
        "kv_memory": "K size: 0.03 GB, V size: 0.03 GB",
    }),
    ("tensorrt_llm", {"prefix_queries": INPUT, "prefix_hits": 0}, {
        "kv_capacity_tokens": POOL, "kv_usage": 0, "kv_used_tokens": 0, "running": 0, "waiting": 0,
    }, {
        "kv_tokens": POOL, "kv_memory": "0.06 GiB", "block_size": 32, "kv_blocks": POOL // 32, "prefix_caching": "enabled", "max_model_len": 2048,
        "max_requests": 2048, "max_batched_tokens": 8192,
    }),
    ("tgi", {"output": OUTPUT, "input": INPUT}, {"running": 0, "waiting": 0}, {
        "attention_backend": "flashinfer", "prefix_caching": "true", "kv_blocks": POOL, "block_size": 1, "kv_tokens": POOL,
    }),
])  # fmt: skip
def test_a_session_counts_what_was_served_and_says_what_the_server_made_of_its_defaults(project, framework, grown, cache, resolved):
    result = run(project, framework)
    assert measured(result)[0] == grown
    assert measured(result)[1].items() >= cache.items()
    assert measured(result)[2] == resolved


@pytest.mark.parametrize(("framework", "arm", "cache", "resolved"), [
    ("sglang", Arm(
        name="all", kv_dtype="fp8", weight_dtype="float16", quantization="fp8", block_size=16, max_requests=4, max_batched_tokens=4096,
        prefix_cache=True, chunked_prefill=False, context=1024, cpu_offload_gib=1.0,
    ), {"kv_capacity_tokens": 2 * POOL}, {
        "kv_tokens": 2 * POOL, "max_model_len": 1024, "max_requests": 4, "chunked_prefill_size": "-1", "block_size": 16, "dtype": "float16",
        "kv_dtype": "fp8_e4m3 + float8_e4m3fn", "kv_scales_missing": "Using FP8 KV cache but no scaling factors provided",
    }),
    ("sglang", Arm(name="cold", prefix_cache=False), {}, {"block_size": 1}),
    ("tensorrt_llm", Arm(
        name="all", kv_dtype="fp8", weight_dtype="bfloat16", block_size=64, kv_gib=0.25, max_requests=4, max_batched_tokens=4096,
        prefix_cache=False, chunked_prefill=True, context=1024, cpu_offload_gib=0.5,
    ), {"kv_capacity_tokens": 8 * POOL}, {
        "kv_tokens": 8 * POOL, "block_size": 64, "kv_blocks": POOL // 8, "prefix_caching": "disabled", "max_model_len": 1024,
        "max_requests": 4, "max_batched_tokens": 4096,
    }),
    ("tgi", Arm(
        name="all", kv_dtype="fp8", weight_dtype="float16", quantization="bitsandbytes-nf4", max_requests=4, max_batched_tokens=4096,
        prefix_cache=False, context=1024,
    ), {}, {"prefix_caching": 0, "kv_tokens": 2 * POOL}),
], ids=lambda v: v.name if isinstance(v, Arm) else None)  # fmt: skip
def test_an_arm_that_asks_for_everything_is_served_so(project, framework, arm, cache, resolved):
    grown, told, found = measured(run(project, framework, arm=arm))
    assert {k: v for k, v in grown.items() if k in ("output", "input")} == (
        {} if framework == "tensorrt_llm" else {"output": OUTPUT, "input": INPUT}
    )
    assert told.items() >= cache.items()
    assert found.items() >= resolved.items()


@pytest.mark.parametrize(("framework", "version", "arm", "args", "words"), [
    ("sglang", "", None, ["--kv-serve-arg=--no-such-flag"], "this version does not know the argument --no-such-flag"),
    ("tensorrt_llm", "", None, ["--kv-serve-arg=--no-such-flag"], "this version does not know the option --no-such-flag"),
    ("tgi", "", None, ["--kv-serve-arg=--no-such-flag"], "this version does not know the argument --no-such-flag"),
    ("tensorrt_llm", "1.0.0", Arm(name="a", block_size=64), [], "this version does not know the setting kv_cache_config.tokens_per_block"),
    ("tgi", "2.3.1", Arm(name="a", kv_dtype="fp8"), [], "this version does not know the argument --kv-cache-dtype"),
    ("sglang", "0.5.5", Arm(name="a", kv_dtype="nvfp4"), [], "this version has no 'nvfp4' for --kv-cache-dtype"),
    ("sglang", "", Arm(name="a", block_size=48, max_batched_tokens=4096), [], "max_batched_tokens must be a multiple of block_size"),
    ("tgi", "", Arm(name="a", context=99999), [], f"the context of 99999 tokens is larger than the KV cache, which holds {POOL}"),
], ids=lambda v: v.name if isinstance(v, Arm) else None)  # fmt: skip
def test_what_a_server_refuses_is_named_with_the_end_of_its_log(project, framework, version, arm, args, words):
    result = run(project, framework, *args, arm=arm, version=version)
    assert result.code == 1, result.out
    ours, end, _ = result.out.partition("end of ")
    assert words in ours and end and "Traceback" not in ours
    assert set(result.verdicts.values()) == {"invalid"}


SETTINGS = {
    "kv_dtype": "fp8", "weight_dtype": "bfloat16", "quantization": "fp8", "block_size": 64, "kv_gib": 1.0, "max_requests": 8,
    "max_batched_tokens": 4096, "prefix_cache": False, "chunked_prefill": False, "context": 1024, "cpu_offload_gib": 1.0,
    "disk_offload_gib": 1.0,
}  # fmt: skip
TOGETHER = {"max_requests": 8, "max_batched_tokens": 4096, "prefix_cache": True, "context": 1024}


@pytest.mark.parametrize(("name", "version"), [
    *(("sglang", v) for v in ("0.4.3", "0.4.5", "0.4.6", "0.5.0", "0.5.4", "0.5.6", "0.5.15", "0.5.16", "0.5.23")),
    *(("tensorrt_llm", v) for v in ("0.20.0", "1.0.0", "1.1.0", "1.2.0rc4", "1.3.0")), *(("tgi", v) for v in ("2.1.1", "2.3.1", "2.4.0", "3.3.4")),
])  # fmt: skip
def test_whatever_a_version_can_be_told_it_takes(project, name, version):
    """Each setting, each precision, and all at once that go together; what it checks of them only when it starts, too."""
    framework, refused, model = frameworks.load(name), [], str(project.folder / "tiny-model")
    asked = [{}, *({k: v} for k, v in SETTINGS.items()), *({"kv_dtype": v} for v in framework.kv_dtypes), TOGETHER]
    for settings in asked:
        arm = Arm(**settings)
        if unsupported(framework, arm, version):
            continue
        folder = str(project.folder)
        launch = Launch(python="python", command=("x",), model=model, port=8000, device="cpu", arm=arm, version=version, folder=folder)
        for file, text in framework.files(launch).items():
            (project.folder / file).write_text(text)
        try:
            ENGINES[name](version, parsed(name, version, framework.argv(launch)[1:]))
        except Refused as e:
            refused.append(f"{settings}: {e}")
    assert refused == []


def test_tgi_serves_on_one_of_several_gpus_that_are_seen(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert measured(run(project, "tgi"))[2]["kv_tokens"] == POOL


def test_every_documented_engine_has_an_adapter():
    assert set(ENGINES) == set(VERSIONS) <= set(frameworks.names())


def test_tensorrt_llms_page_is_emptied_by_reading_and_an_unknown_field_is_refused(project):
    engine = ENGINES["tensorrt_llm"]
    asked = parsed("tensorrt_llm", "1.2.0", [str(project.folder / "tiny-model")])
    one = engine("1.2.0", asked)
    one.begin()
    assert one.metrics()[0] == "[]", "nothing is kept without enable_iter_perf_stats"
    one.counts = True
    list(one.tokens(("a", "b"), 3))
    assert [i["iter"] for i in json.loads(one.metrics()[0])] == [1, 2, 3]
    assert one.metrics()[0] == "[]"


@pytest.fixture
def somebody_elses(project, monkeypatch):
    """A distribution of somebody else's on the path, of which nothing here knows."""
    shutil.copytree(SAMPLE, project.folder / "site")
    monkeypatch.setenv("PYTHONPATH", str(project.folder / "site"))
    monkeypatch.setenv("MY_ENGINE_SERVER", str(TESTS / "fake_engine.py"))
    return ["--kv-gpu=cpu", f"--kv-model={project.folder / 'tiny-model'}", "--kv-profile=smoke"]


def test_an_entry_point_alone_adds_a_framework(project, somebody_elses):
    result = project.run(*somebody_elses, "--kv-framework=my_engine")
    assert result.code == 0, result.out
    ((name, environment),) = result.run["environments"].items()
    assert name.startswith("my_engine/tiny-model/")
    assert environment["subject"]["dist:my-engine"] == "1.0" and environment["subject"]["resolved:host"] == "127.0.0.1"
    ((m,),) = (b["measurements"] for b in result.run["blocks"].values())
    assert m["valid"] and m["requests"] == 8


@pytest.mark.parametrize(("entry", "asked", "name"), [
    ("my-engine", "my-engine", "my_engine"), ("My_Other", "my.other", "my_other"), ("lmdeploy.v2", "LMDeploy.v2", "lmdeploy_v2"),
])  # fmt: skip
def test_an_entry_point_may_have_any_name_and_its_adapter_another(project, somebody_elses, entry, asked, name):
    (points,) = (project.folder / "site").glob("*.dist-info/entry_points.txt")
    points.write_text(f"[pytest_kvcache.frameworks]\n{entry} = my_engine:MY_ENGINE\n")
    python = f"kv_python_{name}={sys.executable}"
    result = project.run(*somebody_elses, f"--kv-framework={asked}", f"--kv-framework={name}", "-o", python)
    assert result.code == 0, result.out
    assert [environment.split("/")[0] for environment in result.run["environments"]] == [name], "two spellings are one framework"
    unknown = project.run(*somebody_elses, f"--kv-framework={name}x")
    assert unknown.code == 4 and f"did you mean {name}? " in unknown.out


def test_an_unknown_name_is_told_the_frameworks_of_others_too(project, somebody_elses):
    result = project.run(*somebody_elses, "--kv-framework=no_such")
    assert result.code == 4
    assert "--kv-framework=no_such: no such framework." in result.out and "my_engine" in result.out.partition("Known: ")[2]


MIXED = """
import pytest
from pytest_kvcache import LogNormal, OpenLoop, Uniform

LOAD = OpenLoop(isl=LogNormal(median=60, sigma=0.8, high=300), osl=Uniform(low=4, high=24), rate=40, requests=40, profile="smoke")

@pytest.mark.kv_gates("output_tok_s", "ttft_ms.p50")
@pytest.mark.parametrize("kv_scenario", [LOAD], ids=str)
def test_mixed(kv_result, kv_gate):
    kv_gate(kv_result)
"""


@pytest.mark.parametrize("framework", ["sglang", "tgi"])
def test_requests_of_mixed_lengths_are_counted_each_and_judged_again_from_their_file(project, framework):
    import numpy as np

    (project.folder / "test_mixed.py").write_text(MIXED)
    result = run(project, framework, "-k", "mixed")
    (found,) = [m for m in next(iter(result.run["blocks"].values()))["measurements"]]
    assert found["valid"], found["invalid"]
    stored = np.load(project.folder / f"report{project.calls}" / "records.npz")
    order = np.argsort(stored["index"])
    assert stored["input_tokens"][order].tolist() == stored["lengths_isl"].tolist() and len(set(stored["lengths_isl"])) > 20
    assert stored["output_tokens"][order].tolist() == stored["lengths_osl"].tolist() and set(stored["lengths_osl"]) <= set(range(4, 25))
    again = project.run(f"--kv-replay={project.folder / f'report{project.calls}'}")
    assert again.verdicts == result.verdicts and again.code == result.code == 0, again.out
