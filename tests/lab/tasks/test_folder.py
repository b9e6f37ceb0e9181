"""Somebody's own images: of any size and kind, as patches or pixels, from training to predictions."""

import csv

import numpy as np
import pytest
from cli_support import fails, run
from PIL import Image

from klformer.errors import ArgumentError, DataError
from klformer.lab.tasks import build_task
from klformer.lab.tasks.folder import FolderData, read_image

SMALL = [
    *["--model.num-layers=1", "--model.num-heads=2", "--model.model-dim=8", "--model.head-dim=4", "--model.ffn-dim=8"],
    *["--training.max-steps=4", "--training.evaluate-every=2", "--training.evaluation-draws=2", "--data.size=8"],
]


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    for number in range(24):
        name = ("cat", "dog", "eel")[number % 3]
        pixels = generator.integers(0, 256, (generator.integers(5, 20), generator.integers(5, 20), 3), np.uint8)
        path = tmp_path / "pets" / name / f"{number}.{('png', 'jpg', 'JPEG')[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "pets"


def folder(root, **config):
    return build_task("folder", FolderData(root=root, **{"size": 8, **config}), quiet=True)


def test_patches_and_pixels_of_one_picture_agree(tmp_path):
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    patches = folder(tmp_path, patch=4, colour=True)
    assert (patches.shape().input_dim, patches.shape().max_len) == (48, 4)
    first = patches.load("test").first[0]
    back = np.round((np.asarray(first, np.float64) + 1) * 127.5)
    assert back[1].tolist() == pixels[:4, 4:].reshape(-1).tolist(), "the second patch is to the right of the first"
    assert back[2].tolist() == pixels[4:, :4].reshape(-1).tolist()
    tokens = folder(tmp_path, patch=1)
    assert tokens.shape().vocab_size == 256
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    assert tokens.load("test").first[0].tolist() == grey.reshape(-1).tolist()
    assert folder(tmp_path, patch=1, colour=True).shape().input_dim == 3


def test_one_set_is_split_and_sets_of_their_own_are_kept(images, tmp_path):
    task = folder(images)
    assert [len(task.load(split)) for split in ("train", "validation", "test")] == [20, 2, 2]
    assert (task.class_names(), task.detail()) == (("cat", "dog", "eel"), "pets")
    (tmp_path / "sets").mkdir()
    images.rename(tmp_path / "sets" / "train")
    one = next((tmp_path / "sets" / "train" / "dog").iterdir())
    (tmp_path / "sets" / "test" / "dog").mkdir(parents=True)
    one.rename(tmp_path / "sets" / "test" / "dog" / one.name)
    task = folder(tmp_path / "sets")
    assert (task.validation_source(), task.test_source()) == ("train", "file")
    assert task.load("test").targets.tolist() == [1]


def test_kinds_of_images(tmp_path):
    deep = (np.arange(64).reshape(8, 8) * 1000).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert (read_image(tmp_path / "deep.png", 8, colour=False) == deep >> 8).all()
    Image.new("P", (3, 9)).save(tmp_path / "palette.png")
    assert read_image(tmp_path / "palette.png", 8, colour=True).shape == (8, 8, 3)
    Image.new("LA", (9, 3)).save(tmp_path / "alpha.png")
    assert read_image(tmp_path / "alpha.png", 8, colour=False).shape == (8, 8)


def test_what_is_wrong_is_said(images, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: has none of CLASS/\*\.\{png,jpg,jpeg\}"):
        folder(tmp_path / "empty").load("train")
    Image.new("L", (3, 3)).save(images / "x.png")
    with pytest.raises(DataError, match="must have two folders of images or more, one a class, got pets"):
        folder(tmp_path).load("train")
    next((images / "cat").iterdir()).write_bytes(b"\x89PNG torn")
    with pytest.raises(DataError, match=r"cat/\d+\.\w+: is not a whole png or jpg image"):
        folder(images).load("train")
    with pytest.raises(ArgumentError, match=r"data\.size must be a multiple of data\.patch=5, got 8"):
        FolderData(size=8, patch=5)


def test_images_train_and_predict(images, tmp_path, capsys):
    options = ["--task=folder", f"--data.root={images}", "--attention=gmm-prf:num_frequencies=8", f"--out={tmp_path}"]
    run(capsys, "train", *options, "--name=run", *SMALL)
    out = tmp_path / "p.csv"
    assert "24 predictions" in run(capsys, "predict", tmp_path / "run", images, "--out", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["prediction"] for row in rows} <= {"cat", "dog", "eel"}
    assert sorted(row["file"] for row in rows) == sorted(str(path) for path in images.rglob("*.*"))
    one = next((images / "cat").iterdir())
    run(capsys, "predict", tmp_path / "run", one, "--out", out)
    assert len(out.read_text().splitlines()) == 2
    assert "have no columns to keep" in fails(capsys, 2, "predict", tmp_path / "run", one, "--out", out, "--keep", "id")
