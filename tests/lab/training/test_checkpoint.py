"""Checkpoints are whole or not there."""

import json

import pytest
import torch
from disk_support import files_up_to, small_disk

from klformer.errors import FileError
from klformer.lab.training.checkpoint import (
    MANIFEST,
    OPTIMISER,
    WEIGHTS,
    CheckpointStore,
    load_optimiser_tensors,
    optimiser_tensors,
)


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    return CheckpointStore(tmp_path / "checkpoints", said.append)


def save(store, step, value=None, kind="step"):
    tensors = {WEIGHTS: {"x": torch.full((3,), float(step if value is None else value))}, OPTIMISER: {}}
    return store.save(kind, step, tensors, {"note": step})


def test_round_trip(store):
    save(store, 5)
    newest = store.newest("step")
    assert newest.step == 5
    assert newest.info == {"note": 5}
    assert torch.equal(newest.weights()["x"], torch.full((3,), 5.0))
    assert store.newest("best") is None


def test_newest_and_pruning(store):
    for step in (2, 30, 400):
        save(store, step)
    save(store, 1, kind="best")
    (store.folder / ".step-00000500.1.tmp").mkdir()
    store.prune("step", 2, up_to=400)
    assert sorted(p.name for p in store.folder.iterdir()) == ["best-00000001", "step-00000030", "step-00000400"]
    assert store.newest("step").step == 400
    assert store.newest("step", up_to=399).step == 30


def test_what_is_newer_than_the_step_is_not_counted(store, said):
    for step in (1, 2, 3, 40, 50):
        save(store, step)
    store.prune("step", 2, up_to=3)
    assert sorted(p.name[-2:] for p in store.folder.iterdir()) == ["02", "03", "40", "50"]
    store.remove_after("step", 3)
    assert sorted(p.name[-2:] for p in store.folder.iterdir()) == ["02", "03"]
    assert said == [f"removed {store.folder}/step-000000{step}, the run goes on from step 3" for step in (40, 50)]


def edit_manifest(folder, **changes):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / WEIGHTS).write_bytes(b"short"), "weights.safetensors does not match its checksum"),
        (lambda folder: (folder / WEIGHTS).unlink(), "weights.safetensors is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json is not readable"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json does not match its checksum"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), "manifest.json is not readable"),
        (lambda folder: edit_manifest(folder, step=7), "manifest.json does not match its checksum"),
        (lambda folder: edit_manifest(folder, files={}), "manifest.json does not match its checksum"),
        (lambda folder: edit_manifest(folder, info={}), "manifest.json does not match its checksum"),
        (lambda folder: edit_manifest(folder, sha256=None), "manifest.json does not match its checksum"),
        (lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()), "Is a directory"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(store, said, damage, message):
    save(store, 1)
    damage(save(store, 2))
    assert store.newest("step").step == 1
    assert len(said) == 1
    assert message in said[0]
    assert "step-00000002" in said[0]


def test_what_others_put_there_is_left_alone(store):
    kept = save(store, 1)
    (store.folder / "step-notes.txt").write_text("mine")
    (store.folder / "step-00000006-keep").mkdir()
    (store.folder / "step-00000007").write_text("a file")
    assert store.newest("step").folder == kept
    store.remove_after("step", 0)
    store.prune("step", 1, up_to=9)
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "step-00000006-keep",
        "step-00000007",
        "step-notes.txt",
    ]


def test_one_flipped_bit_is_seen(store):
    path = save(store, 1) / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert store.newest("step") is None


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(tmp_path, said):
    with small_disk(tmp_path, 64 * 1024):
        store = CheckpointStore(tmp_path / "checkpoints", said.append)
        save(store, 1)
        with pytest.raises(FileError, match=r"the disk is full\. The last good checkpoint is .*step-00000001"):
            store.save("step", 2, {WEIGHTS: {"x": torch.zeros(30_000)}}, {})
        assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("limit", [100, 300])
def test_a_file_that_can_not_grow_is_like_a_full_disk(store, limit):
    """The weights do not fit, or they do and the manifest does not."""
    save(store, 1)
    with files_up_to(limit), pytest.raises(FileError, match=r"can't write .*step-00000002: .*File too large"):
        store.save("step", 2, {WEIGHTS: {"x": torch.zeros(30)}}, {"note": "x" * 300})
    assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]


def test_an_unwritable_folder(tmp_path, said):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"can't write .*step-00000001: .* There is no earlier checkpoint"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints", said.append), 1)


def test_the_optimiser_comes_back_bit_for_bit(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model[0].bias.requires_grad_(False)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(parameters, lr=0.1)

    def steps(model, optimiser, count):
        for _ in range(count):
            model(torch.ones(1, 3)).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()

    straight, optimiser = make()
    steps(straight, optimiser, 6)
    first, optimiser = make()
    steps(first, optimiser, 3)
    weights, state = first.state_dict(), optimiser_tensors(first, optimiser)
    second, optimiser = make()
    second.load_state_dict(weights)
    load_optimiser_tensors(second, optimiser, state)
    steps(second, optimiser, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


def test_the_manifest_is_readable_by_people(store):
    manifest = json.loads((save(store, 7) / MANIFEST).read_text())
    assert manifest["step"] == 7
    assert len(manifest["files"][WEIGHTS]) == 64
