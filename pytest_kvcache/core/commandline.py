"""Words of a command line as they may be stored: nothing secret, nothing that differs between sessions of one setup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from .masking import Span, cut, is_secret_name, spans, values_of

_ASSIGNED = re.compile(r"(-{0,2}\w[\w.-]*)=")
_OPTION = re.compile(r"-{1,2}\w[\w.-]*")
_USER = re.compile(r"([^:]+:(?!\d+$).+)")  # user:password; 1000:1000 are numbers of user and group
_USER_IN_ONE = re.compile(r"(?:-u|--user=|--proxy-user=)([^:/=]+:(?!\d+$).+)")
_USER_OPTIONS = ("-u", "--user", "--proxy-user")
# What may follow an option that announces a secret and is no option itself, by its look: some tokens begin with a dash.
_DASHED_VALUE = re.compile(r"-(?!-)(?=[^=]*[A-Z0-9])[^=\s]{7,}")
_SHELL_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*+"|'[^']*+'|["'\\])++""")
_OF_A_PLACE = re.compile(r"(?:file|path|dir|directory|folder)$", re.IGNORECASE)


def masked_words(words: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key X Y`, `--api-key=X`, `HF_TOKEN=X`, `{"token": "X"}`, `http://user:X@host`.

    After an option that announces a secret every word up to the next option is one: some options take several. A word that
    is a command line itself (`sh -c "..."`) is treated as one.
    """
    return [cut(word, found) for word, found in _searched(words)]


def secret_values(words: Iterable[str], *environments: Mapping[str, str]) -> list[str]:
    """What must not be seen of a command line and of variables, wherever a process writes it; the longest first."""
    secrets = [word[begin:end] for word, found in _searched(words) for begin, end in found]
    for name, value in (pair for env in environments for pair in env.items()):
        if not is_secret_name(name):
            secrets += [value[begin:end] for begin, end in spans(value)]
        elif not _OF_A_PLACE.search(name):
            secrets.append(value)
    return sorted({v for s in secrets for v in values_of(s)}, key=lambda v: (-len(v), v))


def _searched(words: Iterable[str]) -> Iterator[tuple[str, list[Span]]]:
    """Each word and where it has secrets."""
    before = wrapper = ""  # the last word; the option that an announcing one was passed on by
    hiding = first = False
    for word in words:
        option, assigned, value = word.partition("=")
        passed_on = bool(assigned) and option == wrapper and not value.startswith("-")  # --kv-serve-arg=--api-key --kv-serve-arg=X
        if hiding and word == wrapper:  # the same in four words
            yield word, []
        elif hiding and (passed_on or not word.startswith("-") or (first and _DASHED_VALUE.fullmatch(word))):
            yield word, [(len(option) + 1 if passed_on else 0, len(word))]
            first = False
        else:
            user = before in _USER_OPTIONS and _USER.fullmatch(word)
            yield word, [user.span(1)] if user else _of_word(word)
            last = word.rpartition("=")[2]
            hiding = first = bool(_OPTION.fullmatch(last)) and is_secret_name(last)
            wrapper, before = (option if assigned else before), last


def _of_word(word: str) -> list[Span]:
    at = 0  # behind the names that are not secret: --env=HF_TOKEN=X
    while named := _ASSIGNED.match(word, at):
        if is_secret_name(named[1]):
            return [(named.end(), len(word))]
        at = named.end()
        if not (_ASSIGNED.match(word, at) or _OPTION.match(word, at)):
            at = 0
            break
    rest = word[at:]
    user = _USER_IN_ONE.fullmatch(rest)
    return _shifted([user.span(1)] if user else [*spans(rest), *_of_command(rest)], at)


def _of_command(word: str) -> list[Span]:
    """What a word has as a command line of its own: `sh -c "vllm serve m --api-key X Y"`."""
    parts = list(_SHELL_WORD.finditer(word)) if "-" in word else []
    if len(parts) < 2 or not any(_OPTION.fullmatch(p[0]) and is_secret_name(p[0]) for p in parts):
        return []
    return [s for p, (_, found) in zip(parts, _searched(p[0] for p in parts), strict=True) for s in _shifted(found, p.start())]


def _shifted(found: Iterable[Span], by: int) -> list[Span]:
    return [(begin + by, end + by) for begin, end in found]


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
