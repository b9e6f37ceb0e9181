"""Two processes that train together, and what happens to one or to the network between them; results as JSON.

    python tests/distributed_faults.py FOLDER SCENARIO ...

With network namespaces the two are on two "hosts", with a cable between them.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # what every run imports when it needs it is imported once, here
import torch.utils.tensorboard
from fork_support import forked, free_port
from run_support import tiny

from klformer.lab.cli.main import main as klformer_main
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.train import train_run
from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.progress import SilentReporter
from klformer.lab.training.trainer import Trainer

PATIENCE = 4.0
HOSTS = ("klformer-test-0", "klformer-test-1")
CABLE = ("kltest0", "kltest1")
CLONE_NEWNET = 0x40000000


def call(*command):
    subprocess.run(command, check=True, capture_output=True)


def lay_cable():
    for host in HOSTS:
        call("ip", "netns", "add", host)
    call("ip", "link", "add", CABLE[0], "netns", HOSTS[0], "type", "veth", "peer", "name", CABLE[1], "netns", HOSTS[1])
    for number, (host, end) in enumerate(zip(HOSTS, CABLE, strict=True)):
        call("ip", "-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", end)
        call("ip", "-n", host, "link", "set", end, "up")
        call("ip", "-n", host, "link", "set", "lo", "up")


def remove_cable():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def move_to(host):
    """This process is on another host from here on, as far as the network is concerned."""
    with open(f"/var/run/netns/{host}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def experiment(folder, steps):
    base = tiny(folder, "gmm-prf:num_frequencies=8", max_steps=steps, checkpoint_every=5).model_dump()
    base["model"] |= {"dropout": 0.0, "pooling": "mean"}
    base["training"] |= {"evaluate_every": 100_000, "evaluation_draws": 1}
    base["parallel"] = {"sequence": 2, "patience": PATIENCE}
    return ExperimentConfig.model_validate(base)


def start(folder, *, hosts, steps, boom_at=None):
    """Two processes that share sequences; what they say goes to files."""
    port = free_port()

    def work(rank):
        torch.set_num_threads(1)
        os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "10.77.0.1" if hosts else "127.0.0.1", "MASTER_PORT": str(port)}
        if hosts:
            os.environ["GLOO_SOCKET_IFNAME"] = CABLE[rank]
            move_to(HOSTS[rank])
        if boom_at is not None and rank == 1:
            one_step = Trainer._one_step

            def failing(self, step, indices):
                if step == boom_at:
                    raise ValueError("this rank has found something odd")
                return one_step(self, step, indices)

            Trainer._one_step = failing
        as_command(experiment(folder, steps), folder / "run")

    return forked(work, 2)


def as_command(config, folder):
    """Train as `klformer train` does, with its words for errors."""
    from klformer.lab.cli import train as command

    command.COMMAND = type(command.COMMAND)(
        lambda arguments, prog: None,
        lambda _: train_run(config, folder, resume=folder.exists(), reporter=SilentReporter()) and None,
    )
    klformer_main(["train"])


def wait_for_step(folder, step):
    store = CheckpointStore(folder / "run" / "checkpoints", lambda _: None)
    last = time.monotonic() + 120
    while time.monotonic() < last:
        newest = store.newest("step")
        if newest is not None and newest.step >= step:
            return
        time.sleep(0.1)
    raise AssertionError("training has not begun")


def collect(folder, children, since):
    """Codes, words, and the seconds until the last has ended."""
    codes = []
    for child in children:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    seconds = time.monotonic() - since
    return {"codes": codes, "seconds": seconds, "said": [(folder / f"{rank}.txt").read_text() for rank in range(2)]}


def killed(folder):
    children = start(folder, hosts=False, steps=100_000)
    wait_for_step(folder, 5)
    since = time.monotonic()
    os.kill(children[1], signal.SIGKILL)
    found = collect(folder, children, since)
    # One process goes on from what two have saved.
    store = CheckpointStore(folder / "run" / "checkpoints", lambda _: None)
    done = store.newest("step").step
    config = experiment(folder, done + 3)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sequence": 1})})
    child = forked(lambda _: train_run(config, folder / "run", resume=True, reporter=SilentReporter()), 1)[0]
    found["resumed"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found["steps"] = [done, RunFolder(folder / "run").result()["steps"]]
    return found


def failed(folder):
    children = start(folder, hosts=False, steps=100_000, boom_at=4)
    return collect(folder, children, time.monotonic())


def cut(folder):
    children = start(folder, hosts=True, steps=100_000)
    wait_for_step(folder, 5)
    since = time.monotonic()
    call("ip", "-n", HOSTS[0], "link", "set", CABLE[0], "down")
    return collect(folder, children, since)


def slow(folder):
    for host, end in zip(HOSTS, CABLE, strict=True):
        command = ["tc", "-n", host, "qdisc", "add", "dev", end, "root", "tbf", "rate", "3mbit", "burst", "16kbit"]
        call(*command, "latency", "400ms")
    since = time.monotonic()
    found = collect(folder, start(folder, hosts=True, steps=8), since)
    return found | {"steps": RunFolder(folder / "run").result()["steps"]}


SCENARIOS = {"killed": killed, "failed": failed, "cut": cut, "slow": slow}
ON_HOSTS = ("cut", "slow")


def main():
    folder, *scenarios = Path(sys.argv[1]), *sys.argv[2:]
    for scenario in scenarios:
        (place := folder / scenario).mkdir()
        if scenario in ON_HOSTS:
            remove_cable()
            lay_cable()
        try:
            (place / "found.json").write_text(json.dumps(SCENARIOS[scenario](place)))
        finally:
            if scenario in ON_HOSTS:
                remove_cable()


if __name__ == "__main__":
    main()
