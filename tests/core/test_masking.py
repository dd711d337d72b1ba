"""What a process may print of the secrets that it was given: they are hidden wherever they stand, and little else is."""

import json
from itertools import pairwise
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.commandline import secret_values
from pytest_kvcache.core.masking import HIDDEN, joined, masked

GIVEN = {
    "an option": lambda s: (["serve", "m", "--api-key", s], {}),
    "an option in one word": lambda s: ([f"--api-key={s}"], {}),
    "one of several": lambda s: (["--api-key", "other-value", s], {}),
    "a list": lambda s: (["--config", json.dumps({"api_key": [s, "x"]})], {}),
    "a shell's command": lambda s: (["sh", "-c", f"vllm serve m --hf-token {s}"], {}),
    "a variable": lambda s: ([], {"HF_TOKEN": s}),
    "a variable of a container": lambda s: (["docker", "run", "-e", f"SSHPASS={s}"], {}),
    "a header": lambda s: (["-H", f"Authorization: Bearer {s}"], {}),
    "a cookie": lambda s: ([], {"COOKIE": f"a=1; session={s}"}),
    "a password in an address": lambda s: ([], {"DB": f"postgres://me:{s}@host/db"}),
    "a user": lambda s: (["-u", f"me:{s}"], {}),
}
SAID = {
    "prose": "ValueError: api key {} is too short",
    "stuck": "a{}b",
    "as Python shows it": "INFO args: {{'model': 'm', 'x': [{!r}]}}",
    "twice": "{0} and {0}",
    "over lines": "\n{}\n",
}
secrets = st.text("ABCDEFGHJKabcdefghjk0123456789_.~+!$", min_size=4, max_size=30).map(lambda s: "Zq9" + s)


@pytest.mark.parametrize("way", GIVEN)
@pytest.mark.parametrize("said", SAID)
@given(secret=secrets)
def test_a_secret_that_was_given_is_hidden_where_it_is_said(way, said, secret):
    words, env = GIVEN[way](secret)
    shown = masked(SAID[said].format(secret), secret_values(words, {"HOME": "/x"}, env))
    assert secret not in shown
    assert HIDDEN in shown


@given(st.text(min_size=4).filter(lambda s: len(s.strip().strip("\"'").strip()) > 3))
def test_a_secret_is_hidden_as_json_python_and_addresses_write_it(secret):
    known = secret_values([], {"API_KEY": secret})
    bare = secret.strip().strip("\"'").strip()
    if bare == HIDDEN or bare.lower() in ("true", "false", "none", "null"):
        return
    for text in (bare, json.dumps(bare)[1:-1], repr(bare)[1:-1], quote(bare, safe="", errors="replace")):
        assert text not in masked(f"<{text}>", known) or (len(text) < 8 and text in "<***>")


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--api-key", "abc"], {}),
        (["--hf-token=true", "--max-num-batched-tokens", "8192", "--tokenizer", "mine-own"], {}),
        ([], {"HF_TOKEN": "None", "PWD": "/work", "OLDPWD": "/work", "SECRETS_DIR": "/home/me", "API_KEY_FILE": "/home/me/key"}),
        ([], {"LS_COLORS": "*.key=00;36:ow=34;42", "TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "8192"}),
    ],
)
def test_what_is_no_secret_is_hidden_nowhere(words, env):
    assert secret_values(words, env) == []


def test_a_short_word_or_number_is_hidden_only_where_it_stands_alone():
    known = secret_values(["--api-key", "test", "1234"])
    text = "latest tests, 12345.67 tok/s; test=1, key(test) 1234"
    assert masked(text, known) == "latest tests, 12345.67 tok/s; ***=1, key(***) ***"


def test_a_text_that_was_cut_within_a_secret_shows_no_part_of_it():
    known = secret_values([], {"API_KEY": "correct-horse-battery"})
    for n in range(6, 21):
        assert masked("no key like correct-horse-battery"[: 12 + n], known) == "no key like ***"
    assert masked("no key like corre", known) == "no key like corre"


LOG = """INFO 11-30 04:33:01 [loggers.py:123] Engine 000: Avg prompt throughput: 512.3 tokens/s, KV cache usage: 3.1%
INFO args: {'model': 'm', 'max_num_batched_tokens': 8192, 'tokenizer': 'm', 'tokenizer_mode': 'auto', 'block_size': 16}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 80.00 GiB. See https://host/path?max_tokens=1#x
  File "/x/api_key.py", line 3, in get_token
"GET /v1/models HTTP/1.1" 200 OK; num_tokens=12, kv_tokens: 919824, "eos_token": "</s>", pad_token_id=[0]
Basic usage: see the docs of --max-model-len and --tokenizer
"""


def test_an_ordinary_log_stays_as_it_is():
    assert masked(LOG, secret_values(["vllm", "serve", "m", "--api-key", "Kk9-secret"], {"HOME": "/x"})) == LOG


def test_a_log_with_secrets_loses_nothing_else():
    said = ["{'api_key': ['K1'], 'port': 8}", "password: two words", "token='K' port=8", "api_key=[", "next", 'x "key": "K", "y": 1']
    shown = ["{'api_key': ***, 'port': 8}", "password: ***", "token=*** port=8", "api_key=***", "next", 'x "key": ***, "y": 1']
    assert masked("\n".join(said)) == "\n".join(shown)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_places_are_joined_to_the_same_characters(found):
    def characters(spans):
        return {i for begin, end in spans for i in range(begin, end)}

    whole = joined(found)
    assert characters(whole) == characters(found)
    assert all(a[1] < b[0] for a, b in pairwise(whole))
