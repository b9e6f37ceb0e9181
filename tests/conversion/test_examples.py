"""The examples run as they stand: each says what it takes, and a little of it works where its data is at hand."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "conversion"
DATA = Path(__file__).parents[3] / "shared" / "data"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unpacked(path, *names):
    archives = [DATA / f"{name}.tar.xz" for name in names]
    if not all(archive.exists() for archive in archives):
        pytest.skip("the data is not in ../shared/data")
    for archive in archives:
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters.
            tar.extractall(path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return path


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_says_what_it_takes(name):
    assert "DATA holds" in run(name, "--help")


@pytest.mark.slow
def test_reactions(tmp_path):
    data = unpacked(tmp_path, "rxnfp_bert_fp16", "uspto50k_rxn")
    small = ["--held-out", 12, "--tested", 24]
    said = run("reactions.py", data, "--steps", 1, *small, "--out", tmp_path / "linear")
    row = json.loads(said.splitlines()[-1])
    assert row["teacher"] > 0.85
    assert 0.4 < row["test"] < row["teacher"]
    assert (tmp_path / "linear" / "config.json").exists()


@pytest.mark.slow
def test_sentences(tmp_path):
    data = unpacked(tmp_path, "glue_data", "bert-base-uncased-vocab")
    said = run("sentences.py", data, "--train-steps", 10, "--steps", 2, "--frequencies", 16)
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [row["attention"] for row in rows] == ["softmax", "performer", "performer", "hedgehog", "atoms-prf"]
    assert all(row["rank_correlation"] > 0.2 for row in rows)
