"""What a model must know of its inputs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InputShape:
    """The form of sequences: token ids, or vectors.

    Args:
        max_len: Longest sequence.
        vocab_size: Number of token ids; None if positions are vectors.
        input_dim: Size of the vectors; None if positions are token ids.
        is_pair: Examples are pairs of sequences.
        separator: Id between two texts in one sequence: what comes after it is of the second type.
        mask: Id that stands for a hidden token; None if there is none among `vocab_size`.
        specials: Ids that are never hidden and never guessed.

    Examples:
        >>> from klformer.lab.data import InputShape
        >>> texts = InputShape(max_len=512, vocab_size=259)
        >>> texts.max_len, texts.input_dim, texts.is_pair
        (512, None, False)
    """

    max_len: int
    vocab_size: int | None = None
    input_dim: int | None = None
    is_pair: bool = False
    separator: int | None = None
    mask: int | None = None
    specials: tuple[int, ...] = ()
