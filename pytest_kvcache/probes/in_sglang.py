"""Scores and continues texts through the KV cache of SGLang. One arm a process: an engine has one precision.

A window goes in by steps, each a request of all its tokens so far, of which SGLang computes the last ones only; the keys and values of
those before them lie in its KV pool and nowhere else, kept there by the request before. That a step read them is what its answer says:
`cached_tokens`. Where that is not what was asked for, nothing is scored.

Read in sgl-project/sglang 0.5.10.post1, 0.5.16 and 0.5.23 (`python/sglang/srt/`): a prefix is reused up to `logprob_start_len` tokens
and to whole pages (`managers/schedule_batch.py`, `init_next_round_input`), counted in `prepare_for_extend` as the length that attention is
given; log-probabilities come from that token on, those of the token itself being None, of logits in float32 (`managers/
scheduler_output_processor_mixin.py`, later `scheduler_components/logprob_result_processor.py`; `layers/logits_processor.py`). FlashInfer
and Triton attend to a step's own tokens as they are and to those before it as they were kept (`layers/attention/flashinfer_backend.py`,
`triton_backend.py`, `forward_extend`), torch's own to all as they were kept.

Met with 0.5.23 on a processor only, by torch's own attention and with the share of the memory told by hand (SmolLM2-135M in float32, 2
windows of 256, steps of 16 and of 1): its scores are those of transformers to 4e-5 nats, one pass diverges by nothing, the zeroed cache by
2.15 nats, and one of bfloat16 or float8 is seen. No GPU has been asked.

An arm: `kv`, SGLang's `--kv-cache-dtype` (`auto`); `quantization` of the weights as they are loaded, or `model`, other weights;
`one_pass`; `spoil`: all that is cached is zeroed after each step (sglang_pool.py), a control that must be seen. `options` of a request are
more of SGLang's own arguments. The answer is that of alone.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Before it is imported: a window as long as the model's context, and a few tokens more that are never read; no word after our last one,
# which Python's own helper of its processes would have.
os.environ.update(SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1", PYTHONWARNINGS="ignore")
sys.path.insert(0, str(Path(__file__).parent))

import sglang  # type: ignore[import-not-found]
import sglang_pool  # type: ignore[import-not-found]  # by its path, as the next
from alone import TOP, Place, in_one_line, run  # type: ignore[import-not-found]
from sglang.srt.entrypoints import engine as theirs  # type: ignore[import-not-found]

SPARE = 16  # tokens that the scheduler keeps of a context for itself (6, `max_req_input_len`), and the one that a request asks for
IDLE_S = 10.0
GREEDY = {"temperature": 0, "ignore_eos": True}
VERSIONS = {"sglang": sglang.__version__}


class InReach(theirs.Engine):  # type: ignore[misc]
    """SGLang's engine, whose scheduler can be asked of its pool."""

    run_scheduler_process_func = staticmethod(sglang_pool.run_scheduler)


class Engine:
    """SGLang with one arm's cache, for one request of at most `longest` tokens at a time."""

    def __init__(self, request: Mapping[str, Any], arm: Mapping[str, Any], longest: int) -> None:
        if not hasattr(theirs.Engine, "run_scheduler_process_func"):
            raise SystemExit(f"SGLang {sglang.__version__} keeps its KV pool out of reach; 0.5.7 and later do not")
        self.step = longest if arm.get("one_pass") else min(request["step"], longest)
        self.spoils, self.top = bool(arm.get("spoil")), request.get("top", TOP)
        context = longest + SPARE
        with in_one_line():
            self.engine = InReach(
                model_path=arm.get("model", request["model"]), skip_tokenizer_init=True, dtype=request.get("dtype", "bfloat16"),
                quantization=arm.get("quantization"), kv_cache_dtype=arm.get("kv", "auto"), device=request.get("device"),
                context_length=context, max_running_requests=1, max_total_tokens=4 * context, chunked_prefill_size=-1,
                disable_radix_cache=bool(arm.get("one_pass")), disable_overlap_schedule=True, disable_cuda_graph=True,
                custom_sigquit_handler=sglang_pool.quiet, **request.get("options", {}),
            )  # fmt: skip
            self.engine.generate(input_ids=[0], sampling_params=GREEDY | {"max_new_tokens": 1})  # the first one takes the signal for itself
            self.engine.loop.add_signal_handler(signal.SIGQUIT, sglang_pool.quiet)

    def empty(self) -> None:
        """Drops all that is cached, so that no text begins with another's. Refused while the scheduler still ends the request before."""
        until = time.monotonic() + IDLE_S
        with in_one_line():
            while not self.engine.flush_cache().success:
                if time.monotonic() > until:
                    raise TimeoutError(f"SGLang did not empty its cache within {IDLE_S:.0f} s")
                time.sleep(0.01)

    def steps(self, text: list[int], new: int, **asked: Any) -> Iterator[tuple[int, Any]]:
        """Where each step starts, and its answer; the last one goes on for `new` tokens. A step ends one token after the next one's start:
        of that token the log-probability is known. SystemExit where a step read less from the cache than all before it."""
        self.empty()
        for start in range(0, max(len(text) - 1, 1), self.step):
            end = min(start + self.step + 1, len(text))
            with in_one_line():
                params = GREEDY | {"max_new_tokens": new if end == len(text) else 1}
                found = self.engine.generate(
                    input_ids=text[:end], sampling_params=params, return_logprob=True, logprob_start_len=start, **asked
                )
            if (read := found["meta_info"]["cached_tokens"]) != start:
                why = f"its pages do not divide {self.step}, or it keeps none"
                raise SystemExit(f"SGLang read {read} of {start} tokens from its cache: {why}")
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
            return {**VERSIONS, **json.loads(path.read_text("utf-8"))}


if __name__ == "__main__":
    run("SGLang", Engine, VERSIONS)
