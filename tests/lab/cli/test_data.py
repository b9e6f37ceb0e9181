"""The command `data`, typed as a user would: what it says and makes is what `train` uses."""

import pytest
from cli_support import fails, run
from support import TINY_MODEL

from klformer.lab.cli.main import main
from klformer.lab.tasks import TASKS, ListOps, task_names

SMALL = [
    *["--data.num-examples", "450", "--data.max-len", "9"],
    *["--data.validation-limit", "45", "--data.test-limit", "45"],
]
#: Those of the paper, which have its preset.
#: Tasks of the paper; recall, csv and the like have no settings of its.
PAPER = [name for name in task_names() if "paper" in TASKS[name].presets]


@pytest.fixture
def small_listops(monkeypatch):
    monkeypatch.setattr(ListOps, "evaluation_size", 12)
    small = {"num_examples": 30, "max_len": 60}
    monkeypatch.setattr(ListOps, "presets", {"laptop": {**ListOps.presets["laptop"], "data": small}})


def write_listops(root):
    root.mkdir()
    for name in ("train", "val", "test"):
        (root / f"basic_{name}.tsv").write_bytes(b"Source\tTarget\r\n" + b"( ( ( [MAX 4 ) 7 ) ] )\t7\r\n" * 12)


def test_generate_and_check(home, capsys):
    small = ["--task", "sparsity", *SMALL]
    assert "generated" in run(capsys, "data", "generate", *small)
    out = run(capsys, "data", "check", *small)
    assert "360 examples, 9 to 9 tokens" in out
    assert "needs --task" in fails(capsys, 2, "data", "check")
    assert "can't be generated" in fails(capsys, 2, "data", "generate", "--task", "retrieval")
    assert "new_aan_pairs" in fails(capsys, 1, "data", "check", "--task", "retrieval")


def test_where_names_what_each_task_of_a_preset_reads(home, capsys):
    def places(*options, tasks):
        lines = {line.split()[0]: line for line in run(capsys, "data", "where", *options).splitlines()}
        assert list(lines) == tasks
        return lines["listops"], lines["sparsity"]

    listops, sparsity = places(tasks=task_names())
    assert "train20000-len200-seed0 (will be generated)" in listops
    assert "sparsity0.5-50000x64-seed0 (will be generated)" in sparsity
    listops, sparsity = places("--preset", "paper", tasks=PAPER)
    assert "train96000-len2000-seed0" in listops
    assert "sparsity0.5-200000x200-seed0" in sparsity
    assert "sparsity0.5-50000x64-seed0" in run(capsys, "data", "where", "--task", "sparsity")
    assert "sparsity0.5-200000x200-seed0" in run(capsys, "data", "where", "--task", "sparsity", "--preset=paper")


def test_where_applies_options_to_the_tasks_that_have_them(home, capsys):
    out = run(capsys, "data", "where", "--data.num-examples", "450", "--data.seed", "3")
    assert [line.split()[0] for line in out.splitlines()] == task_names()
    assert "train450-len200-seed3" in out
    assert "sparsity0.5-450x64-seed3" in out
    assert "train96000-len200-seed0" in run(capsys, "data", "where", "--data.num-examples", "None")
    error = fails(capsys, 2, "data", "where", "--task", "text", "--data.num-examples", "450")
    assert "--data.num-examples" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "lisp"], "unknown task 'lisp'; did you mean 'listops'? Known: listops"),
        (["--preset", "phone"], "preset must be one of paper, laptop, workstation, got 'phone'"),
        (["--data.max-len", "0"], "max_len"),
    ],
)
def test_mistakes_are_one_line(home, capsys, options, message):
    error = fails(capsys, 2, "data", "where", *options)
    assert message in error
    assert "Traceback" not in error


def test_what_is_generated_is_what_train_uses(home, capsys, small_listops):
    run(capsys, "data", "generate", "--task", "listops")
    made = {path: path.stat().st_mtime_ns for path in (home / "data").rglob("*")}
    assert made
    out = run(capsys, "train", "--task", "listops", "--attention", "linear-elu", *TINY_MODEL)
    assert "30 training examples" in out
    assert {path: path.stat().st_mtime_ns for path in (home / "data").rglob("*")} == made


def test_files_that_are_not_read_are_noted_and_the_flags_of_the_note_read_them(home, capsys, small_listops):
    write_listops(home / "data")
    note = (
        f"note: the files in {home / 'data'} are not read: data.num_examples=30 asks for generated expressions; "
        "--data.num-examples None --data.max-len 2000 reads them"
    )
    train = ["train", "--task", "listops", "--attention", "linear-elu", *TINY_MODEL]
    for command in (["data", "where"], ["data", "check", "--task", "listops"], train):
        assert note in run(capsys, *command)
    flags = note.split("; ")[1].removesuffix(" reads them").split()
    out = run(capsys, "data", "check", "--task", "listops", *flags)
    assert "12 examples, 4 to 4 tokens" in out
    assert "are not read" not in out
    out = run(capsys, *train, "--name", "files", *flags)
    assert f"12 training examples from {home / 'data'} (read)" in out
    assert "are not read" not in out


@pytest.mark.parametrize("command", [["data", "generate"], ["train", "--attention", "linear-elu", *TINY_MODEL]])
def test_a_file_as_the_root(home, capsys, command):
    (home / "file").touch()
    error = fails(capsys, 1, *command, "--task", "sparsity", "--data.root", "file")
    assert "can't be written: Not a directory" in error
    assert "generating" not in error


def test_help_shows_the_settings_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        main(["data", "--task", "listops", "--help"])
    out = capsys.readouterr().out
    assert "(default: 20000)" in out
    assert "(default: laptop)" in out
