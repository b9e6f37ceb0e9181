"""A module outside of the package brings a spectrum, an attention, a task and an analysis, and all work with them."""

import json
import subprocess
import sys

import pytest
from cli_support import fails
from support import TINY_MODEL

PLUGIN = '''
"""Frequencies in a learned box, attention that averages, and sums of integers modulo 5."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import klformer
from klformer.lab.cli.analyze import ANALYSES
from klformer.lab.data import Examples, Sequences


class BoxSpectrum(klformer.SpectralDistribution):
    """Frequencies uniform in a box whose sides are learned."""

    def __init__(self, *, num_heads, head_dim, num_frequencies=16, side=1.0):
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        self.sides = nn.Parameter(torch.full((num_heads, 1, head_dim), side))
        self.register_buffer("noise", torch.empty(num_frequencies, head_dim))
        self.resample()

    @torch.no_grad()
    def resample(self, generator=None):
        self.noise.copy_(torch.rand(self.noise.shape, generator=generator) * 2 - 1)

    def frequencies(self):
        return self.noise * self.sides


class AverageAttention(klformer.AttentionMechanism):
    """Every key counts the same."""

    supports_decoding = False
    uses_queries = uses_keys = False

    def attend(self, q, k, v, *, key_mask, causal):
        kept = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        weights = torch.ones(q.shape[2], v.shape[2], dtype=torch.bool)
        visible = (weights.tril() if causal else weights) & kept[:, None, None]
        v = v.masked_fill(~kept[:, None, :, None], 0)
        return visible.to(v.dtype) @ v / visible.sum(-1, keepdim=True).clamp(min=1).to(v.dtype)


class Modulo(klformer.Task):
    """The sum of three integers modulo 5."""

    name, title, summary = "modulo", "Modulo 5", "sum of integers modulo 5"
    num_classes, vocab_size, default_max_len, chance = 5, 10, 3, 0.2

    def read(self, part):
        size = {"train": 200, "validation": 40, "test": 60}[part]
        numbers = np.random.default_rng(size).integers(0, 10, (size, self.max_len))
        return Examples(Sequences.from_matrix(numbers), numbers.sum(1) % 5)

    def validation_source(self):
        return "file"


klformer.register_spectrum("box", BoxSpectrum)
klformer.register_attention("average", AverageAttention, "the mean of all values")
klformer.register_task(Modulo)


@dataclass(frozen=True)
class Counting:
    """Count up."""

    number: int = 3


def run(options: Counting) -> None:
    print("counted", *range(options.number))


ANALYSES.add("counting", __name__)
'''


@pytest.fixture
def plugin(home, monkeypatch):
    """The folder that the module is in; commands are run there, each in a process of its own."""
    (home / "my_plugin.py").write_text(PLUGIN)
    monkeypatch.delenv("KLFORMER_PLUGINS", raising=False)
    return home


def klformer(folder, *arguments):
    command = [sys.executable, "-m", "klformer", "--plugin", "my_plugin", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_what_a_plugin_registers_can_be_listed_trained_evaluated_drawn_and_reported(plugin):
    listed = klformer(plugin, "list")
    assert all(name in listed for name in ("box-rks", "box-prf", "average", "modulo", "side=1.0"))
    for attention in ("box-prf:side=0.5", "average"):
        out = klformer(plugin, "train", "--task", "modulo", "--attention", attention, *TINY_MODEL)
        assert "200 training examples" in out
        assert "test accuracy" in out
    run = plugin / "runs" / "modulo-laptop-box-prf-side=0.5-seed0"
    assert json.loads((run / "config.json").read_text())["attention"]["options"]["side"] == 0.5
    about = json.loads((run / "task.json").read_text())
    assert (about["title"], about["chance"]) == ("Modulo 5", 0.2)
    assert "60 examples" in klformer(plugin, "eval", str(run), "--draws", "2")
    klformer(plugin, "curves", "runs", "--out", "curves.svg")
    assert "average" in (plugin / "curves.svg").read_text()
    klformer(plugin, "report", "runs", "--out", "report.html")
    assert klformer(plugin, "analyze", "counting", "--number", "2") == "counted 0 1\n"
    page = (plugin / "report.html").read_text()
    assert all(words in page for words in ("Modulo 5", "box-prf", "average"))


def test_the_report_does_not_need_the_plugin(plugin):
    klformer(plugin, "train", "--task", "modulo", "--attention", "softmax", *TINY_MODEL, "--quiet")
    command = [sys.executable, "-m", "klformer", "report", "runs", "--out", "report.html"]
    subprocess.run(command, cwd=plugin, capture_output=True, check=True)
    assert "Modulo 5" in (plugin / "report.html").read_text()


def test_without_the_plugin_the_error_says_how_to_give_it(home, capsys):
    error = fails(capsys, 2, "train", "--task", "modulo")
    assert "unknown task 'modulo'" in error
    assert "--plugin MODULE" in error


def test_the_contracts_are_pointed_at_a_plugin_by_one_import(plugin):
    (plugin / "test_mine.py").write_text("import my_plugin\nfrom klformer.testing.contracts import *\n")
    chosen = "(box or average) and not compiles and not test_gradients"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "test_mine.py"]
    done = subprocess.run(command, cwd=plugin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
