"""What every test starts from, a fixed seed and uninitialised memory full of NaN, and a folder to work in."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it; tables would be cut to 80 columns
    # In deterministic mode torch fills what `empty` returns with NaN: reading it before writing can't go unnoticed.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_runtest_setup(item):
    """Tests of the library run where only its own packages are installed; what needs others says which."""
    for marker in item.iter_markers("needs"):
        for package in marker.args:
            pytest.importorskip(package, exc_type=ImportError, reason=f"needs {package}")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder to work in, with the data beside it."""
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_tasks(monkeypatch):
    """Registers tasks for one test."""
    from klformer.lab.tasks import TASKS, register_task  # tests of the library run without the laboratory's packages

    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))

    def register(*tasks):
        for task in tasks:
            register_task(task)

    return register
