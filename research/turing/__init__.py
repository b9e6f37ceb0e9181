"""Theorems 1 and 2 by construction: Turing machines run by an encoder-decoder with explicit weights."""

from research.turing.attention import FeatureAttention, GaussianAttention, HardAttention, SoftAttention
from research.turing.construction import CONSTRUCTIONS, ConstructionName, build
from research.turing.machine import (
    Configuration,
    MachineError,
    TuringMachine,
    example_names,
    load_machine,
    parse_machine,
)
from research.turing.simulate import (
    Comparison,
    Survival,
    best_survival,
    compare,
    decoded_trace,
    expected_trace,
    fewest_samples,
    first_tie,
    highest_temperature,
    tape_of,
)
from research.turing.transformer import Decoding, Printed, TuringTransformer

__all__ = [
    "CONSTRUCTIONS",
    "Comparison",
    "Configuration",
    "ConstructionName",
    "Decoding",
    "FeatureAttention",
    "GaussianAttention",
    "HardAttention",
    "MachineError",
    "Printed",
    "SoftAttention",
    "Survival",
    "TuringMachine",
    "TuringTransformer",
    "best_survival",
    "build",
    "compare",
    "decoded_trace",
    "example_names",
    "expected_trace",
    "fewest_samples",
    "first_tie",
    "highest_temperature",
    "load_machine",
    "parse_machine",
    "tape_of",
]
