"""The head of a GGUF file: what it says of the model's shape, in the words of a config.json. Pure.

Layout as in ggml-org/ggml `docs/gguf.md` (versions 2 and 3, little endian): the magic, a version, the number of tensors and of entries;
of each entry a name, a type and a value.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
MOST_ENTRIES, MOST_TEXT, MOST_ITEMS = 10_000, 2**26, 2**24

# An entry below the architecture's name, and what a config.json calls it.
WORDS = {
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "embedding_length": "hidden_size", "attention.key_length": "head_dim", "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
}  # fmt: skip
# Models whose layers differ, or that keep something else than keys and values: what a file says of them is no such shape.
OTHERWISE = ("attention.kv_lora_rank", "ssm.state_size", "ssm.inner_size", "wkv.head_size", "full_attention_interval")


def config_of(file: BinaryIO) -> dict[str, Any]:
    """As a config.json would say it; empty where the file is none, or of a model that these words do not tell the shape of."""
    try:
        found = _entries(file)
    except (ValueError, struct.error, UnicodeDecodeError):
        return {}
    below = f"{found.get('general.architecture')}."
    if any(below + name in found for name in OTHERWISE):
        return {}
    said = {word: found[below + name] for name, word in WORDS.items() if below + name in found}
    return said if all(type(v) is int for v in said.values()) else {}  # heads of each layer are an array


def _entries(file: BinaryIO) -> dict[str, Any]:
    if file.read(4) != MAGIC:
        raise ValueError("no GGUF file")
    version, _, count = struct.unpack("<IQQ", _read(file, 20))
    if version not in (2, 3) or count > MOST_ENTRIES:
        raise ValueError(f"version {version}, {count} entries")
    found = {}
    for _ in range(count):
        name = _text(file)
        (kind,) = struct.unpack("<I", _read(file, 4))
        found[name] = _value(file, kind)
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _text(file)
    if kind != ARRAY:
        return struct.unpack(NUMBERS.get(kind, "?!"), _read(file, struct.calcsize(NUMBERS.get(kind, "?!"))))[0]
    of, count = struct.unpack("<IQ", _read(file, 12))
    if count > MOST_ITEMS or of == ARRAY:
        raise ValueError(f"{count} items")
    if of == STRING:
        for _ in range(count):
            _read(file, _length(file))
        return []
    return list(struct.unpack(f"<{count}{NUMBERS.get(of, '?!')[1:]}", _read(file, count * struct.calcsize(NUMBERS.get(of, "?!")))))


def _text(file: BinaryIO) -> str:
    return _read(file, _length(file)).decode()


def _length(file: BinaryIO) -> int:
    length: int = struct.unpack("<Q", _read(file, 8))[0]
    if length > MOST_TEXT:
        raise ValueError(f"a text of {length} bytes")
    return length


def _read(file: BinaryIO, n: int) -> bytes:
    found = file.read(n)
    if len(found) < n:
        raise ValueError("the file ends early")
    return found
