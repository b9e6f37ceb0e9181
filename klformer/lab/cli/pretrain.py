"""`klformer pretrain`: guess hidden tokens of texts, or of a task's own sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from klformer.lab.cli.command import Command
from klformer.lab.cli.settings import read_settings
from klformer.lab.cli.train import Train, resumed, train


@dataclass(frozen=True, kw_only=True)
class Pretrain(Train):
    """Pretrain a Transformer by guessing hidden tokens: 15% of a sequence, special ones never.

    On texts (`--task corpus`), or on the sequences of any task of tokens, with the sizes of the task's own preset.
    `klformer train --init-from RUN` takes embedding and encoder from there. Examples:

      klformer pretrain --data.root wikitext-2 --attention fastfood-prf
      klformer pretrain --data.train book.txt --data.tokens.kind bytes --attention softmax
      klformer pretrain --task listops --attention generative-prf
    """

    objective: ClassVar[Literal["task", "masked"]] = "masked"

    task: str = "corpus"
    """Task whose sequences are learned from; `corpus` for texts."""


def parse(arguments: Sequence[str], prog: str) -> Pretrain:
    """Read the arguments, as those of `train`."""
    return read_settings(Pretrain, arguments, prog, resumed=resumed(arguments), default_task="corpus")


COMMAND = Command(parse, train)
