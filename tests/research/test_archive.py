"""What runs have told is kept without their weights, and read like the runs themselves."""

import sys
import tarfile

import pytest
from run_support import tiny

from klformer.errors import ArgumentError
from klformer.files import read_json
from klformer.lab.analysis.evidence.command import EvidenceAnalysis, run
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.train import train_run
from klformer.lab.training.progress import SilentReporter
from research.evidence.archive import main, pack


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    for seed in (0, 1):
        config = tiny(tmp_path).model_copy(update={"seed": seed})
        train_run(config, folder / f"sparsity-seed{seed}", resume=False, reporter=SilentReporter())
    return folder


def evidence_of(folder, out):
    run(EvidenceAnalysis(runs=(folder,), out=out))
    return read_json(out / "runs.json")["rows"], read_json(out / "runs-curves.json")["rows"]


def test_archives_are_read_like_runs(runs, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "kept" / "sparsity.tar.xz"
    monkeypatch.setattr(sys, "argv", ["archive", str(runs), str(archive)])
    main()
    assert capsys.readouterr().out == f"2 runs, {archive.stat().st_size:,} bytes\n"
    with tarfile.open(archive) as file:
        assert {name.partition("/")[2] for name in file.getnames()} == set(RunFolder.RECORD)
        file.extractall(tmp_path / "again", filter="data")
    assert evidence_of(tmp_path / "again", tmp_path / "a") == evidence_of(runs, tmp_path / "b")
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "again").rglob("*.json*"))


def test_the_same_runs_give_the_same_archive(runs, tmp_path):
    archives = [tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"]
    for archive in archives:
        pack(runs, archive)
        for path in runs.rglob("*.json"):
            path.touch()
    assert archives[0].read_bytes() == archives[1].read_bytes()


def test_only_finished_runs_are_packed(runs, tmp_path):
    unfinished = next(runs.glob("*seed1"))
    (unfinished / RunFolder.RESULT).unlink()
    assert pack(runs, tmp_path / "a.tar.xz") == 1
    (runs / "again").mkdir()
    next(runs.glob("*seed0")).rename(runs / "again" / unfinished.name)
    (unfinished / RunFolder.RESULT).write_text("{}")
    with pytest.raises(ArgumentError, match=f"have the names {unfinished.name}"):
        pack(runs, tmp_path / "b.tar.xz")
    with pytest.raises(ArgumentError, match="no finished run in"):
        pack(tmp_path / "nothing", tmp_path / "b.tar.xz")
    assert not (tmp_path / "b.tar.xz").exists()
