"""Beyond one process: sequences in parts, each with a process of its own."""

from klformer.distributed.sequence import (
    average_gradients,
    own_part,
    parts_of,
    sequence_parallel,
    whole_sequences,
)

__all__ = ["average_gradients", "own_part", "parts_of", "sequence_parallel", "whole_sequences"]
