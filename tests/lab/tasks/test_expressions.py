"""ListOps expressions: values against a second evaluator, and the distribution of Long Range Arena."""

import random
import statistics
from itertools import islice

import numpy as np
import pytest

from klformer.lab.tasks.listops import MAX_ARGUMENTS, MAX_DEPTH, OPERATORS, ExpressionGenerator, evaluate


def tokens_of(source):
    return [token for token in source.split() if token not in "()"]


def parse(tokens):
    """Nested tuples of an operator and its arguments, by recursion."""
    token = next(tokens)
    if not token.startswith("["):
        return int(token) if token != "]" else None
    arguments = []
    while (argument := parse(tokens)) is not None:
        arguments.append(argument)
    return (token, arguments)


def value_of(tree):
    """The value of a tree with numpy and the statistics module: nothing shared with the evaluator under test."""
    if isinstance(tree, int):
        return tree
    name, arguments = tree
    values = [value_of(argument) for argument in arguments]
    return {
        "[MIN": lambda: int(np.min(values)),
        "[MAX": lambda: int(np.max(values)),
        "[MED": lambda: int(statistics.median(values)),
        "[SM": lambda: int(np.sum(values)) % 10,
    }[name]()


def written(tree):
    """The source as binary applications, one at a time."""
    if isinstance(tree, int):
        return str(tree)
    name, arguments = tree
    text = name
    for argument in arguments:
        text = f"( {text} {written(argument)} )"
    return f"( {text} ] )"


@pytest.fixture(scope="module")
def sample():
    sources = list(islice(ExpressionGenerator(0), 600))
    return [(source, value, parse(iter(tokens_of(source)))) for source, value in sources]


def test_two_evaluators_agree(sample):
    for source, value, tree in sample:
        assert value == evaluate(tokens_of(source)) == value_of(tree)


def test_sources_are_written_as_binary_applications(sample):
    for source, _, tree in sample[:50]:
        assert source == written(tree)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("[MIN 4 7 ]", 4),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 4 ]", 2),
        ("[MED 9 1 4 ]", 4),
        ("[SM 9 9 5 ]", 3),
        ("7", 7),
    ],
)
def test_known_values(source, value):
    assert evaluate(source.split()) == value


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("[MIN 4 7", "not one whole expression"),
        ("4 7", "not one whole expression"),
        ("", "not one whole expression"),
        ("4 ]", "closes nothing"),
        ("[MIN ]", "without arguments"),
        ("[SUM 1 2 ]", r"unknown token '\[SUM'"),
        ("12", "unknown token '12'"),
    ],
)
def test_broken_expressions(source, problem):
    with pytest.raises(ValueError, match=problem):
        evaluate(source.split())


def nodes(tree, depth=1):
    """Depth, operator and arguments of every operator."""
    yield depth, tree[0], tree[1]
    for argument in tree[1]:
        if not isinstance(argument, int):
            yield from nodes(argument, depth + 1)


def test_limits(sample):
    for source, _, tree in sample:
        assert 500 < len(tokens_of(source)) < 2000
        for depth, name, arguments in nodes(tree):
            assert depth < MAX_DEPTH
            assert name in OPERATORS
            assert 2 <= len(arguments) <= MAX_ARGUMENTS
    assert len({source for source, _, _ in sample}) == len(sample)


def within(count, total, probability, tolerance=4.0):
    return abs(count - total * probability) <= tolerance * (total * probability * (1 - probability)) ** 0.5


def test_operators_and_digits_are_uniform(sample):
    # Which operator and which digit stand somewhere has no influence on the length, by which trees are kept.
    found = [node for _, _, tree in sample for node in nodes(tree)]
    for name in OPERATORS:
        assert within(sum(node[1] == name for node in found), len(found), 1 / 4)
    digits = [argument for node in found for argument in node[2] if isinstance(argument, int)]
    for digit in range(10):
        assert within(digits.count(digit), len(digits), 1 / 10)


def reference_tree(generator, depth=1):
    """The distribution, one draw at a time: size and number of operators at every depth, of a tree or of a digit."""
    if depth >= MAX_DEPTH or generator.random() > 0.25:
        return 1, [0] * MAX_DEPTH
    length, operators = 2, [0] * MAX_DEPTH
    operators[depth] += 1
    for _ in range(generator.randint(2, MAX_ARGUMENTS)):
        size, below = reference_tree(generator, depth + 1)
        length += size
        operators = [a + b for a, b in zip(operators, below, strict=True)]
    return length, operators


def test_shapes_have_the_distribution_of_the_definition(sample):
    generator = random.Random(1)
    reference = []
    while len(reference) < len(sample):
        length, operators = reference_tree(generator)
        if 500 < length < 2000:
            reference.append([length, *operators[1:]])
    ours = []
    for source, _, tree in sample:
        depths = [depth for depth, _, _ in nodes(tree)]
        ours.append([len(tokens_of(source)), *(depths.count(depth) for depth in range(1, MAX_DEPTH))])
    a, b = np.array(reference, float), np.array(ours, float)
    error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
    assert (np.abs(a.mean(0) - b.mean(0)) <= 4 * error).all()


def test_deterministic_for_a_seed():
    first = list(islice(ExpressionGenerator(5, max_len=60), 30))
    assert first == list(islice(ExpressionGenerator(5, max_len=60), 30))
    assert first != list(islice(ExpressionGenerator(6, max_len=60), 30))
    assert all(15 < len(tokens_of(source)) < 60 for source, _ in first)


def test_too_short_is_refused():
    with pytest.raises(ValueError, match="max_len must be at least 20, got 19"):
        ExpressionGenerator(0, max_len=19)
