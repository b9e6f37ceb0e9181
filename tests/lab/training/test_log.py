"""The record of a run: what is written, what a resumed run drops, and what happens when it can't be written."""

import pytest
from disk_support import files_up_to
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from klformer.errors import FileError
from klformer.lab.training.log import MetricsLog, read_lines


def write(folder, *, after, steps):
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", step=after)
    for step in steps:
        log.write("train", step, {"loss": 1.0 / step, "note": "not a number"})
    log.close()


def test_a_resumed_run_has_every_step_once(tmp_path):
    write(tmp_path, after=0, steps=[1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write(tmp_path, after=2, steps=[3, 4])
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(("limit", "file"), [(150, "events.out.tfevents"), (0, r"metrics\.jsonl")])
def test_a_record_that_can_not_be_written_is_named(tmp_path, limit, file):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", step=0)
    with files_up_to(limit), pytest.raises(FileError, match=f"can't write {tmp_path}.*{file}.*: File too large"):
        log.write("train", 1, dict.fromkeys("abcde", 0))
    log.close()


def test_no_record_can_be_opened(tmp_path):
    (tmp_path / "tensorboard").write_text("not a folder")
    with pytest.raises(FileError, match=r"can't write .*/tensorboard"):
        MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", step=0)
