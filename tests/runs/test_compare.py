"""Comparisons see what is impossible before the first run, and train side by side; the rest is typed in tests/cli."""

import multiprocessing
import signal

import pytest
from run_support import Listener, assert_same_state, final_state, tiny

import klformer
from klformer.errors import Interrupted, RunError
from klformer.models import AttentionSpec
from klformer.runs.compare import check_model, compare
from klformer.runs.naming import run_name
from klformer.runs.presets import preset
from klformer.training.progress import SilentReporter


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_model_can_be_checked_without_its_memory(name):
    check_model(preset("paper", "listops", AttentionSpec(name=name)))


def test_an_impossible_model_is_named():
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        check_model(preset("paper", "listops", AttentionSpec.parse("gmm-rks:num_frequencies=7")))


def two_runs(tmp_path, **training):
    return [tiny(tmp_path, attention, **training) for attention in ("gmm-rks:num_frequencies=8", "linear-elu")]


class Interrupting(Listener):
    """Sends SIGTERM to this process at the first validation."""

    def say(self, message):
        super().say(message)
        if message.startswith("step 25: validation") and sum("validation" in said for said in self.said) == 1:
            signal.raise_signal(signal.SIGTERM)


def test_runs_side_by_side_stop_together_go_on_and_are_the_runs_one_after_the_other(tmp_path):
    configs, out = (
        two_runs(tmp_path, max_steps=100, evaluate_every=25, checkpoint_every=25, log_every=25),
        tmp_path / "out",
    )
    listener, labels = Interrupting(), []

    def labelled(label):
        labels.append(label)
        return listener

    with pytest.raises(Interrupted, match="SIGTERM: 0 of 2 runs are done, the others are saved"):
        compare(configs, out, reporter=listener, jobs=2, labelled=labelled)
    assert labels == ["[1/2]", "[2/2]"]
    assert sum("stopped after step" in said or "ended before" in said for said in listener.said) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not multiprocessing.active_children()
    results = compare(configs, out, reporter=SilentReporter(), jobs=2)
    straight = compare(configs, tmp_path / "straight", reporter=SilentReporter())
    for config, side_by_side, alone in zip(configs, results, straight, strict=True):
        assert side_by_side["test"] == alone["test"]
        name = run_name(config)
        assert_same_state(final_state(out / name), final_state(tmp_path / "straight" / name))
    assert compare(configs, out, reporter=listener, jobs=2) == results
    assert listener.said[-1] == "2 of 2 runs are done already"


def test_a_run_that_fails_is_named_and_the_others_are_saved(tmp_path):
    configs = two_runs(tmp_path, max_steps=100_000)
    (tmp_path / run_name(configs[1])).write_text("in the way")
    with pytest.raises(RunError, match=r"linear-elu-seed0: can't write to"):
        compare(configs, tmp_path, reporter=SilentReporter(), jobs=2)
    assert not multiprocessing.active_children()
