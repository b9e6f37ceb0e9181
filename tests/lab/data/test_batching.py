"""Batches: content, padding, and every example once an epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klformer.lab.data import BucketSampler, Examples, Sequences, collate, padding_report

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=80).map(np.array)
OPTIONS = {"batch_size": st.integers(1, 13), "window": st.integers(1, 4), "seed": st.integers(0, 5)}


def examples_of(lengths, width=None, pairs=False):
    generator = np.random.default_rng(0)

    def side(sizes):
        return Sequences.from_list([generator.integers(0, 9, (size, width) if width else size) for size in sizes])

    labels = np.arange(len(lengths), dtype=np.int64)
    return Examples(side(lengths), labels, side(lengths[::-1]) if pairs else None)


@given(LENGTHS, st.booleans(), st.integers(0, 3), st.fixed_dictionaries(OPTIONS))
def test_every_example_once_an_epoch_and_the_same_for_a_seed(lengths, shuffle, epoch, options):
    sampler = BucketSampler(lengths, shuffle=shuffle, **options)
    batches = sampler.batches(epoch)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    size = options["batch_size"]
    assert sum(len(batch) != size for batch in batches) == (len(lengths) % size > 0)
    assert len(batches) == len(sampler)
    again = BucketSampler(lengths, shuffle=shuffle, **options).batches(epoch)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_epochs_and_seeds_differ():
    lengths = np.arange(100) % 17
    orders = [
        np.concatenate(BucketSampler(lengths, batch_size=5, seed=seed).batches(epoch)).tolist()
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_buckets_save_padding():
    lengths = np.random.default_rng(0).integers(500, 2000, 5000)
    report = padding_report(lengths, BucketSampler(lengths, batch_size=16).batches(0))
    assert report.real == lengths.sum()
    assert report.longest == lengths.max() * 5000
    assert report.real <= report.padded < 1.05 * report.real
    assert report.saved == pytest.approx(1 - report.padded / report.longest)


def test_padding_report_counts():
    report = padding_report(np.array([1, 4, 2, 0]), [np.array([0, 1]), np.array([2]), np.array([3])])
    assert (report.real, report.padded, report.longest) == (7, 8 + 2 + 1, 16)


def test_bad_samplers_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BucketSampler(np.arange(5), batch_size=0)
    with pytest.raises(ValueError, match="there must be at least one example"):
        BucketSampler(np.zeros(0, np.int64), batch_size=2)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("pad_to", [None, 23])
def test_batches_keep_the_content(width, pad_to):
    examples = examples_of([5, 0, 11, 7], width, pairs=True)
    indices = np.array([2, 0, 1])
    batch = collate(examples, indices, pad_to=pad_to)
    assert batch.inputs.shape == (3, pad_to or 11, *([width] if width else []))
    assert batch.second.shape[1] == (pad_to or 11)
    assert batch.inputs.dtype == batch.second.dtype == (torch.float32 if width else torch.int64)
    sides = [(examples.first, batch.inputs, batch.key_mask), (examples.second, batch.second, batch.second_mask)]
    for sequences, padded, mask in sides:
        for row, index in enumerate(indices):
            assert padded[row][mask[row]].tolist() == sequences[index].tolist()
            assert not padded[row][~mask[row]].any()
    assert batch.targets.tolist() == batch.ids.tolist() == [2, 0, 1]
    assert len(batch) == 3
    assert batch.num_tokens == (11 + 5 + 0) + (0 + 7 + 11)
    assert batch.num_padded == batch.key_mask.numel() + batch.second_mask.numel()


def test_each_side_is_padded_by_itself():
    batch = collate(examples_of([2, 9], pairs=True), np.array([0]))
    assert batch.inputs.shape == (1, 2)
    assert batch.second.shape == (1, 9)


def test_an_empty_sequence_is_all_padding():
    batch = collate(examples_of([0]), np.array([0]))
    assert batch.inputs.tolist() == [[0]]
    assert batch.key_mask.tolist() == [[False]]
    assert batch.num_tokens == 0


def test_batches_can_not_be_empty_or_cut():
    examples = examples_of([5])
    with pytest.raises(ValueError, match="at least one example"):
        collate(examples, np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="pad_to must be at least the longest sequence, 5, got 4"):
        collate(examples, np.array([0]), pad_to=4)


def test_to_another_device():
    batch = collate(examples_of([3, 2], pairs=True), np.array([0, 1])).to("meta")
    tensors = [batch.inputs, batch.key_mask, batch.targets, batch.ids, batch.second, batch.second_mask]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert batch.num_tokens == 10
    alone = collate(examples_of([3]), np.array([0])).to("meta")
    assert alone.second is None
