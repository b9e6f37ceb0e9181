"""Sequences with their targets, and batches of them: what tasks give and training takes."""

from klformer.lab.data.batching import Batch, BucketSampler, PaddingReport, collate, padding_report
from klformer.lab.data.sequences import Examples, Sequences
from klformer.models import InputShape

__all__ = [
    "Batch",
    "BucketSampler",
    "Examples",
    "InputShape",
    "PaddingReport",
    "Sequences",
    "collate",
    "padding_report",
]
