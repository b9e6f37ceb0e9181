"""Hidden tokens are to be guessed: masked language modelling.

Of every sequence 15% of the tokens are asked for. Of these 80% are replaced by the mask, 10% by any other token, and
10% are left as they are. Special tokens and padding are never asked for and never put in a token's place. What is
hidden is a function of (seed, step, example) in training and of the example alone in evaluation: it is the same after
an interruption, for one process and for several, and for all models that are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.data.sequences import IGNORED, AnyArray
from klformer.lab.training.metrics import Metric
from klformer.lab.training.objective import Objective

SHARE = 0.15
MASKED, REPLACED = 0.8, 0.1


class MaskedLanguageModelling(Objective):
    """Scores of the vocabulary at the tokens that are asked for.

    Args:
        vocab_size: Number of tokens, the mask among them.
        mask: The token that hides another.
        specials: Tokens that are never asked for, nor put in another's place.
        counts: (vocab_size,), how often each token is there in training: what a model starts from.

    Raises:
        ArgumentError: the mask is no token, or all tokens are special.

    Examples:
        Of twenty tokens three are asked for, and most of these are hidden by the mask, which is 9 here:

        >>> import numpy as np
        >>> from klformer.lab.data import Examples, Sequences, collate
        >>> from klformer.lab.data.sequences import IGNORED
        >>> from klformer.lab.training.objectives import MaskedLanguageModelling
        >>> objective = MaskedLanguageModelling(vocab_size=10, mask=9, specials=(0,), counts=np.ones(10))
        >>> sequences = Sequences.from_list([np.arange(20) % 8 + 1])
        >>> batch = collate(Examples(sequences, np.zeros(1, np.int64)), np.arange(1))
        >>> posed = objective.pose(batch, draw=(0, 1))
        >>> int((posed.targets != IGNORED).sum()), bool((posed.inputs == 9).any())
        (3, True)
    """

    metrics: ClassVar[Sequence[Metric]] = (
        Metric("masked_accuracy", higher_is_better=True, percent=True),
        Metric("perplexity", higher_is_better=False),
    )
    of_positions: ClassVar[bool] = True

    def __init__(self, *, vocab_size: int, mask: int, specials: Sequence[int], counts: AnyArray) -> None:
        if not 0 <= mask < vocab_size:
            raise ArgumentError(f"mask must be a token from 0 to {vocab_size - 1}, got {mask}")
        self.vocab_size = vocab_size
        self.mask = mask
        self.counts = counts
        self._is_special = np.zeros(vocab_size, bool)
        self._is_special[[mask, *specials]] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        if not len(self._ordinary):
            raise ArgumentError("there must be tokens that are not special")

    @property
    def num_outputs(self) -> int:
        return self.vocab_size

    @property
    def prediction_shape(self) -> tuple[int, ...]:
        return (3,)

    def pose(self, batch: Batch, draw: Sequence[int]) -> Batch:
        inputs = batch.inputs.cpu().numpy().copy()
        may_ask = batch.key_mask.cpu().numpy() & ~self._is_special[inputs]
        targets = np.full(inputs.shape, IGNORED)
        for row, example in enumerate(batch.ids.tolist()):
            places = np.flatnonzero(may_ask[row])
            if not len(places):
                continue
            generator = np.random.default_rng([*draw, example])
            asked = places[generator.permutation(len(places))[: max(1, round(SHARE * len(places)))]]
            targets[row, asked] = inputs[row, asked]
            kind = generator.random(len(asked))
            others = generator.choice(self._ordinary, len(asked))
            inputs[row, asked[kind < MASKED]] = self.mask
            swapped = (kind >= MASKED) & (kind < MASKED + REPLACED)
            inputs[row, asked[swapped]] = others[swapped]
        device = batch.inputs.device
        return replace(batch, inputs=torch.from_numpy(inputs).to(device), targets=torch.from_numpy(targets).to(device))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.inputs, batch.key_mask, batch.targets != IGNORED)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._losses(outputs, batch).sum(-1)

    def count(self, outputs: Tensor, batch: Batch) -> int:
        return outputs.shape[-2]

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        return {"masked_accuracy": (outputs.argmax(-1) == _wanted(batch)).sum()}

    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        # Of every sequence: tokens asked for, those that were right, and the sum of their losses.
        right = (outputs.argmax(-1) == _wanted(batch)).float()
        kept = torch.stack([torch.ones_like(right), right, self._losses(outputs, batch)], -1)
        rows = (batch.targets != IGNORED).nonzero()[:, 0]
        sums = kept.new_zeros(len(outputs), len(batch), 3)
        return sums.index_add_(1, rows, kept)

    def predict_part(self, outputs: Tensor, batch: Batch, start: int) -> Tensor:
        return self.predict(outputs, batch)

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        asked, right, loss = predictions.double().sum(0).tolist()
        if not asked:
            raise ArgumentError("there is nothing to ask for: all tokens are special")
        # A model that is worse than this has diverged; exp would overflow.
        return {"masked_accuracy": right / asked, "perplexity": float(np.exp(min(700.0, loss / asked)))}

    def combine(self, predictions: Tensor) -> Tensor:
        return predictions.mean(0)

    def check_targets(self, targets: Tensor) -> None:
        pass  # sequences bring no targets; whatever stands in their place is not looked at

    def _losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return -log p of the hidden tokens: (..., M, vocab_size) -> (..., M)."""
        wanted = _wanted(batch).expand(outputs.shape[:-1])
        flat = nn.functional.cross_entropy(outputs.flatten(0, -2), wanted.flatten(), reduction="none")
        return flat.view(wanted.shape)


def _wanted(batch: Batch) -> Tensor:
    """Return the hidden tokens (M,), row by row."""
    return batch.targets[batch.targets != IGNORED]
