"""Which GPUs a server is given: the machine's cards, CUDA's order of them, CUDA_VISIBLE_DEVICES. Values in, values out.

The rules are those of the CUDA programming guide, appendix "CUDA Environment Variables": an index counts in CUDA's order, a
UUID may be cut short while it stays unique, the first invalid entry ends the list, an empty value hides every card. Of MIG
slices (`MIG-<uuid>`, or `MIG-GPU-<uuid>/<instance>/<compute instance>` before driver 470) a process is given one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Device = Mapping[str, Any]
"""A card as `harness.nvml` reads it, or a MIG slice: the card's readings and the slice's `mig`, `mig_uuid`, `mig_instance`."""

UNKNOWN_PROFILE = "unknown"


def split_mig(name: str) -> tuple[str, str | None]:
    """An NVML name as the card's model and the MIG profile: `NVIDIA H100 80GB HBM3 MIG 3g.40gb` has both."""
    model, _, profile = name.partition(" MIG ")
    return model.strip(), profile.strip() or None


def devices(cards: Iterable[Device]) -> list[Device]:
    """What CUDA can give out, in the order of the PCI bus: cards, and of a card in MIG mode its slices instead."""
    cards = list(cards)
    if all("pci" in c for c in cards):
        cards.sort(key=lambda c: str(c["pci"]).lower())
    found: list[Device] = []
    for card in cards:
        if card.get("mig_mode") != "on":
            found.append(card)
            continue
        whole = {k: v for k, v in card.items() if k not in ("mig_devices", "memory_mib")}
        slices = card.get("mig_devices") or [{"mig": UNKNOWN_PROFILE}]
        found += [{**whole, **piece} for piece in slices]
    return found


def device_id(device: Device) -> str:
    """The UUID of a card or of a slice; empty where it could not be read."""
    return str(device.get("mig_uuid") or device.get("uuid") or "")


def needs_cudas_order(found: Sequence[Device], env: Mapping[str, str]) -> bool:
    """Whether only CUDA itself knows what an index means: by default it puts the fastest card first, slices by its own rule."""
    words = _words(env.get("CUDA_VISIBLE_DEVICES"))
    if len(found) < 2 or (words is not None and not any(w.isdecimal() for w in words)):
        return False
    return env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" or any("mig" in d for d in found)


def of_one_kind(found: Sequence[Device]) -> bool:
    """Whether any order gives the same thing: whole cards of one model."""
    return len({d.get("name") for d in found}) < 2 and not any("mig" in d for d in found)


def in_order(found: Sequence[Device], ids: Sequence[str]) -> list[Device]:
    """Devices as CUDA lists them; `ids` are UUIDs with any prefix, since CUDA gives only their 16 bytes."""
    known = {device_id(d).partition("-")[2].lower(): d for d in found}
    return [known.get(i.partition("-")[2].lower(), {"uuid": i}) for i in ids]


def visible(found: Sequence[Device], order: Sequence[Device], chosen: str | None) -> list[Device]:
    """The devices that CUDA_VISIBLE_DEVICES (`chosen`) leaves, in its order; `order` is CUDA's of all of them."""
    words = _words(chosen)
    taken: list[Device] = []
    for word in range(len(order)) if words is None else words:
        device = _named(str(word), found, order)
        if device is None:
            break
        if any(device is t for t in taken):
            return []  # CUDA takes a repeated device for a mistake and gives none
        taken.append(device)
        if "mig" in device:
            break
    # A process is given whole cards or one slice, never both.
    return [d for d in taken if "mig" not in d] or taken


def _words(chosen: str | None) -> list[str] | None:
    return None if chosen is None else [w.strip() for w in chosen.split(",")]


def _named(word: str, found: Sequence[Device], order: Sequence[Device]) -> Device | None:
    """The device that one entry names; None when it names none, or several."""
    if word.isdecimal():
        return order[int(word)] if int(word) < len(order) else None
    if old := re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", word):
        return _only(found, lambda d: d.get("mig_instance") == f"{old[2]}/{old[3]}" and str(d.get("uuid")).startswith(old[1]))
    if word.startswith("MIG-") and len(word) > 4:
        return _only(found, lambda d: str(d.get("mig_uuid")).startswith(word))
    if word.startswith("GPU-") and len(word) > 4:
        uuids = {str(d.get("uuid")) for d in found if str(d.get("uuid")).startswith(word)}
        return next(d for d in found if d.get("uuid") in uuids) if len(uuids) == 1 else None
    return None


def _only(found: Sequence[Device], test: Callable[[Device], bool]) -> Device | None:
    matching = [d for d in found if test(d)]
    return matching[0] if len(matching) == 1 else None


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 8` of 0 1 2 3 8."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def set_bits(words: Iterable[int], width: int = 64) -> list[int]:
    """The numbers of the bits that are set in a mask of several words, the lowest word first."""
    return [i * width + bit for i, word in enumerate(words) for bit in range(width) if word >> bit & 1]


def joined(values: Iterable[Any]) -> Any:
    """One value for several cards: what all of them say, else all of it in their order; None when none says anything."""
    known = [v for v in values if v is not None]
    if not known or all(v == known[0] for v in known):
        return known[0] if known else None
    return ", ".join(map(str, known))
