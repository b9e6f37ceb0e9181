"""Image: CIFAR-10 in all its forms gives the same pixels, and a pickle runs nothing."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as Picture
from user_support import plain_user

from klformer.errors import DataError
from klformer.lab.tasks import DataConfig, Image
from klformer.lab.tasks.image import read_python_batch, to_grey

PER_BATCH = 10


@pytest.fixture
def images():
    """(60, 32, 32, 3) and labels: five batches of train and one of test, with all classes in each."""
    generator = np.random.default_rng(0)
    rgb = generator.integers(0, 256, (6 * PER_BATCH, 32, 32, 3), dtype=np.uint8)
    return rgb, np.concatenate([generator.permutation(10) for _ in range(6)])


def batches(images):
    rgb, labels = images
    planes = rgb.transpose(0, 3, 1, 2).reshape(-1, 3072)
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(index * PER_BATCH, (index + 1) * PER_BATCH)
        yield name, planes[rows], labels[rows]


def write_python(root, images, protocol=2):
    (root / "cifar-10-batches-py").mkdir()
    for name, planes, labels in batches(images):
        batch = {b"data": planes, b"labels": labels.tolist(), b"batch_label": b"x", b"filenames": [b"a.png"]}
        (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, protocol))


def write_binary(root, images):
    (root / "cifar-10-batches-bin").mkdir()
    for name, planes, labels in batches(images):
        rows = np.concatenate([labels[:, None].astype(np.uint8), planes], 1)
        rows.tofile(root / "cifar-10-batches-bin" / f"{name}.bin")


def write_arrays(root, images):
    (root / "cifar10_gray").mkdir()
    rgb, labels = images
    for part, rows in (("train", slice(0, 50)), ("test", slice(50, 60))):
        np.save(root / "cifar10_gray" / f"{part}_x.npy", to_grey(rgb[rows]))
        np.save(root / "cifar10_gray" / f"{part}_y.npy", labels[rows].astype(np.uint8))


def write_pngs(root, images):
    rgb, labels = images
    for index, (pixels, label) in enumerate(zip(rgb, labels, strict=True)):
        folder = root / ("train" if index < 50 else "test") / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Picture.fromarray(pixels).save(folder / f"{index:02}.png")


WRITERS = {"python": write_python, "binary": write_binary, "arrays": write_arrays, "pngs": write_pngs}


def rows_of(examples):
    return sorted((pixels.tolist(), int(label)) for pixels, label in zip(examples.first, examples.targets, strict=True))


def task(root, **config):
    return Image(DataConfig(root=root, **config))


@pytest.mark.parametrize("form", WRITERS)
def test_all_forms_give_the_same(tmp_path, images, form):
    WRITERS[form](tmp_path, images)
    rgb, labels = images
    grey = to_grey(rgb).reshape(60, 1024)
    expected = sorted((pixels.tolist(), int(label)) for pixels, label in zip(grey[50:], labels[50:], strict=True))
    assert rows_of(task(tmp_path).load("test")) == expected
    train, validation = task(tmp_path).load("train"), task(tmp_path).load("validation")
    assert (len(train), len(validation)) == (45, 5)
    both = sorted((pixels.tolist(), int(label)) for pixels, label in zip(grey[:50], labels[:50], strict=True))
    assert sorted(rows_of(train) + rows_of(validation)) == both
    assert train.lengths.tolist() == [1024] * 45


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickle_protocols(tmp_path, images, protocol):
    write_python(tmp_path, images, protocol)
    assert len(task(tmp_path).load("test")) == 10


def test_the_folder_of_batches_may_be_the_root(tmp_path, images):
    write_binary(tmp_path, images)
    assert len(task(tmp_path / "cifar-10-batches-bin").load("test")) == 10


def test_grey():
    weights = np.array([0.2989, 0.5870, 0.1140])
    rgb = np.random.default_rng(0).integers(0, 256, (1000, 3), dtype=np.uint8)
    assert np.abs(to_grey(rgb) - rgb @ weights).max() <= 1
    levels = np.arange(256, dtype=np.uint8)
    assert (to_grey(np.stack([levels] * 3, -1)) == levels).all(), "grey stays as it is"


def test_validation_is_a_tenth_of_train_under_lra(tmp_path, images):
    write_binary(tmp_path, images)
    assert len(task(tmp_path, protocol="lra", holdout_fraction=0.5).load("validation")) == 5
    assert len(task(tmp_path, protocol="holdout", holdout_fraction=0.5).load("validation")) == 25
    assert "10% of the training set (protocol lra)" in task(tmp_path, protocol="lra").describe_protocol()


def test_cuts_at_max_len(tmp_path, images):
    write_binary(tmp_path, images)
    assert task(tmp_path, max_len=37).load("test").lengths.tolist() == [37] * 10


class Exploit:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_pickle_runs_nothing(tmp_path, capsys):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": Exploit(), b"labels": []}, 2))
    with pytest.raises(
        DataError, match=r"batch: is not a python batch .*__builtin__.print, which no batch of CIFAR-10"
    ):
        read_python_batch(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]}, r"must hold bytes \(uint8\)"),
        ({b"labels": [0, 1]}, "KeyError"),
        ([1, 2], "TypeError"),
        ({b"data": "text", b"labels": [0]}, "AttributeError"),
    ],
)
def test_other_pickles(tmp_path, batch, problem):
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(DataError, match=f"is not a python batch of CIFAR-10: .*{problem}"):
        read_python_batch(tmp_path / "batch")


def test_damaged_python_batches(tmp_path, images):
    write_python(tmp_path, images)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    with pytest.raises(DataError, match="test_batch: is not a python batch of CIFAR-10"):
        task(tmp_path).load("test")
    path.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]}, 2))
    with pytest.raises(DataError, match="test_batch: image 1 has the label 10"):
        task(tmp_path).load("test")
    path.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, 2))
    with pytest.raises(DataError, match=r"a label and 3072 bytes for every image, got data of shape \(2, 3072\) and 1"):
        task(tmp_path).load("test")
    path.unlink()
    with pytest.raises(DataError, match="test_batch: the file is missing"):
        task(tmp_path).load("test")


def test_damaged_binary_batches(tmp_path, images):
    write_binary(tmp_path, images)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: has 30729 bytes, which is no multiple of 3073"):
        task(tmp_path).load("train")
    path.write_bytes(whole[:-3073])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: has 9 images where the first batch has 10"):
        task(tmp_path).load("train")
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: image 0 has the label .*10"):
        task(tmp_path).load("train")
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_3\.bin: has 0 bytes"):
        task(tmp_path).load("train")
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin: the file is missing"):
        task(tmp_path).load("train")


def test_damaged_arrays(tmp_path, images):
    write_arrays(tmp_path, images)
    path = tmp_path / "cifar10_gray" / "test_x.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"test_x\.npy: is not a whole numpy array"):
        task(tmp_path).load("test")
    np.save(path, np.zeros((3, 32, 32), np.uint8))
    with pytest.raises(
        DataError, match=r"must be uint8 \(N, 32, 32\) with N labels, got uint8 \(3, 32, 32\) and \(10,\)"
    ):
        task(tmp_path).load("test")
    np.save(path, np.zeros((0, 32, 32), np.uint8))
    np.save(path.with_name("test_y.npy"), np.zeros(0, np.uint8))
    with pytest.raises(DataError, match=r"test_x\.npy: has no images"):
        task(tmp_path).load("test")


def test_damaged_folders(tmp_path, images):
    write_pngs(tmp_path, images)
    folder = tmp_path / "test" / "class4"
    (path,) = folder.iterdir()
    Picture.new("L", (31, 32)).save(path)
    with pytest.raises(DataError, match=r"\.png: must be 32 x 32 pixels, got 31 x 32"):
        task(tmp_path).load("test")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"\.png: is not a whole png image"):
        task(tmp_path).load("test")
    path.unlink()
    with pytest.raises(DataError, match=r"class4: has no images"):
        task(tmp_path).load("test")
    folder.rmdir()
    with pytest.raises(DataError, match=r"test: must hold 10 folders, one a class, got 9"):
        task(tmp_path).load("test")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_classes_have_the_same_names_in_both_parts(tmp_path, images, split):
    write_pngs(tmp_path, images)
    (tmp_path / "test" / "class4").rename(tmp_path / "test" / "bird")
    with pytest.raises(
        DataError, match=r"test: must hold folders of the same names as train; missing: class4; extra: bird$"
    ):
        task(tmp_path).load(split)


def test_folders_that_can_not_be_read(tmp_path, monkeypatch, images):
    write_pngs(tmp_path, images)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    locked = tmp_path / "train" / "class0"
    locked.chmod(0)
    with plain_user(), pytest.raises(DataError, match=r"^train/class0: can't be read: Permission denied"):
        task(Path()).load("train")
    locked.chmod(0o755)


def test_the_hub_comes_last(tmp_path, monkeypatch, images):
    rgb, labels = images
    rows = {"img": [Picture.fromarray(pixels) for pixels in rgb], "label": labels.tolist()}
    hub = SimpleNamespace(load_dataset=lambda name, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path))
    examples = task(None).load("test")
    assert (examples.first.values.reshape(60, 1024) == to_grey(rgb).reshape(60, 1024)).all()
    assert "hub" in task(None).location()
    with pytest.raises(DataError, match=r"has none of cifar-10-batches-py.*; --data\.root must be the folder"):
        task(tmp_path).load("test")


def test_without_a_hub_the_error_says_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=r"cifar-10-batches-py, cifar-10-batches-bin, .* did not give 'uoft-cs/cifar10'"
    ):
        task(None).load("test")
