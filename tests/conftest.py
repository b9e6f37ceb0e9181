"""What every test starts from: a fixed seed, and uninitialised memory full of NaN."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible():
    # In deterministic mode torch fills what `empty` returns with NaN: reading it before writing can't go unnoticed.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
