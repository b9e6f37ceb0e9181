"""Randomness as a function of (seed, purpose, numbers): nothing to save, and a resumed run draws the same."""

import hashlib

import torch


def derived_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Derive a seed for one purpose, independent of those for others."""
    text = f"{seed}/{purpose}/" + "/".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Make a CPU generator for one purpose."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, *numbers))
