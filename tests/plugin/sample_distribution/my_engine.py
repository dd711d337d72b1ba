"""All that a third party writes to have its engine judged: one description, which `entry_points.txt` names."""

import os

from pytest_kvcache.core.framework import Framework, Launch

SERVER = os.environ["MY_ENGINE_SERVER"]  # the program; an engine of one's own would be a module of its interpreter


def argv(launch: Launch) -> list[str]:
    said = [launch.python, SERVER, "--model", launch.model, "--host", launch.host, "--port", str(launch.port), "--tpot-ms", "2"]
    return [*said, *launch.serve_args]


def body(model: str, prompt: str, osl: int) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": osl, "stream": True}


MY_ENGINE = Framework(
    name="my_engine", argv=argv, body=body, needs=("my_engine",), cure="pip install my-engine", distributions=("my-engine",),
    resolved=(("host", r"fake engine: pid \d+, ([\d.]+):"),),
)  # fmt: skip
