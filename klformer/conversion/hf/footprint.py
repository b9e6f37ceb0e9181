"""Time and memory of one forward pass of a model in a folder, in a process of its own:

python -m klformer.conversion.hf.footprint FOLDER TOKENS
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from klformer.conversion.hf.inputs import load_model, longest_input
from klformer.conversion.hf.positions import extend_positions
from klformer.memory import extra_peak_memory

#: Tokens of the pass that warms up, how often is measured, and from how many seconds on only once.
WARM_UP, REPEATS, SLOW = 16, 3, 5.0


def footprint(folder: Path, tokens: int) -> dict[str, float]:
    """Seconds of the clock and of processors, and bytes above what the model itself takes, of one sequence of random
    tokens.

    Raises:
        RuntimeError: the process ended without an answer, for want of memory for example.
    """
    command = [sys.executable, "-m", "klformer.conversion.hf.footprint", str(folder), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


@torch.no_grad()
def _measure(folder: Path, tokens: int) -> dict[str, float]:
    model: Any = load_model(folder)
    longest = longest_input(model)
    if longest is not None and longest < tokens:
        extend_positions(model, tokens, "repeat")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    # Positions of some families depend on which tokens are padding: there is none.
    padding = model.config.pad_token_id
    if padding is not None:
        inputs = inputs.masked_fill(inputs == padding, (padding + 1) % model.config.vocab_size)
    # Of one position the scores of all words are enough.
    body = model.base_model

    def run(length: int = tokens) -> None:
        body(input_ids=inputs[:, :length])

    run(WARM_UP)
    extra = extra_peak_memory(run)
    times: list[float] = []
    processor_times: list[float] = []
    while len(times) < (1 if times and times[0] > SLOW else REPEATS):
        start, processor_start = time.perf_counter(), time.process_time()
        run()
        times.append(time.perf_counter() - start)
        processor_times.append(time.process_time() - processor_start)
    return {"seconds": median(times), "processor_seconds": median(processor_times), "bytes": extra}


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))))
