"""A command line that may be stored: nothing secret in any way of writing it, and the same in every session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.commandline import masked_words, stable_argv
from pytest_kvcache.core.masking import HIDDEN, is_secret_name, masked

SECRET_NAMES = [
    "api-key", "api_key", "apikey", "API_KEY", "apiKey", "X-Api-Key", "api-keys", "hf-token", "HF_TOKEN", "hfToken", "HF_TOKEN_2",
    "token", "auth-token", "access_token", "secret", "client-secret", "aws_secret_access_key", "AWS_ACCESS_KEY_ID", "password",
    "db-password", "PGPASSWORD_PASSWD", "passphrase", "credentials", "Authorization", "cookie", "key", "ssh-key", "license_key",
    "GITHUB_PAT", "basic-auth", "PGPASSWORD", "MYSQL_PWD", "SSHPASS", "hftoken", "dbpassword", "mysqlpassword", "apitoken", "apitokens",
    "MY_TOKEN_VALUE", "hf-token-value", "jwt", "JWT_SECRET", "bearer", "passcode", "pw", "openaiapikey", "_token", "2fa_token", "END_USER_TOKEN",
    "refresh_tokens", "cache_access_key",
]  # fmt: skip
PLAIN_NAMES = [
    "max-num-batched-tokens", "max_tokens", "tokenizer", "tokenizer-mode", "num-speculative-tokens", "long-prefill-token-threshold",
    "tokens-per-block", "ssl-keyfile", "eos-token", "bos_token_id", "image-token", "pass_config", "keyword", "monkey", "author", "path",
    "max-tokens", "max-token", "max_new_tokens", "MAX_TOKENS", "maxtokens", "kv_tokens", "token-budget", "TOKENIZERS_PARALLELISM", "eostoken",
    "speculative-num-draft-tokens", "tokens", "num_prompt_tokens", "ms_per_token", "first-token", "cache_key", "public-key", "forward_pass",
    "bypass", "key_value", "pad_value", "jwt-algorithm", "signature", "sig", "detoken", "tool-parser", "author_name",
    "compass", "kv-cache-dtype", "enable-prefix-caching", "trust-remote-code", "time_per_output_token", "secretary", "x",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
@pytest.mark.parametrize("dashes", ["", "--", "-"])
def test_names_of_secrets(dashes, name):
    assert is_secret_name(dashes + name)


@pytest.mark.parametrize("name", [*PLAIN_NAMES, "", "--", "12"])
def test_names_that_only_look_like_it(name):
    assert not is_secret_name(name)


WAYS = {
    "two words": lambda n, s: ["--" + n, s],
    "one dash": lambda n, s: ["-" + n, s],
    "several values": lambda n, s: ["--" + n, "first", s, "--port", "1"],
    "at the end": lambda n, s: ["serve", "m", "--" + n, s],
    "one word": lambda n, s: [f"--{n}={s}"],
    "one word with commas": lambda n, s: [f"--{n}=a,{s};b {s}"],
    "variable of a container": lambda n, s: ["docker", "run", "-e", f"{n}={s}"],
    "variable stuck to its option": lambda n, s: [f"-e{n.upper()}={s}" if n.isupper() else f"--env={n}={s}"],
    "passed on": lambda n, s: [f"--kv-serve-arg=--{n}={s}"],
    "passed on in two": lambda n, s: [f"--kv-serve-arg=--{n}", f"--kv-serve-arg={s}"],
    "passed on in four words": lambda n, s: ["--kv-serve-arg", f"--{n}", "--kv-serve-arg", s],
    "json": lambda n, s: ["--config", f'{{"a": {{"{n}": "{s}", "b": 1}}}}'],
    "json in one word": lambda n, s: [f'--config={{"{n}":"x {s} y"}}'],
    "python literal": lambda n, s: ["--config", f"{{'{n}': '{s}'}}"],
    "header": lambda n, s: ["--header", f"{n}: Bearer {s}"],
    "header of two words": lambda n, s: ["-H", f"{n}: two {s}"],
    "query": lambda n, s: [f"https://host/path?a=1&{n}={s}&b=2"],
    "connection string": lambda n, s: ["--store", f"host=h {n}={s} port=5"],
    "list": lambda n, s: ["--extra", f"a=1,{n}={s},b=2"],
    "nested": lambda n, s: [f"--loader.{n}={s}"],
    "inside an ini value": lambda n, s: ["-o", f"kv_serve_arg=--{n} {s}"],
    "inside an ini value, stuck": lambda n, s: [f"-okv_serve_arg=--{n} {s}"],
    "inside an ini value, assigned": lambda n, s: [f"--override-ini=kv_serve_arg=--port=1 --{n}={s}"],
    "inside an ini value, on two lines": lambda n, s: ["-o", f"kv_serve_arg=--{n}\n{s}"],
    "inside a shell's command": lambda n, s: ["sh", "-c", f"exec vllm serve m --{n} {s} --port 1"],
    "inside a shell's command, several": lambda n, s: ["sh", "-c", f"vllm serve m --{n} first {s}"],
    "inside a shell's command, quoted": lambda n, s: ["sh", "-c", f"vllm serve m --{n} '{s}' && echo"],
    "inside a shell's command, a variable": lambda n, s: ["bash", "-lc", f"cd /x && {n}={s} vllm serve m"],
    "a list": lambda n, s: [f'{{"{n}": ["first", "{s}"], "b": 1}}'],
    "a list, assigned": lambda n, s: [f"--{n}=['first', '{s}']"],
    "a list of Python": lambda n, s: [f"{{'{n}': ['{s}']}}"],
    "a list over lines": lambda n, s: [f'{{"{n}": [\n  "{s}"\n], "b": 1}}'],
    "an object": lambda n, s: [f'{{"a": {{"{n}": {{"value": ["{s}"]}}}}}}'],
    "an object of Python": lambda n, s: [f"Namespace(port=1, {n}=SecretStr('{s}'), b=2)"],
    "bytes": lambda n, s: [f"x {n}=b'{s}'"],
    "a pair": lambda n, s: [f"[('{n}', '{s}'), ('b', 1)]"],
    "words as a list": lambda n, s: [f"['serve', '--{n}', '{s}', '--port']"],
    "an arrow": lambda n, s: [f'{{:{n}=>"{s}"}}'],
    "json inside a text": lambda n, s: [f'{{\\"{n}\\": \\"{s}\\", \\"b\\": 1}}'],
    "a scheme, assigned": lambda n, s: [f"x {n}=Bearer {s}"],
    "quotes stuck together": lambda n, s: [f'x --{n}="a"{s} y'],
}
BY_POSITION = {
    "user in a URL": lambda s: [f"https://me:{s}@host:80/x"],
    "user in an option": lambda s: [f"--store=redis://:{s}@host/0"],
    "token in a URL": lambda s: [f"git+https://{s.replace('/', '')}@host/x.git"],
    "two URLs": lambda s: [f"http://a:{s}@h1/,http://b:{s}@h2/"],
    "bearer": lambda s: ["-H", f"X: Bearer {s}"],
    "user of curl": lambda s: ["-u", f"me:x{s}"],
    "user in words": lambda s: ["--user", f"me:x{s}"],
    "user in one word": lambda s: [f"--user=me:x{s}"],
    "user stuck": lambda s: [f"-ume:x{s}"],
    "a part of a cookie": lambda s: ["-H", f"Cookie: a=b; s={s}"],
    "a part of a cookie, quoted": lambda s: ["sh", "-c", f"curl -H 'Cookie: a; s={s}' http://h"],
    "digest": lambda s: ["-H", f'Authorization: Digest username="u", nonce="n", response="{s}"'],
    "digest in JSON": lambda s: [f'{{"headers": {{"Authorization": "Digest username=\\"u\\", response=\\"{s}\\""}}}}'],
    "signed address": lambda s: [f"https://host/blob?sv=1&sig={s}"],
    "signed address of S3": lambda s: [f"https://h/x?X-Amz-Date=1&X-Amz-Signature={s}&a=1"],
    "signed address, first": lambda s: [f"--model=https://h/x?signature={s}"],
    "begins with a dash": lambda s: ["--api-key", f"-A{s}"],
    "a private key": lambda s: [f"say -----BEGIN RSA PRIVATE KEY-----\n{s}\n-----END RSA PRIVATE KEY----- to"],
}
secrets = st.text("ABCDEFGHJKabcdefghjk0123456789_.~+/", min_size=9, max_size=30).map(lambda s: "Zq" + s)


@pytest.mark.parametrize("way", WAYS)
@given(name=st.sampled_from(SECRET_NAMES), secret=secrets)
def test_a_secret_is_hidden_in_every_way_of_writing_it(way, name, secret):
    found = masked_words(WAYS[way](name, secret))
    assert secret not in " ".join(found)
    assert HIDDEN in " ".join(found)


@pytest.mark.parametrize("way", BY_POSITION)
@given(secret=secrets)
def test_a_secret_is_hidden_by_where_it_stands(way, secret):
    found = " ".join(masked_words(BY_POSITION[way](secret)))
    assert secret not in found
    assert secret.replace("/", "") not in found


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "a1B2" * 8, "sk-" + "abcd1234" * 4, "sk-proj-" + "abcd1234" * 4, "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20,
        "glpat-" + "a1b2c3d4e5" * 2, "nvapi-" + "a1" * 20, "AKIA" + "A1B2C3D4" * 2, "xoxb-" + "1234567890-ab", "eyJhbGciOi.eyJzdWIiOi.sig_na",
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["{}", "--model={}", "https://host/{}/x", 'say "{}"'])
def test_a_token_is_known_by_its_look(token, text):
    assert token not in masked(text.format(token))


UNTOUCHED = (
    *(f"--{n}=8" for n in PLAIN_NAMES),
    '{"cudagraph_mode": "FULL", "pass_config": {"fuse_attn_quant": true}, "compile_sizes": [1, 2]}',
    *("http://127.0.0.1:8000/v1", "http://[::1]:8000", "git+https://github.com/a/b@9f3c2a7", "http://host:8000/path@rev", "user@host"),
    *("say --max-tokens 5", "sh -c 'vllm serve m --max-num-batched-tokens 8192 --tokenizer m'", "kv_serve_arg=--max-model-len 8192"),
    *('{"max_tokens": [1, 2], "tokenizer": {"a": "b"}}', "[('max_tokens', '5')]", "Basic usage of it", "https://h/x?design=1&a=2"),
    *("key", "token", "a::token::b", "PWD=/x", "OLDPWD=/x"),
    *("/models/secret/token", "s3://bucket/key", "meta-llama/Llama-3.1-8B", "0.9", "sk-learn", "hf_transfer", "-u", "a:b", "C:/x", "eyJ"),
)


@pytest.mark.parametrize("word", UNTOUCHED)
def test_words_without_a_secret_stay(word):
    assert masked_words([word]) == [word]
    assert masked(word) == word


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_values_of_plain_options_stay(name):
    words = ["serve", "--" + name, "8192", "-u", "1000:1000", "--user", "me", "m", f"sh -c 'serve --{name} 8192'", f'{{"{name}": [8192]}}']
    assert masked_words(words) == words


def test_what_follows_a_secret_stays():
    """Nothing is hidden of the next options, words or fields."""
    words = ["--api-key", "K", "--port=1", "-o", "a=--hf-token=K", "tests/x", '{"token": ["K"], "x": [1]}', "a token: 'K', b: 2"]
    shown = ["--api-key", "***", "--port=1", "-o", "a=--hf-token=***", "tests/x", '{"token": ***, "x": [1]}', "a token: ***, b: 2"]
    assert masked_words(words) == shown
    shell = "curl -H 'Cookie: a; b=K' 'https://h/?sig=K&x=1' --api-key K --dtype auto && --hf-token 'K L' --port 1"
    hidden = "curl -H 'Cookie: ***' 'https://h/?sig=***&x=1' --api-key *** --dtype auto && --hf-token *** --port 1"
    assert masked_words([shell]) == [hidden]


PIECES = ["--api-key", "token", "cookie", "=", ":", " ", "\n", '"', "'", "\\", "[", "]", "{", "}", "(", ")", ",", ";", "x", "Kk9", "-", "Bearer ", "?sig=",
          "http://u:p@h"]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), max_size=6))
def test_masking_only_ever_hides(words):
    """What is left of a word stood in it, in this order."""
    for word, shown in zip(words, masked_words(words), strict=True):
        at = 0
        for part in shown.split(HIDDEN):
            at = word.index(part, at) + len(part)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_masking_keeps_the_number_of_words_and_changes_nothing_twice(words):
    once = masked_words(words)
    assert len(once) == len(words)
    assert masked_words(once) == once


@pytest.mark.parametrize(
    ("word", "stable"),
    [
        ("/opt/env/bin/python", "{python}"),
        ("/opt/env/bin/vllm", "{bin}/vllm"),
        ("--port=8123", "--port={port}"),
        ("--metrics-port=1", "--metrics-port={port}"),
        ("http://127.0.0.1:8123/v1", "http://127.0.0.1:{port}/v1"),
        ("/tmp/pytest-of-me/pytest-7/x0/model", "{tmp}/model"),
        ("/tmp/tmpab12cd_x", "{tmp}"),
        ("--log=/tmp/a/b.log", "--log={tmp}/b.log"),
        ('{"path": "/tmp/a/b"}', '{"path": "{tmp}/b"}'),
        ("/tmpfiles/x", "/tmpfiles/x"),
        ("/data/tmp/x", "/data/tmp/x"),
        ("/home/me/models/m", "~/models/m"),
        ("/home/meow", "/home/meow"),
        ("8123", "8123"),
        ("--api-key=abc", "--api-key=***"),
    ],
)
def test_words_of_a_command_line_are_stable(word, stable):
    assert stable_argv((word,), python="/opt/env/bin/python", home="/home/me", tmp="/tmp") == [stable]


def test_only_the_number_after_a_port_option_is_a_port():
    words = ("--port", "8123", "--seed", "8123", "-p", "1", "--master-port", "2", "--api-key", "77")
    stable = ["--port", "{port}", "--seed", "8123", "-p", "{port}", "--master-port", "{port}", "--api-key", "***"]
    assert stable_argv(words, python="python3", home="/", tmp="/tmp") == stable
