"""The catalogues: every GPU and model can be found by what people type, and nothing by accident."""

import pytest

from pytest_kvcache.core.gpus import ALIASES, GPUS, find_gpu
from pytest_kvcache.core.models import DEFAULT_MODEL, MODELS, find_model
from pytest_kvcache.core.spec import UserError


def test_every_row_is_found_and_has_its_figures():
    for key, gpu in GPUS.items():
        assert find_gpu(key.upper()) is gpu
        if key != "cpu":
            assert gpu.nvml_names, key
            assert gpu.source, key
    unconfirmed = {key for key, gpu in GPUS.items() if key != "cpu" and not (gpu.memory_gb and gpu.bandwidth_gb_s)}
    assert unconfirmed == {"h20-3e", "h800-pcie", "h800-nvl", "l20"}, "figures that no source confirmed stay None, never 0"
    assert all(target in GPUS for target in ALIASES.values())


def test_no_nvml_name_means_two_cards():
    """Except where a card's own name does not tell its variants apart."""
    seen = {}
    for gpu in GPUS.values():
        for name in gpu.nvml_names:
            seen.setdefault(name, []).append(gpu.key)
    assert {n: k for n, k in seen.items() if len(k) > 1} == {}


def test_an_unknown_gpu_is_told_the_nearest_and_all_known():
    with pytest.raises(UserError, match=r"did you mean l40s\? Known: .*rtx-4090"):
        find_gpu("l40ss")


@pytest.mark.parametrize(("name", "key"), [
    ("smollm2-135m", "smollm2-135m"), ("SmolLM2-135M", "smollm2-135m"), ("/models/My-Model", "my-model"), ("./x/", "x"), ("org/Name", "org--name"),
    ("weights.gguf", "weights"), ("dir/weights.Q4.gguf", "weights.q4"),
])  # fmt: skip
def test_models_by_key_path_and_hub_id(name, key):
    assert find_model(name).key == key


@pytest.mark.parametrize("name", ["", "nosuch", "a/b/c"])
def test_what_is_no_model_is_none(name):
    assert find_model(name) is None


def test_default_models_are_in_the_catalogue():
    assert set(DEFAULT_MODEL.values()) <= set(MODELS)
