"""Hide secrets in texts: values of secret names however they are written, values known from elsewhere, tokens by their look."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from urllib.parse import quote

HIDDEN = "***"
Span = tuple[int, int]  # begin and end of what is secret in a text

# What makes a name that of a secret. A lone `token` or `key` counts only at its end: there are --max-num-batched-tokens,
# --long-prefill-token-threshold and --ssl-keyfile, too; and a model's own tokens and counts of tokens are no secret.
_ANYWHERE = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "pwd", "credential", "credentials"}
_ANYWHERE |= {"authorization", "cookie", "cookies", "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken"}
_AT_THE_END = {"token", "key", "pat", "auth", "pass", "jwt", "bearer", "pw"}
_TOGETHER = ({"api", "auth", "access", "private", "bearer", "refresh", "csrf", "hf"}, {"token", "tokens", "key", "keys"})
_IN_A_QUERY = {"sig", "signature", "hmac"}  # these sign an address; elsewhere a signature is no secret
# Words beside which `token` is none of them; those in the second set must stand just before it.
_OF_A_MODEL = {"eos", "bos", "pad", "stop", "image", "video", "audio", "mask", "unk", "sep", "cls", "special", "per", "max", "min", "num"}
_OF_A_TEXT = {"n", "first", "last", "next", "prompt", "input", "output", "draft", "think", "thinking", "reasoning", "begin", "start", "end"}
_NO_KEY = {"public", "sort", "group", "partition", "cache", "primary", "foreign", "routing", "query"}
_NO_PASS = {"forward", "backward", "single", "one", "two", "multi", "num", "first", "second", "max", "min"}
_FILLERS = {"value", "val"}
# Words that nothing keeps apart: PGPASSWORD, SSHPASS, --dbpassword, --hftoken, --openaiapikey.
_GLUED = re.compile(r".+(?:passwords?|passwd|passphrase|passcode|secrets?|credentials?|pwd|(?:api|access|secret|private|auth)keys?)")
_GLUED_TOKEN = re.compile(r"(.+)token|(?:api|auth|access|bearer|refresh|csrf|hf)tokens")
_GLUED_PASS = re.compile(r"(?:ssh|pg|db|my|sql|mysql|user|admin|root|smtp|ldap|redis|http|proxy|keystore|store)pass")
_NO_GLUED = {*_OF_A_MODEL, *_OF_A_TEXT, "sub", "multi", "de", "re", "pre", "non"}
_PLACES = {"PWD", "OLDPWD"}  # of a shell
_HEADERS = {"authorization", "cookie", "cookies"}  # their values have parts

_ASSIGNED = re.compile(r"""(?<![\w.-])(?=[\d.-]*+[A-Za-z_])([\w.-]++)((?:\\*+["'])?+)[ \t]*+(=>|:=|==?|:(?!//|:))[ \t]*+""")
_QUERY = re.compile(r"""[?&]([\w.-]++)=(?!\*{3})([^&#\s"'<>]*)""")
_OPTION = re.compile(r"""(?<![\w.-])(--?\w[\w.-]*+)(?:\\*+["'](?:,\s*+|[ \t]++)|[ \t]++)(?=[^\s=:,-])(?!\*{3})""")
_PAIR = re.compile(r"""\(\s*+(\\*+["'])([\w.-]++)\1,\s*+""")
_OPENING = re.compile(r"""[bBuUrRfF]{0,2}(\\*+)(["'])""")
_BRACKET = re.compile(r"(?:[A-Za-z_][\w.]*+)?[\[({]")
_PART = re.compile(r""""(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|([\[({])|([\])}])""")
_SCHEME_WORD = re.compile(r"(?:Bearer|Basic|Digest|Token|Negotiate|ApiKey)[ \t]++", re.IGNORECASE)
_BARE = re.compile(r"""[^\s,;&}\]"']*""")
_BARE_WORD = re.compile(r"""[^\s"']*""")
_TO_THE_END = re.compile(r"""[^,;}\]"'\n]*""")  # of what follows a colon: `password: two words`
_ANY_QUOTE = re.compile(r"""(\\*)(["'])""")
_MOST = 2**14  # characters of the longest value in brackets; an unclosed one ends with its line

_SCHEME = re.compile(
    r"""\b[Bb](?:earer|EARER)\s+(?![:=]|\*{3})([^\s"']+)|\b[Bb](?:asic|ASIC)\s+(?=\S[\w+/-]*[A-Z0-9=])([\w+/-][\w+/=-]{3,})"""
)
_USER_INFO = re.compile(r"(?<=://)((?:[^\s/@:]*:(?!\d+(?:[/?#]|$))\S{0,4096}|[^\s/]{0,4096}))@")
# Known by their look: keys as text; tokens of Hugging Face, OpenAI, GitHub, GitLab, NVIDIA, AWS, Slack; JSON web tokens.
_BY_LOOK = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:(?!-----END)[\s\S])*+(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[a-z]-[\w-]{10,}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*)"
)


def _words(name: str) -> list[str]:
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Whether what is called so must not be stored: `--hf-token`, `HF_TOKEN`, `apiKey`, `PGPASSWORD`, `MY_TOKEN_VALUE`."""
    words = _words(name)
    if len(words) > 1 and words[-1] in _FILLERS and words[-2] != "key":
        words.pop()
    if not words or name in _PLACES:
        return False
    known, last, before = set(words), words[-1], words[-2] if len(words) > 1 else ""
    if known & _ANYWHERE or all(known & either for either in _TOGETHER) or any(map(_is_glued, words)):
        return True
    no_secret = {"token": known & _OF_A_MODEL or before in _OF_A_TEXT, "key": before in _NO_KEY, "pass": before in _NO_PASS}
    return last in _AT_THE_END and not no_secret.get(last, False)


def _is_glued(word: str) -> bool:
    if token := _GLUED_TOKEN.fullmatch(word):
        return token[1] is None or token[1] not in _NO_GLUED
    return bool((_GLUED.fullmatch(word) and word != "oldpwd") or _GLUED_PASS.fullmatch(word))


def masked(text: str, known: Iterable[str] = ()) -> str:
    """A text without the `known` values, values of secret names, users in URLs and tokens that are known by their look."""
    return cut(text, [*known_spans(text, known), *spans(text)])


def cut(text: str, found: Iterable[Span]) -> str:
    """The text with what was found hidden."""
    parts, at = [], 0
    for begin, end in joined(found):
        parts += [text[at:begin], HIDDEN]
        at = end
    return "".join([*parts, text[at:]])


def joined(found: Iterable[Span]) -> list[Span]:
    """The same places in order, those that overlap or touch as one, empty ones left out."""
    whole: list[Span] = []
    for begin, end in sorted(found):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        elif begin < end:
            whole.append((begin, end))
    return whole


def spans(text: str) -> list[Span]:
    """Where a text has secrets, by names and looks."""
    users = [m.span(1) for m in _USER_INFO.finditer(text)]
    found = [*users, *(m.span(m.lastindex or 0) for m in _SCHEME.finditer(text)), *(m.span() for m in _BY_LOOK.finditer(text))]
    found += [m.span(2) for m in _QUERY.finditer(text) if is_secret_name(m[1]) or _IN_A_QUERY & set(_words(m[1])[-1:])]
    done = 0
    for m in _ASSIGNED.finditer(text):
        if not is_secret_name(m[1]) or m.start() < done or text[m.start() - 1 : m.start()] in ("?", "&"):
            continue
        if not any(begin <= m.start() < end for begin, end in users):
            done = _value_end(text, m)
            found.append((m.end(), done))
    for pattern, group in ((_OPTION, 1), (_PAIR, 2)):
        announced = (m.end() for m in pattern.finditer(text) if is_secret_name(m[group]))
        found += [(at, _end(_BARE_WORD, text, _quoted_end(text, at) or at)) for at in announced]
    return found


def _value_end(text: str, m: re.Match[str]) -> int:
    """Where the value ends that a match of `_ASSIGNED` announces."""
    at, header = m.end(), bool(_HEADERS & set(_words(m[1])))
    if text.startswith(HIDDEN, at):
        return at + len(HIDDEN)
    if not (header and m[3] == ":" and not m[2]) and (end := _quoted_end(text, at)):
        return _end(_BARE, text, end)
    if header:
        return _enclosed_end(text, m.start(), at)
    scheme = _SCHEME_WORD.match(text, at)
    return max(_end(_BARE, text, scheme.end() if scheme else at), _end(_TO_THE_END, text, at) if m[3] == ":" else 0)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # each may match nothing
    return found.end()


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _quoted_end(text: str, at: int) -> int:
    """The end of a value in quotes (escaped ones too) or brackets: a list, an object, a call; 0 for any other."""
    if opening := _OPENING.match(text, at):
        return _closing(text, opening.end(), opening[1] + opening[2]) or _line_end(text, at)
    if not _BRACKET.match(text, at):
        return 0
    depth = 0
    for part in _PART.finditer(text, at, at + _MOST):
        depth += (part[1] is not None) - (part[2] is not None)
        if not depth and part[2]:
            return part.end()
    return _line_end(text, at)


def _closing(text: str, at: int, mark: str) -> int:
    """Where a quotation of this line ends, its mark included (`mark` is as it was opened, backslashes too); 0 when it does not."""
    for found in _ANY_QUOTE.finditer(text, at, _line_end(text, at)):
        slashes, wanted = len(found[1]), len(mark) - 1
        if found[2] == mark[-1] and (slashes == wanted or (not wanted and not slashes % 2)):
            return found.end()
        if slashes < wanted:  # the quotation around it ends
            return found.start()
    return 0


def _enclosed_end(text: str, name: int, at: int) -> int:
    """The end of the line, or of the quotation in which the name stands: `-H 'Cookie: a; s=x' http://host`."""
    begin, open_mark = max(text.rfind("\n", 0, name) + 1, name - 4096), ""
    for found in _ANY_QUOTE.finditer(text, begin, name):
        apostrophe = found[0] == "'" and text[found.start() - 1 : found.start()].isalnum() and text[found.end() : found.end() + 1].isalnum()
        if not apostrophe and open_mark in ("", found[0]):
            open_mark = "" if open_mark else found[0]
    end = _line_end(text, at)
    closing = _closing(text, at, open_mark) if open_mark else 0
    return min(end, closing - len(open_mark)) if closing else end


# --- values that are known ------------------------------------------------------------------------------------------

_SAY_NOTHING = {"true", "false", "none", "null"}
_LEAST = 4  # characters: shorter values are everywhere
_BEGUN = 6  # characters of a value at the end of a text, which may have been cut there


def _begun(text: str, value: str) -> int:
    """How many characters of a value's beginning end a text."""
    return next((n for n in range(min(len(value) - 1, len(text)), _BEGUN - 1, -1) if text.endswith(value[:n])), 0)


def known_spans(text: str, known: Iterable[str]) -> Iterator[Span]:
    """Where a text has known values, or ends within one. A short plain word or number counts only where it stands alone."""
    for value in known:
        if begun := _begun(text, value):
            yield len(text) - begun, len(text)
        alone = len(value) < 8 and (value.isalpha() or value.isdigit())
        at = text.find(value)
        while at >= 0:
            end = at + len(value)
            if not alone or not (text[at - 1 : at].isalnum() or text[end : end + 1].isalnum()):
                yield at, end
            at = text.find(value, end)


def values_of(secret: str) -> set[str]:
    """What of a secret would give it away in a text: itself, what is in it, and these as JSON, Python and URLs write them."""
    bare = secret.strip().strip("\"'")
    parts = {bare, *bare.splitlines()}
    parts.update(m[2] for m in re.finditer(r"""(["'])((?:(?!\1)[^\\]|\\.)*+)\1(?!\s*:)""", secret))  # items of a list
    if not re.search(r"[\s\"'{}\[\]]", bare):
        parts.update([bare.partition(":")[2], *bare.split(",")])  # user:password, several keys
    parts.update(m[1].strip("\"'") for m in re.finditer(r"""[\w.-]+=("[^"]*"|[^\s,;]+)""", bare) if not m[1].startswith("="))
    if scheme := _SCHEME_WORD.match(bare):
        parts.add(bare[scheme.end() :])
    parts = {p.strip() for p in parts}
    parts = {p for p in parts if len(p) >= _LEAST and p != HIDDEN and p.lower() not in _SAY_NOTHING}
    return {way for p in parts for way in (p, json.dumps(p)[1:-1], repr(p)[1:-1], quote(p, safe="", errors="replace"))}
