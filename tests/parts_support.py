"""The parts of a sequence in threads of one process: gradients find their way by themselves."""

import threading

import torch

from klformer.ops.spectral_product.parts import Parts


class Together(Parts):
    """One part, in a thread of its own."""

    def __init__(self, index, board, barrier):
        self.index, self.count = index, len(board)
        self._board, self._barrier = board, barrier

    def _everybodys(self, x):
        self._board[self.index] = x
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def largest(self, x):
        return torch.stack(self._everybodys(x.detach())).amax(0)

    def gather(self, x):
        return torch.stack(self._everybodys(x.detach()))

    def begin_sum(self, x):
        found = self._everybodys(x)
        return lambda: sum(found)

    def begin_combination(self, x, factors, of_others):
        found = self._everybodys(x)
        return lambda: sum(factor * part for factor, part in zip(factors, found, strict=True))


def on_ranks(count, work):
    """What `work(parts)` gives for each of so many parts."""
    barrier, board, results, errors = threading.Barrier(count, timeout=60), [None] * count, [None] * count, []

    def run(index):
        try:
            results[index] = work(Together(index, board, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
