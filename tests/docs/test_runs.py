"""What is kept of runs (research/runs) is what the tables are made of, and a report can be made of it."""

import tarfile
from pathlib import Path

import pytest

from klformer.files import read_json
from klformer.lab.analysis.evidence.command import EvidenceAnalysis, run
from klformer.lab.report.collect import collect
from research.evidence.keep import rounded

EVIDENCE = Path(__file__).parents[2] / "research"
ARCHIVES = sorted((EVIDENCE / "runs").glob("*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.name)
def archive(request):
    return request.param


@pytest.fixture
def runs(archive, tmp_path):
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "runs", filter="data")
    return tmp_path / "runs"


def test_rows_of_the_data_are_those_of_the_runs(archive, runs, tmp_path):
    run(EvidenceAnalysis(runs=(runs,), out=tmp_path / "analysis"))
    rows = [rounded(row) for row in read_json(tmp_path / "analysis" / "runs.json")["rows"]]
    kept = read_json(EVIDENCE / "data" / archive.name.replace(".tar.xz", ".json"))["rows"]
    assert rows
    assert [row for row in rows if row not in kept] == []


def test_a_report_reads_them_all(runs):
    found = collect([runs])
    assert len(found.runs) == len(list(runs.iterdir()))
    assert not found.damaged
    assert not found.left_out
