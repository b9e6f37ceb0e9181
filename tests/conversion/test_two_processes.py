"""A converted model in two processes (DDP) trains as it does in one."""

import os
import subprocess
import sys

import pytest
import torch
from conversion_support import FAMILIES, batch, batches
from torch.testing import assert_close

import klformer

#: Each process takes half of a batch; what is left is written by the first.
HALF_EACH = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import klformer

folder = sys.argv[1]
dist.init_process_group("gloo")
model = DistributedDataParallel(klformer.load_converted(folder))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
given = torch.load(folder + "/batch.pt", weights_only=True)
rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
for _ in range(3):
    optimiser.zero_grad()
    model(**{name: value[rows] for name, value in given.items()}).logits.square().mean().backward()
    optimiser.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), folder + "/trained.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    torch.manual_seed(0)
    teacher = FAMILIES["bert"]()
    klformer.convert(teacher, batches("bert"), options={"num_frequencies": 8}, steps=1).save(tmp_path)
    given = batch("bert", rows=4)
    torch.save(given, tmp_path / "batch.pt")
    (tmp_path / "train.py").write_text(HALF_EACH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "train.py"), str(tmp_path)], check=True, env=environment, timeout=300)
    model = klformer.load_converted(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        model(**given).logits.square().mean().backward()
        optimiser.step()
    trained = torch.load(tmp_path / "trained.pt", weights_only=True)
    assert_close(trained, model.state_dict(), rtol=1e-4, atol=1e-5)
    kernels = [name for name in before if ".klformer." in name]
    assert kernels
    assert all(not torch.equal(trained[name], before[name]) for name in kernels)
