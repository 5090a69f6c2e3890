"""Seeded mutations of valid files (JSON and bytes), for tests of code that reads untrusted files.

mutate_json(text, random)    another value, another name, a cut, a repetition, something nested
mutate_bytes(content, random)    a bit, a cut, more at the end
"""

import json
import random as randomness
from typing import Any

VALUES = (
    None, True, False, 0, -1, 1, 2.5, 10**9, 2**63, 10**400, 1e300, "", "a", "../x", "/etc/hostname", "a\0b",
    "x" * 5000,
    [], {}, [[]], [1, "a"], {"a": 1}, "\ud800", "1", [None],
)  # fmt: skip
TEXTS = ("", "null", "[]", "3", '"a"', "{", "{}}", "\x00\x01", "[" * 5000, '{"a":' * 5000, "NaN", "{'a': 1}")


def mutate_json(text: str, random: randomness.Random) -> bytes:
    """The file with a mutation, which need not be valid JSON any more."""
    if random.random() < 0.2:
        return random.choice(TEXTS).encode(errors="surrogatepass")
    if random.random() < 0.2:
        return mutate_bytes(text.encode(), random)
    found = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(found, random)
    written = json.dumps(found)
    if random.random() < 0.1:
        written = written.replace("{", '{"twice": 1, "twice": 2, ', 1)
    if random.random() < 0.1:
        written = "\ufeff" + written
    return written.encode(errors="surrogatepass")


def _change(found: dict[str, Any], random: randomness.Random) -> None:
    """Changes one entry of the object, or of an object in it."""
    inside = [value for value in found.values() if isinstance(value, dict) and value]
    if inside and random.random() < 0.6:
        return _change(random.choice(inside), random)
    if not found:
        return None
    name, kind = random.choice(list(found)), random.random()
    if kind < 0.2:
        del found[name]
    elif kind < 0.3:
        found[random.choice([value for value in VALUES if isinstance(value, str)])] = found.pop(name)
    else:
        found[name] = random.choice(VALUES)
    return None


def mutate_bytes(content: bytes, random: randomness.Random) -> bytes:
    place, kind = random.randrange(len(content)), random.random()
    if kind < 0.3:
        return content[:place]
    if kind < 0.4:
        return content + bytes(random.randrange(1, 9))
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4))):
        changed[random.randrange(min(len(content), 4096))] = random.randrange(256)
    return bytes(changed)
