"""A sequence in parts is the sequence: four processes check it, once for all tests of this file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_ranks import RANKS, case_names

SCRIPT = Path(__file__).parents[1] / "distributed_ranks.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process says of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", case_names())
def test_in_parts(results, case):
    problems = [found[case] for found in results if found[case]]
    assert not problems, problems[0]
