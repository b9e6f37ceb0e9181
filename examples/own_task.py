"""A task of your own, trained and evaluated like the built-in ones: which of two letters comes more often.

The file is a plugin as well:

    klformer --plugin examples/own_task.py train --task majority --attention gmm-rks
"""

import tempfile

import numpy as np

import klformer
from klformer.lab.cli.main import main
from klformer.lab.data import Examples, Sequences


@klformer.register_task
class Majority(klformer.Task):
    """Sequences of the tokens 1 and 2; the class says which is there more often."""

    name, title, summary = "majority", "Majority", "which of two letters comes more often"
    num_classes, vocab_size, default_max_len, chance = 2, 3, 31, 0.5  # token 0 is padding

    def read(self, part: str) -> Examples:
        """Examples of a part: "train", or "test". Validation is held out of train, because no file says otherwise."""
        size = {"train": 4000, "test": 500}[part]
        generator = np.random.default_rng((self.config.seed, size))
        letters = generator.integers(1, 3, (size, self.max_len))
        return Examples(Sequences.from_matrix(letters), (letters == 2).sum(1) * 2 // self.max_len)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = "--model.num-layers 1 --model.model-dim 32 --model.ffn-dim 32 --model.num-heads 2"
        training = "--training.max-steps 100 --training.evaluate-every 50 --optimiser.learning-rate 0.003"
        command = f"train --task majority --attention gmm-rks {model} {training} --name first --out {folder}"
        main(command.split())
        main(["eval", f"{folder}/first", "--draws", "5"])
