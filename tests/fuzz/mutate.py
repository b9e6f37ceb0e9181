"""Inputs that are nearly right: bytes and JSON, changed at random places."""

import copy
import json
from typing import Any

#: What files break at: ends of ranges, other types, other languages, paths and very long things.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**12, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "x",
        "../../x",
        "/etc/passwd",
        "\x00",
        "\ud800",
        "é" * 9,
        "a" * 5000,
        "1",
        "nan",
    ),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1, "x"], "true", "None", "[", "{"),
)
TOKENS = (
    b"\x00",
    b"\xff",
    b"\n",
    b"\r",
    b'"',
    b"'",
    b",",
    b"\t",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"-",
    b"e9999",
    b"NaN",
    b"1" * 30,
)


def mutated_bytes(random, content):
    """Some places of a file changed, removed, doubled or cut off."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        place = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1:
                changed[place:place] = random.choice(TOKENS)
            case 2:
                del changed[place : place + random.randrange(1, 40)]
            case 3:
                changed[place:place] = changed[place : place + random.randrange(1, 40)]
            case 4:
                changed[place : place + 8] = random.randbytes(8)
            case 5 if random.random() < 0.2:
                del changed[place:]
    return bytes(changed)


def mutated_json(random, content):
    """Some values of a tree replaced, removed, moved or added."""
    tree = json.loads(json.dumps(content))
    for _ in range(random.choice((1, 1, 2, 3))):
        holders = list(_holders(tree))
        if not holders:
            break
        holder = random.choice(holders)
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = random.choice(keys)
        match random.randrange(5):
            case 0 | 1:
                holder[key] = copy.deepcopy(random.choice(STRANGE))
            case 2:
                del holder[key]
            case 3:
                other = random.choice(holders)
                holder[key] = json.loads(json.dumps(other))
            case 4 if isinstance(holder, dict):
                holder[random.choice(("x", "", "root", "format", "seed", "step", "é"))] = copy.deepcopy(
                    random.choice(STRANGE)
                )
    return tree


def _holders(tree):
    """The objects and lists of a tree that hold something."""
    if isinstance(tree, dict | list) and tree:
        yield tree
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _holders(value)


def mutated_text(random, content):
    """A text file: its JSON changed if it is JSON, or its bytes."""
    if random.random() < 0.6:
        try:
            return json.dumps(mutated_json(random, json.loads(content))).encode("utf-8", "surrogatepass")
        except ValueError:
            pass
    return mutated_bytes(random, content)
