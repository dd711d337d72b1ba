"""Adapters: golden command lines, bodies, the registry and its errors. No framework is installed for this."""

import dataclasses
import json
from importlib.metadata import EntryPoint

import pytest

from pytest_kvcache import frameworks
from pytest_kvcache.core.framework import Framework, Launch
from pytest_kvcache.core.spec import Arm, UserError
from pytest_kvcache.frameworks.transformers import TRANSFORMERS


def launch(**more):
    return Launch(**{"python": "/venv/bin/python", "model": "/models/m", "port": 8000, "device": "cpu", "arm": Arm()} | more)


def test_transformers_command_line():
    assert TRANSFORMERS.argv(launch()) == [
        "/venv/bin/python", "-m", "transformers.cli.transformers", "serve", "/models/m", "--continuous-batching",
        "--host", "127.0.0.1", "--port", "8000", "--device", "cpu", "--dtype", "bfloat16",
    ]  # fmt: skip


def test_transformers_command_line_with_everything_asked_for():
    arm = Arm(name="b", weight_dtype="float32", block_size=64)
    words = TRANSFORMERS.argv(launch(arm=arm, device="gpu", command=("docker", "run", "image"), serve_args=("--log-level", "info")))
    assert words[:4] == ["docker", "run", "image", "/models/m"]
    assert words[-8:] == ["--device", "cuda", "--dtype", "float32", "--cb-block-size", "64", "--log-level", "info"]


def test_transformers_body_ignores_the_end_of_text():
    body = TRANSFORMERS.body("m", " a b", 7)
    assert {k: body[k] for k in ("model", "prompt", "max_tokens", "stream")} == {
        "model": "m",
        "prompt": " a b",
        "max_tokens": 7,
        "stream": True,
    }
    assert json.loads(body["generation_config"]) == {"do_sample": False, "eos_token_id": -1}


def test_every_installed_adapter_loads_and_is_named_as_its_entry_point():
    assert "transformers" in frameworks.names()
    for name in frameworks.names():
        assert isinstance(frameworks.load(name), Framework)
        assert frameworks.load(name).name == name


@pytest.mark.parametrize("spelling", ["transformers", "Transformers", "TRANSFORMERS"])
def test_spelling_is_forgiven(spelling):
    assert frameworks.load(spelling) is TRANSFORMERS


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(UserError, match="did you mean transformers"):
        frameworks.load("transformer")


@pytest.mark.parametrize("name", ["my-engine", "My_Engine", "my.engine", "my engine", "MY-ENGINE"])
def test_an_entry_point_of_whatever_spelling_is_found_by_whatever_spelling(monkeypatch, name):
    """And has that name throughout, also where its adapter calls itself otherwise."""
    monkeypatch.setattr(frameworks, "entry_points", lambda group: [EntryPoint(name, f"{TRANSFORMERS.argv.__module__}:TRANSFORMERS", group)])
    assert frameworks.names() == ["my_engine"]
    for spelling in (name, "my-engine", "My_Engine", "my.engine"):
        assert frameworks.load(spelling) == dataclasses.replace(TRANSFORMERS, name="my_engine")


def test_two_adapters_of_one_name_are_told_apart_by_nobody(monkeypatch):
    points = [EntryPoint("my-engine", "a:A", frameworks.GROUP), EntryPoint("my_engine", "b:B", frameworks.GROUP)]
    monkeypatch.setattr(frameworks, "entry_points", lambda group: points)
    with pytest.raises(UserError, match=r"^--kv-framework=My-Engine: a:A and b:B are both called my_engine; uninstall one of them$"):
        frameworks.load("My-Engine")


@pytest.mark.parametrize(("value", "words"), [("no.such.module:X", "cannot be imported"), ("json:dumps", "not a Framework")])
def test_a_broken_third_party_adapter_is_one_line(monkeypatch, value, words):
    monkeypatch.setattr(frameworks, "entry_points", lambda group: [EntryPoint("theirs", value, group)])
    with pytest.raises(UserError, match=words):
        frameworks.load("theirs")
