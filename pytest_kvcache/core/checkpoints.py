"""Which arms are served from weights that were quantised before, by the checkpoints that the catalogue names beside a model. Pure."""

from __future__ import annotations

import dataclasses

from .framework import Framework
from .spec import Arm, Model

FORMATS = ("w8a8", "awq", "gptq")  # what `Arm.quantization` says of weights that no server makes of others when it loads them


def checkpoint(framework: Framework, model: Model, arm: Arm) -> str:
    """The hub id of the weights that an arm's server loads in place of the model's; empty where it loads the model's own."""
    return "" if model.dummy or not framework.checkpoints else model.checkpoints.get(arm.quantization, "")


def as_served(framework: Framework, model: Model, arm: Arm) -> Arm:
    """What the server of an arm is told: a checkpoint says itself how it was quantised."""
    return dataclasses.replace(arm, quantization="auto") if checkpoint(framework, model, arm) else arm


def lacking(framework: Framework, model: Model, arm: Arm) -> str:
    """Why there are no such weights of the model for the framework; empty when there are, or when the server may make them."""
    asked = arm.quantization
    if asked not in FORMATS or checkpoint(framework, model, arm):
        return ""
    if not framework.checkpoints:
        return f"{framework.name} loads no checkpoint of {asked} here"
    if model.dummy:
        return f"random weights are in no checkpoint of {asked}"
    return f"the catalogue names no checkpoint of {asked} for {model.key}"
