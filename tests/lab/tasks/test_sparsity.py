"""The sparsity task: its definition, its distribution and its cache."""

import numpy as np
import pytest

from klformer.errors import DataError
from klformer.lab.tasks import Sparsity
from klformer.lab.tasks.sparsity import SparsityData, _draw, generate


def task(root, **config):
    return Sparsity(SparsityData(root=root, **{"num_examples": 900, "max_len": 41, **config}), quiet=True)


def decode(codes):
    return np.where(codes & 1, 1, -1), codes >> 1


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_definition(sparsity):
    codes, labels = generate(1000, 103, sparsity=sparsity, seed=0)
    values, relevant = decode(codes.astype(int))
    sums = np.cumsum(values * relevant, 1)
    assert np.abs(sums).max() == 4
    assert (sums[:, -1] + 4 == labels).all()
    assert sorted(np.bincount(labels)) == [111] * 8 + [112]


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_distribution(sparsity):
    codes, labels = _draw(np.random.default_rng(0), 5000, 200, sparsity)
    values, relevant = decode(codes.astype(int))
    total = codes.size
    error = (sparsity * (1 - sparsity) / total) ** 0.5
    assert abs(relevant.mean() - (1 - sparsity)) <= 4 * error
    before = np.cumsum(values * relevant, 1) - values * relevant
    forced = (relevant == 1) & (np.abs(before) == 4)
    assert (values[forced] == -np.sign(before[forced])).all()
    free = values[~forced]
    assert abs(free.mean()) <= 4 / free.size**0.5
    # Reflected at +-4, the walk is half as often there as elsewhere, once it has forgotten its start.
    if sparsity < 0.9:
        expected = np.array([1, 2, 2, 2, 2, 2, 2, 2, 1]) / 16
        counts = np.bincount(labels, minlength=9)
        assert (np.abs(counts - 5000 * expected) <= 4 * np.sqrt(5000 * expected * (1 - expected))).all()


def test_balancing_leaves_no_order():
    _, labels = generate(900, 60, sparsity=0.5, seed=0)
    first_half = np.bincount(labels[:450], minlength=9)
    # Hypergeometric: 450 of 900 drawn, 100 of each class.
    assert (np.abs(first_half - 50) <= 4 * (450 * (1 / 9) * (8 / 9) * 450 / 899) ** 0.5).all()


def test_vectors(tmp_path):
    examples = task(tmp_path).load("train")
    assert examples.first.width == Sparsity.input_dim == 3
    vectors = examples.first.values.astype(int)
    assert (vectors[:, 0] + vectors[:, 1] == 1).all()
    sums = ((vectors[:, 0] - vectors[:, 1]) * vectors[:, 2]).reshape(-1, 41).sum(1)
    assert (sums + 4 == examples.targets).all()


def test_protocols(tmp_path):
    def rows(split, **config):
        examples = task(tmp_path, **config).load(split)
        return [row.tobytes() for row in examples.first]

    train, validation, test = rows("train"), rows("validation"), rows("test")
    assert (len(train), len(validation), len(test)) == (720, 90, 90)
    assert len(set(train + validation + test)) == 900
    assert rows("train", protocol="lra") == train
    assert rows("validation", protocol="lra") == rows("test", protocol="lra") == validation + test


def test_deterministic_for_a_seed():
    first = generate(300, 31, sparsity=0.5, seed=4)
    again, other = generate(300, 31, sparsity=0.5, seed=4), generate(300, 31, sparsity=0.5, seed=5)
    assert (first[0] == again[0]).all()
    assert (first[1] == again[1]).all()
    assert not (first[0] == other[0]).all()


def test_files_are_the_same_for_a_seed_and_made_once(tmp_path):
    task(tmp_path / "a").prepare()
    task(tmp_path / "b").prepare()
    (a,), (b,) = (list((tmp_path / name).rglob("data.npz")) for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    made = a.stat().st_mtime_ns
    task(tmp_path / "a").load("test")
    assert a.stat().st_mtime_ns == made
    assert "(generated)" in task(tmp_path / "a").location()


def test_settings_do_not_collide(tmp_path):
    locations = {
        task(tmp_path, **config).location()
        for config in ({}, {"seed": 1}, {"sparsity": 0.1}, {"max_len": 42}, {"num_examples": 901})
    }
    assert len(locations) == 5


def test_interrupted_generation_starts_again(tmp_path, capsys):
    interrupted = task(tmp_path)
    interrupted.prepare()
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.unlink()
    (data,) = tmp_path.rglob("data.npz")
    data.write_bytes(data.read_bytes()[:1000])
    again = Sparsity(interrupted.config)
    assert len(again.load("train")) == 720
    assert "was interrupted, starting again" in capsys.readouterr().err


def test_a_changed_cache_is_noticed(tmp_path):
    task(tmp_path).prepare()
    (data,) = tmp_path.rglob("data.npz")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data\.npz: has \d+ bytes where the manifest says \d+"):
        task(tmp_path).load("train")
    data.write_bytes(whole[:-1] + b"!")
    with pytest.raises(DataError, match=r"data\.npz: was changed"):
        task(tmp_path).load("train")


def test_classes_that_hardly_occur_are_refused():
    with pytest.raises(DataError, match=r"sequences of length 3 at sparsity 0\.5 hardly ever sum to -4"):
        generate(18, 3, sparsity=0.5, seed=0)


def test_too_few_examples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num_examples must be at least 18, got 17"):
        task(tmp_path, num_examples=17)
