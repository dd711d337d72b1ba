"""An arm of quantised weights is served and scored from its checkpoint, which is identity; one of another vocabulary is refused."""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_kvcache.core.gpus import find_gpu
from pytest_kvcache.core.models import MODELS
from pytest_kvcache.core.spec import Arm, UserError
from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness import weights
from pytest_kvcache.harness.engine import EngineRunner, EngineSpec

QWEN = MODELS["qwen3-4b-2507"]
VOCABULARY = {"\u0120" + "".join(letters): i for i, letters in enumerate(itertools.product("abcdefghijk", repeat=3))}
OWN, W8A8, KV = Arm(name="fp16"), Arm(name="w8a8", quantization="w8a8"), Arm(name="int8", kv_dtype="int8")
CHECKPOINT = QWEN.checkpoints["w8a8"]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A runner whose hub has the model and its checkpoint; `others` are vocabularies that are not the model's."""

    def make(others=None):
        def hub_file(python, model, name):
            folder = tmp_path / model.hub_id.replace("/", "--") / f"revision-of-{model.hub_id.rpartition('/')[2]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({"model": {"vocab": (others or {}).get(model.hub_id, VOCABULARY)}}))
            return folder / name

        monkeypatch.setattr(weights, "hub_file", hub_file)
        spec = EngineSpec(framework=replace(VLLM, distributions=()), model=QWEN, gpu=find_gpu("cpu"), python=sys.executable)
        return EngineRunner(spec, session_id="s", logs=tmp_path / "logs", say=lambda line: None)

    return make


def test_a_server_loads_the_checkpoint_and_is_told_of_no_method(runner):
    engine = runner()
    own, quantised = engine.launch(OWN), engine.launch(replace(W8A8, kv_dtype="fp8"))
    assert (own.model, quantised.model) == (QWEN.hub_id, CHECKPOINT)
    assert VLLM.argv(quantised)[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", CHECKPOINT]
    assert "--quantization" not in VLLM.argv(quantised) and VLLM.argv(quantised)[-2:] == ["--kv-cache-dtype", "fp8"]


def test_the_weights_of_each_arm_are_identity(runner):
    identity = runner().environment([OWN, W8A8, KV])["identity"]
    assert identity["weights"] == f"hub:{QWEN.hub_id}@revision-of-Qwen3-4B-Instruct-2507"
    assert identity["arm:w8a8:weights"] == f"hub:{CHECKPOINT}@revision-of-{Path(CHECKPOINT).name}"
    assert "arm:int8:weights" not in identity


def test_another_vocabulary_would_be_other_texts(runner):
    with pytest.raises(UserError) as told:
        runner({CHECKPOINT: VOCABULARY | {"d": 5000}}).launch(W8A8)
    assert (
        str(told.value)
        == f"model qwen3-4b-2507: the checkpoint {CHECKPOINT} has another vocabulary than the model itself; leave its arm out"
    )


def test_the_hub_may_be_asked_where_an_arm_needs_it(runner):
    assert "HF_HUB_OFFLINE" not in {k: v for k, v in runner()._env(runner().launch(W8A8)).items() if os.environ.get(k) != v}


def test_its_probe_is_told_the_weights_and_of_no_method(runner):
    scorer = runner()._scorer
    assert scorer._words(W8A8) == {"kv": "auto", "model": CHECKPOINT}
    assert scorer._words(KV) == {"kv": "int8_per_token_head"}
    assert scorer._words(Arm(name="wfp8", quantization="fp8")) == {"kv": "auto", "model": QWEN.checkpoints["fp8"]}


def test_a_checkpoint_that_cannot_be_had_is_the_fault_of_its_arm_alone(runner):
    engine = runner({CHECKPOINT: VOCABULARY | {"d": 5000}})
    assert engine.environment([OWN, W8A8])["identity"]["arm:w8a8:weights"] == "not there"
    scorer = engine._scorer
    assert (scorer._lacks(OWN), scorer._lacks(KV)) == ("", "")
    assert scorer._lacks(W8A8).endswith("has another vocabulary than the model itself; leave its arm out")
