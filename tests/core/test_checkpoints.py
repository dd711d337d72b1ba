"""Weights that were quantised before: which arms are served from them, and which there are none for."""

import dataclasses

import pytest

from pytest_kvcache.core.checkpoints import FORMATS, as_served, checkpoint, lacking
from pytest_kvcache.core.models import MODELS, find_model
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM

QWEN, SMOL = MODELS["qwen3-4b-2507"], MODELS["smollm2-135m"]
W8A8 = Arm(name="w8a8", quantization="w8a8", kv_dtype="fp8")


def test_an_arm_is_served_from_the_checkpoint_that_the_catalogue_names():
    assert checkpoint(VLLM, QWEN, W8A8) == "RedHatAI/Qwen3-4B-Instruct-2507-quantized.w8a8"
    assert as_served(VLLM, QWEN, W8A8) == dataclasses.replace(W8A8, quantization="auto"), "the checkpoint says itself what it is"
    assert lacking(VLLM, QWEN, W8A8) == ""


@pytest.mark.parametrize("arm", [Arm(), Arm(quantization="bitsandbytes"), Arm(kv_dtype="int8")])
def test_other_arms_stay_as_they_are(arm):
    assert (checkpoint(VLLM, QWEN, arm), as_served(VLLM, QWEN, arm), lacking(VLLM, QWEN, arm)) == ("", arm, "")


def test_a_framework_makes_what_the_catalogue_does_not_name():
    fp8 = Arm(quantization="fp8")
    assert checkpoint(VLLM, QWEN, fp8) and not checkpoint(VLLM, SMOL, fp8) and not lacking(VLLM, SMOL, fp8)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("framework", "model", "why"),
    [
        (VLLM, SMOL, "the catalogue names no checkpoint of {0} for smollm2-135m"),
        (VLLM, find_model("/models/mine"), "the catalogue names no checkpoint of {0} for mine"),
        (VLLM, find_model("qwen3-4b-2507:dummy"), "random weights are in no checkpoint of {0}"),
        (LLAMA_CPP, QWEN, "llama_cpp loads no checkpoint of {0} here"),
        (TRANSFORMERS, QWEN, "transformers loads no checkpoint of {0} here"),
    ],
)
def test_where_there_is_none_the_reason_is_said(framework, model, why, kind):
    arm = Arm(quantization=kind)
    assert lacking(framework, model, arm) == why.format(kind)
    assert as_served(framework, model, arm) == arm
