"""Scores and continues texts through the KV cache of SGLang. One arm a process: an engine has one precision.

A window goes in by steps, each a request of all its tokens so far, of which SGLang computes the last ones only; the keys and values of
those before them lie in its KV pool and nowhere else, kept there by the request before. That a step read them is what its answer says:
`cached_tokens`. Where that is not what was asked for, nothing is scored.

Read in sgl-project/sglang 0.5.10.post1, 0.5.16 and 0.5.23 (`python/sglang/srt/`): a prefix is reused up to `logprob_start_len` tokens
and to whole pages (`managers/schedule_batch.py`, `init_next_round_input`), counted in `prepare_for_extend` as the length that attention is
given; log-probabilities come from that token on, those of the token itself being None (`managers/scheduler_components/
logprob_result_processor.py`; before 0.5.16 a mixin), as float32. FlashInfer attends to a step's own tokens as they are and to those
before it as they were kept (`layers/attention/flashinfer_backend.py`, `forward_extend`), Triton and torch's own to all as they were kept.

Met with 0.5.23 on a processor alone, outside what SGLang is built for (torch's own attention, float32 and bfloat16): no GPU was asked.

An arm: `kv`, SGLang's `--kv-cache-dtype` (`auto`); `model`, other weights; `one_pass`; `spoil`: all that is cached is zeroed after each
step (sglang_pool.py), a control that must be seen. In place of a divergence come `top_ids` and `top_logprobs`: those of the `top` (20)
likeliest tokens where a scored one was predicted, the likeliest first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Before it is imported: a window as long as the model's context, and a few tokens more that are never read.
os.environ.update(SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1")
sys.path.insert(0, str(Path(__file__).parent))

import sglang  # type: ignore[import-not-found]
import sglang_pool  # type: ignore[import-not-found]  # by its path, as those below
from alone import TOP, Place, arm_of, in_one_line, walked  # type: ignore[import-not-found]
from asked import main, tokens

SPARE = 16  # tokens that the scheduler keeps of a context for itself (6, `max_req_input_len`), and the one that a request asks for
VERSIONS = {"sglang": sglang.__version__}


class InReach(getattr(sglang, "Engine", object)):  # type: ignore[misc]
    """SGLang's engine, whose scheduler can be asked of its pool."""

    run_scheduler_process_func = staticmethod(sglang_pool.run_scheduler)


class Engine:
    """SGLang with one arm's cache, for one request of at most `longest` tokens at a time."""

    def __init__(self, request: Mapping[str, Any], arm: Mapping[str, Any], longest: int) -> None:
        if not hasattr(sglang.Engine, "run_scheduler_process_func"):
            raise SystemExit(f"SGLang {sglang.__version__} keeps its KV pool out of reach; 0.5.7 and later do not")
        self.step = longest if arm.get("one_pass") else min(request["step"], longest)
        self.spoils, self.top = bool(arm.get("spoil")), request.get("top", TOP)
        context = longest + SPARE
        with in_one_line():
            self.engine = InReach(
                model_path=arm.get("model", request["model"]), skip_tokenizer_init=True, dtype=request.get("dtype", "bfloat16"),
                kv_cache_dtype=arm.get("kv", "auto"), device=request.get("device"), context_length=context, max_running_requests=1,
                max_total_tokens=4 * context, chunked_prefill_size=-1, page_size=1, disable_radix_cache=bool(arm.get("one_pass")),
                disable_overlap_schedule=True, disable_cuda_graph=True, custom_sigquit_handler=sglang_pool.quiet, **request.get("engine", {}),
            )  # fmt: skip
            self.engine.flush_cache()  # upon its first call it takes the signal for itself
            self.engine.loop.add_signal_handler(signal.SIGQUIT, sglang_pool.quiet)

    def steps(self, text: list[int], new: int, **asked: Any) -> Iterator[tuple[int, Any]]:
        """Where each step starts, and its answer; the last one goes on for `new` tokens. A step ends one token after the next one's start:
        of that token the log-probability is known. SystemExit where a step read less from the cache than all before it."""
        with in_one_line():
            if not self.engine.flush_cache().success:
                raise RuntimeError("SGLang did not empty its cache")
        for start in range(0, max(len(text) - 1, 1), self.step):
            end = min(start + self.step + 1, len(text))
            with in_one_line():
                params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new if end == len(text) else 1}
                found = self.engine.generate(
                    input_ids=text[:end], sampling_params=params, return_logprob=True, logprob_start_len=start, **asked
                )
            if (read := found["meta_info"]["cached_tokens"]) != start:
                raise SystemExit(f"SGLang read {read} tokens of {start} from its cache: pages that do not divide {self.step}, or none reused")
            yield start, found
            if self.spoils:
                with in_one_line():
                    self.engine.collective_rpc("probe_zero")

    def scored(self, text: list[int], first: int) -> list[Place]:
        found: list[Place] = []
        for start, answer in self.steps(text, 1, top_logprobs_num=self.top):
            own, best = (answer["meta_info"][f"input_{of}_logprobs"] for of in ("token", "top"))
            for at in range(max(first - start, 1), len(own)):
                found.append((own[at][0], [(token, logprob) for logprob, token, _ in best[at][: self.top]]))
        return found

    def written(self, prompt: list[int], new: int) -> list[int]:
        return list([answer["output_ids"] for _, answer in self.steps(prompt, new)][-1])

    def told(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, in_one_line():
            path = Path(folder) / "told.json"
            self.engine.collective_rpc("probe_tell", path=str(path))
            return VERSIONS | json.loads(path.read_text("utf-8"))


def vocabulary_of(model: str) -> Any:
    """That of transformers, which SGLang takes its tokenizers from. Imported where it is asked for: scoring does not need it."""
    import in_transformers  # type: ignore[import-not-found]

    return in_transformers.vocabulary_of(model)


def answered(request: Mapping[str, Any]) -> dict[str, Any]:
    name, arm = arm_of(request, "SGLang")
    vocabulary = vocabulary_of(request["model"]) if request.get("prompts") else None
    found: dict[str, Any] = walked(request, name, lambda longest: Engine(request, arm, longest), vocabulary)
    return found


if __name__ == "__main__":
    try:
        main({"walk": answered, "tokens": lambda asked: tokens(asked, vocabulary_of(asked["model"]), VERSIONS)})
    except SystemExit as why:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)  # its processes end with us, and have a word after ours otherwise
