"""Whatever becomes of one process, the others end soon, with its name and the reason; a new start goes on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: Seconds that the processes of the script are patient, and a few for the machine that runs tests.
SOON = 4 + 16


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the scenarios come to, by name, and why some could not be."""
    folder, reason = tmp_path_factory.mktemp("faults"), why_no_hosts()
    scenarios = ["killed", "failed", *([] if reason else ["cut", "slow"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "distributed_faults.py"), str(folder), *scenarios]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / name / "found.json").read_text()) for name in scenarios} | {"reason": reason}


def why_no_hosts():
    """Why there can be no network namespaces with a cable between them; None if there can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need ip and tc (iproute2)"
    name = f"klformer-probe-{os.getpid()}"
    for command in (["ip", "netns", "add", name], ["ip", "-n", name, "link", "add", "x", "type", "veth"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            return f"network namespaces are not permitted here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def on_hosts(found, name):
    if found["reason"]:
        pytest.skip(found["reason"])
    return found[name]


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_one_goes_on_alone(found):
    found = found["killed"]
    assert found["codes"] == [1, -9]
    assert found["seconds"] < SOON
    assert "rank 1 on " in found["said"][0]
    assert "has ended without a word: it was killed, or was out of memory" in found["said"][0]
    assert "--resume goes on" in found["said"][0]
    assert found["resumed"] == 0
    assert found["steps"][1] == found["steps"][0] + 3


@pytest.mark.slow
def test_a_process_that_fails_tells_the_other_why(found):
    found = found["failed"]
    assert found["codes"] == [1, 1]
    assert found["seconds"] < SOON
    assert "has failed: ValueError: this rank has found something odd" in found["said"][0]
    assert "rank 1 on " in found["said"][0]


@pytest.mark.slow
def test_a_cut_cable_ends_both(found):
    found = on_hosts(found, "cut")
    assert found["codes"] == [1, 1]
    assert found["seconds"] < SOON
    assert "rank 1 on " in found["said"][0]
    assert "or its network is cut" in found["said"][0]
    assert "where all processes meet, does not answer" in found["said"][1]


@pytest.mark.slow
def test_a_slow_cable_ends_nobody(found):
    found = on_hosts(found, "slow")
    assert found["codes"] == [0, 0], found["said"]
    assert found["steps"] == 8
