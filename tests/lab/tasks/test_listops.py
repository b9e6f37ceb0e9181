"""ListOps: the reader of LRA's files, and the generated files."""

import json

import pytest

from klformer.errors import DataError
from klformer.lab.tasks import GeneratedData, ListOps
from klformer.lab.tasks.listops import TOKEN_IDS, TOKENS, evaluate, read_listops

HEADER = b"Source\tTarget\r\n"
ROW = b"( ( ( [MAX ( ( ( [MIN 4 ) 7 ) ] ) ) 9 ) ] )\t9\r\n"


@pytest.fixture(autouse=True)
def small_evaluation(monkeypatch):
    monkeypatch.setattr(ListOps, "evaluation_size", 12)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def words(ids):
    return " ".join(TOKENS[i - 1] for i in ids)


def generated(root, **config):
    return ListOps(GeneratedData(root=root, num_examples=30, max_len=60, **config), quiet=True)


def test_tokens():
    assert TOKEN_IDS["0"] == 1
    assert ListOps.vocab_size == max(TOKEN_IDS.values()) + 1 == 16


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_reads_the_format_of_lra(tmp_path, end):
    rows = ROW + b"( ( ( [SM 5 ) 8 ) ] )\t3\r\n"
    examples = read_listops(write(tmp_path / "basic.tsv", (HEADER + rows).replace(b"\r\n", end)), 2000)
    assert [words(ids) for ids in examples.first] == ["[MAX [MIN 4 7 ] 9 ]", "[SM 5 8 ]"]
    assert examples.targets.tolist() == [9, 3]


def test_reads_other_spacing_and_no_parentheses(tmp_path):
    examples = read_listops(write(tmp_path / "basic.tsv", HEADER + b"[MED  1 4 ]\t2\n[MED 1 4 ]\t2\n"), 2000)
    assert [words(ids) for ids in examples.first] == ["[MED 1 4 ]"] * 2


def test_cuts_at_max_len(tmp_path):
    examples = read_listops(write(tmp_path / "basic.tsv", HEADER + ROW), 3)
    assert words(examples.first[0]) == "[MAX [MIN 4"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty; the header must be Source and Target"),
        (HEADER, "has no rows after the header"),
        (b"Target\tSource\r\n" + ROW, "line 1: the header must be Source and Target"),
        (ROW, "line 1: the header must be"),
        (HEADER + ROW + b"( ( [MIN 4 ) 7\n", "line 3: a row must have 2 fields .* between tabs, got 1"),
        (HEADER + ROW + b"\r\n" + ROW, "line 3: a row must have 2 fields .* between tabs, got 1"),
        (HEADER + ROW + b"[MAX [MIN 1 2 ] 4\t4\n", r"line 3: has 2 operators and 1 \], which must be as many"),
        (HEADER + ROW + b"[MIN 1 2 ]\t\n", "line 3: the label must be a whole number from 0 to 9, got ''"),
        (HEADER + b"[MIN 1 2 ]\t10\n", "line 2: the label must be a whole number from 0 to 9, got '10'"),
        (HEADER + ROW + b"[MIN 1 12 ]\t1\n", "line 3: unknown token '12'"),
        (HEADER + b"[SUM 1 2 ]\t1\n", r"line 2: unknown token '\[SUM'"),
        (HEADER + b"[MIN 1 \x80 ]\t1\n", r"line 2: unknown token"),
        (HEADER + b"[MIN 1  ]\xff\t1\n", "line 2: unknown token"),
        (HEADER + b"\t1\n", "line 2: the source is empty"),
        (HEADER + b"( )\t1\n", "line 2: the source is empty"),
    ],
)
def test_malformed_files(tmp_path, content, problem):
    with pytest.raises(DataError, match=rf"basic\.tsv.*{problem}"):
        read_listops(write(tmp_path / "basic.tsv", content), 2000)


@pytest.mark.parametrize("folder", ["lra_release/listops-1000", "listops", "."])
def test_looks_where_the_archive_unpacks(tmp_path, folder):
    for name in ("train", "val", "test"):
        write(tmp_path / folder / f"basic_{name}.tsv", HEADER + ROW * len(name))
    task = ListOps(GeneratedData(root=tmp_path))
    assert "(read)" in task.location()
    assert [len(task.load(split)) for split in ("train", "validation", "test")] == [5, 3, 4]
    assert "validation set of the data" in task.describe_protocol()


def test_a_missing_file_is_not_replaced_by_generation(tmp_path):
    write(tmp_path / "basic_test.tsv", HEADER + ROW)
    with pytest.raises(DataError, match=r"basic_train\.tsv: the file is missing"):
        ListOps(GeneratedData(root=tmp_path)).load("train")


def test_generates_distinct_expressions(tmp_path):
    task = generated(tmp_path)
    assert "will be generated" in task.location()
    splits = [task.load(split) for split in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [30, 12, 12]
    sources = [words(ids) for split in splits for ids in split.first]
    assert len(set(sources)) == 54
    assert [evaluate(source.split()) for source in sources] == [label for split in splits for label in split.targets]
    assert "(generated)" in task.location()


def test_generated_files_are_the_same_for_a_seed(tmp_path):
    def content(folder, **config):
        task = generated(folder, **config)
        task.prepare()
        return [path.read_bytes() for path in sorted(folder.rglob("basic_*.tsv"))]

    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c", seed=1)


def test_evaluation_does_not_depend_on_the_size_of_train(tmp_path):
    small = generated(tmp_path).load("test")
    large = ListOps(GeneratedData(root=tmp_path, num_examples=50, max_len=60), quiet=True).load("test")
    assert small.first.values.tolist() == large.first.values.tolist()


def test_num_examples_prefers_generation(tmp_path):
    for name in ("train", "val", "test"):
        write(tmp_path / f"basic_{name}.tsv", HEADER + ROW)
    task = generated(tmp_path)
    assert len(task.load("train")) == 30
    (note,) = task.notes()
    assert note == (
        f"the files in {tmp_path} are not read: data.num_examples=30 asks for generated expressions; "
        "--data.num-examples None --data.max-len 2000 reads them"
    )


def test_is_generated_once(tmp_path):
    generated(tmp_path).prepare()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    generated(tmp_path).load("train")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


def test_interrupted_generation_starts_again(tmp_path, capsys, monkeypatch):
    task = generated(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("klformer.lab.tasks.files.GeneratedFolder.complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            task.prepare()
    (path,) = tmp_path.rglob("basic_train.tsv")
    path.write_bytes(path.read_bytes()[:100])
    task.quiet = False
    assert len(task.load("train")) == 30
    messages = capsys.readouterr().err
    assert "was interrupted, starting again" in messages
    assert "generating ListOps: 54 to do" in messages
    assert "generating ListOps: done" in messages


def test_quiet_says_nothing(tmp_path, capsys):
    generated(tmp_path).prepare()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_changed_cache_is_noticed(tmp_path):
    task = generated(tmp_path)
    task.prepare()
    (path,) = tmp_path.rglob("basic_train.tsv")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DataError, match=r"basic_train\.tsv: has \d+ bytes where the manifest says \d+; delete the fold"
    ):
        task.load("train")


def test_manifest(tmp_path):
    generated(tmp_path).prepare()
    (path,) = tmp_path.rglob("manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["settings"]["max_len"] == 60
    assert {name: entry["rows"] for name, entry in manifest["files"].items()} == {
        "basic_train.tsv": 30,
        "basic_val.tsv": 12,
        "basic_test.tsv": 12,
    }


def test_files_that_are_read_have_an_official_size_and_generated_ones_their_own(tmp_path):
    generate = generated(tmp_path / "here")
    generate.load("test")
    assert generate.notes() == []
    assert generated(tmp_path / "here").notes() == [], "generated files are not left out"
    folder = tmp_path / "archive"
    write(folder / "basic_test.tsv", HEADER + ROW)
    read = ListOps(GeneratedData(root=folder))
    read.load("test")
    assert read.notes() == [f"test has 1 examples, the official data 2,000: {folder} (read)"]
