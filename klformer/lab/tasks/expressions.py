"""ListOps expressions: their value, and a generator with the distribution of Long Range Arena.

An operator has 2 to 10 arguments, each of which is an operator with probability 1/4 unless it is at depth 10, and
otherwise a digit. The source is written as LRA writes it, with every application of an operator to one more argument
in parentheses: [MIN 4 7 ] is "( ( ( [MIN 4 ) 7 ) ] )". The parentheses say nothing that the brackets don't, and are
no tokens.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from klformer.checks import check_count
from klformer.errors import ArgumentError

MAX_DEPTH = 10
MAX_ARGUMENTS = 10


def sum_modulo_ten(values: Sequence[int]) -> int:
    return sum(values) % 10


def median(values: Sequence[int]) -> int:
    """The median; of an even number of values, the mean of the middle two cut to a whole number."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": sum_modulo_ten,
}
TOKENS = (*"0123456789", *OPERATORS, "]")


def evaluate(tokens: Iterable[str]) -> int:
    """The value of an expression, given as tokens without parentheses."""
    # The outermost list collects the result.
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in tokens:
        if token in OPERATORS:
            stack.append((token, []))
        elif token == "]":
            operator, values = stack.pop()
            if not operator or not values:
                raise ArgumentError("a ] closes nothing, or an operator without arguments")
            stack[-1][1].append(OPERATORS[operator](values))
        elif token in TOKENS:
            stack[-1][1].append(int(token))
        else:
            raise ArgumentError(f"unknown token {token!r}")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ArgumentError("the tokens are not one whole expression")
    return stack[0][1][0]


class ExpressionGenerator:
    """Distinct random expressions with max_len / 4 < tokens < max_len. LRA's are those of max_len 2,000.

    LRA's root is a digit three times in four, which is too short to be kept; here the root is always an operator,
    which leaves the same distribution.
    """

    def __init__(self, seed: int, max_len: int = 2_000) -> None:
        check_count("max_len", max_len, minimum=20)
        self._max_len = max_len
        self._next_node = _nodes(np.random.default_rng(seed)).__next__
        self._seen: set[bytes] = set()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Sources and values, without end."""
        while True:
            source, value, length = self._grow(1)
            if self._max_len / 4 < length < self._max_len:
                digest = hashlib.blake2b(source.encode(), digest_size=16).digest()
                if digest not in self._seen:
                    self._seen.add(digest)
                    yield source, value

    def _grow(self, depth: int) -> tuple[str, int, int]:
        """Source, value and number of tokens of an expression whose root, an operator, is at this depth."""
        operator, head, arguments, digits, values = self._next_node()
        length = len(values) + 2
        if depth + 1 == MAX_DEPTH:
            arguments = digits
        elif "[" in arguments:
            sources, results = list(arguments), list(values)
            for position, argument in enumerate(arguments):
                if argument == "[":
                    sources[position], results[position], tokens = self._grow(depth + 1)
                    length += tokens - 1
            return f"{head}{' ) '.join(sources)} ) ] )", operator(results), length
        return f"{head}{' ) '.join(arguments)} ) ] )", operator(values), length


def _nodes(generator: np.random.Generator) -> Iterator[tuple[Callable[[Sequence[int]], int], str, str, str, bytes]]:
    """Random operators with their arguments: the operator, how its source begins, its arguments as a digit or "[" for
    an operator each, the digits that they are where no operator is allowed, and these as numbers.

    A tree has hundreds of nodes: drawing them in blocks is several times faster than asking the generator for each
    argument.
    """
    counts = range(2, MAX_ARGUMENTS + 1)
    heads = [
        (function, count, "( " * (count + 1) + name + " ") for count in counts for name, function in OPERATORS.items()
    ]
    # Of forty equally likely values, thirty are digits and ten are operators.
    letters = bytes(ord("[") if value >= 30 else ord("0") + value % 10 for value in range(256))
    block = 1 << 14
    while True:
        draws = generator.integers(0, 40, block * MAX_ARGUMENTS, np.uint8)
        arguments = draws.tobytes().translate(letters).decode()
        values = (draws % 10).tobytes()
        digits = (draws % 10 + ord("0")).astype(np.uint8).tobytes().decode()
        for index, head in enumerate(generator.integers(0, len(heads), block).tolist()):
            operator, count, text = heads[head]
            node = slice(index * MAX_ARGUMENTS, index * MAX_ARGUMENTS + count)
            yield operator, text, arguments[node], digits[node], values[node]
