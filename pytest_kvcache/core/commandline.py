"""Words of a command line as they may be stored: nothing secret, nothing that differs between sessions of one setup."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

# What makes a name that of a secret. A lone `token` or `key` counts only at its end: there are --max-num-batched-tokens,
# --long-prefill-token-threshold and --ssl-keyfile, too; and a model's own tokens are no secret.
_ANYWHERE = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials", "authorization"}
_ANYWHERE |= {"cookie", "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken"}
_AT_THE_END = {"token", "key", "pat", "auth", "pass"}
_TOGETHER = ({"api", "auth", "access", "private", "bearer"}, {"token", "tokens", "key", "keys"})
_OF_A_MODEL = {"eos", "bos", "pad", "stop", "image", "video", "audio", "mask", "unk", "sep", "cls", "special", "per"}

_ASSIGNED = re.compile(r"""(?<![\w.])([A-Za-z][\w.-]*)["']?\s*(=|:(?!//))\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^\s,;&}\]"']*)""")
_TO_THE_END = re.compile(r"""[^,;}\]"'\n]*""")  # of what follows a colon: `password: two words`, `Authorization: Bearer x`
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)(?:[^\s/@:]*:(?!\d+(?:[/?#]|$))\S*|[^\s/]*)@")
# Tokens that are known by their look: Hugging Face, OpenAI, GitHub, GitLab, NVIDIA, AWS, Slack, JSON web tokens.
_BY_LOOK = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[a-z]-[\w-]{10,}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*)"
)


def is_secret_name(name: str) -> bool:
    """Whether what is called so must not be stored: `--hf-token`, `HF_TOKEN`, `apiKey`, `aws_secret_access_key`."""
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words:
        return False
    known = set(words)
    if known & _ANYWHERE or all(known & either for either in _TOGETHER):
        return True
    return words[-1] in _AT_THE_END and not (words[-1] == "token" and known & _OF_A_MODEL)


def masked(text: str) -> str:
    """A text with the values of secret names, users in URLs and tokens that are known by their look hidden."""
    text = _USER_INFO.sub(HIDDEN + "@", text)
    parts, at = [], 0
    while found := _ASSIGNED.search(text, at):
        parts.append(text[at : found.start(3)])
        at = found.start(3)
        if is_secret_name(found[1]):
            open_end = found[2] == ":" and not found[3].startswith(("'", '"'))
            at = max(found.end(), _TO_THE_END.match(text, at).end() if open_end else 0)  # type: ignore[union-attr]
            parts.append(HIDDEN)
    return _BY_LOOK.sub(HIDDEN, _SCHEME.sub(rf"\1 {HIDDEN}", "".join([*parts, text[at:]])))


def masked_words(words: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key X Y`, `--api-key=X`, `HF_TOKEN=X`, `{"token": "X"}`, `http://user:X@host`.

    After an option that announces a secret every word up to the next option is one: some options take several.
    """
    found, before, wrapper, hiding = [], "", "", False
    for word in words:
        option, assigned, value = word.partition("=")
        if hiding and (not word.startswith("-") or (assigned and not value.startswith("-"))):
            # Each word that is passed on is announced anew: --kv-serve-arg=--api-key --kv-serve-arg=X, or four words
            found.append(f"{option}={HIDDEN}" if word.startswith("-") else HIDDEN)
            continue
        if hiding and word == wrapper:
            found.append(word)
            continue
        user = before in ("-u", "--user", "--proxy-user") and re.fullmatch(r"[^:]+:(?!\d+$).+", word)
        found.append(HIDDEN if user else _masked_word(word))
        last = word.rpartition("=")[2]
        hiding = last.startswith("-") and is_secret_name(last)
        before, wrapper = last, before
    return found


def _masked_word(word: str) -> str:
    name, assigned, value = word.partition("=")
    if assigned and re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name):
        if is_secret_name(name):
            return f"{name}={HIDDEN}"
        if re.match(r"-{1,2}[A-Za-z]|[A-Za-z_][\w.-]*=", value):
            return f"{name}={_masked_word(value)}"
    return masked(word)


def stable_argv(argv: tuple[str, ...], *, python: str, home: str, tmp: str) -> list[str]:
    """A command line without secrets and without port, temporary paths, interpreter and home directory."""
    scripts = python.rpartition("/")[0] + "/"
    words = []
    for before, word in zip(("", *argv), masked_words(argv), strict=False):
        if word == python:
            words.append("{python}")
        elif len(scripts) > 1 and word.startswith(scripts):
            words.append("{bin}/" + word[len(scripts) :])
        elif word.isdigit() and re.fullmatch(r"--?([a-z-]+-)?port|-p", before):
            words.append("{port}")
        else:
            words.append(stable_word(word, home, tmp))
    return words


def stable_word(word: str, home: str, tmp: str) -> str:
    """One word (or the value of a variable) without port, temporary paths and home directory."""
    word = re.sub(r"^(--?(?:[a-z-]+-)?port=)\d+$", r"\1{port}", word)
    word = re.sub(r"(127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\]):\d+", r"\1:{port}", word)
    word = re.sub(rf"(?<![\w/.]){re.escape(tmp)}(/[^\s\"',:=]*)?(?![\w.-])", _short_temporary, word)
    return re.sub(rf"(?<![\w/.]){re.escape(home)}(?=/|$)", "~", word) if len(home) > 1 else word


def _short_temporary(path: re.Match[str]) -> str:
    """Only the last name of a temporary path says anything, unless `tempfile` made that up, too."""
    name = (path[1] or "").rstrip("/").rpartition("/")[2]
    return "{tmp}" if not name or re.fullmatch(r"tmp[a-z0-9_]{8}", name) else "{tmp}/" + name
