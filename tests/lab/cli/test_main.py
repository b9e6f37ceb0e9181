"""The command line, typed as a user would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import fails, run
from support import TINY, TINY_MODEL

import klformer
from klformer.lab.cli import data, train
from klformer.lab.cli.main import COMMANDS, main
from klformer.lab.runs.config import preset
from klformer.lab.tasks import ListOps, Sparsity, task_names
from klformer.lab.tasks.sparsity import SparsityData
from klformer.models import AttentionSpec


def test_train_eval_and_resume(home, capsys):
    out = run(capsys, "train", "--task", "sparsity", "--attention", "gmm-prf:num_frequencies=8", *TINY)
    folder = home / "runs" / "sparsity0.5-laptop-gmm-prf-num_frequencies=8-seed0"
    assert "test accuracy" in out
    assert "over 2 draws" in out
    options = json.loads((folder / "config.json").read_text())["attention"]["options"]
    assert options | {"backend": "auto"} == klformer.attention_options("gmm-prf") | {"num_frequencies": 8}
    out = run(capsys, "eval", folder, "--draws", "4", "--split", "validation")
    assert "45 examples" in out
    assert "over 4 draws" in out
    error = fails(capsys, 1, "train", "--task", "sparsity", "--attention", "gmm-prf:num_frequencies=8", *TINY)
    assert "holds a run already; --resume goes on with it" in error
    out = run(
        capsys, "train", "--attention", "gmm-prf:num_frequencies=8", *TINY, "--resume", "--training.max-steps", "8"
    )
    assert "going on after step 6" in out


def test_quiet_says_nothing(home, capsys):
    assert run(capsys, "train", "--attention", "softmax", *TINY, "--quiet") == ""


def test_compare_makes_a_table_and_goes_on(home, capsys):
    arguments = ["compare", "--attentions", "gmm-rks", "gmm-rks:frozen=true", "softmax", "--seeds", "0", "1", *TINY]
    out = run(capsys, *arguments)
    table = out[out.index("accuracy on the test set") :]
    assert "gmm-rks:frozen=true" in table
    assert table.count("│") > 20
    assert "runs and comparison-sparsity0.5-laptop.json are in runs" in out
    results = json.loads((home / "runs" / "comparison-sparsity0.5-laptop.json").read_text())
    assert len(results) == 6
    assert {r["seed"] for r in results} == {0, 1}
    (home / "runs" / "sparsity0.5-laptop-softmax-seed1" / "result.json").unlink()
    out = run(capsys, *arguments)
    assert out.count("done already") == 5
    assert "going on after step 6" in out


def test_compare_takes_no_result_of_other_settings(home, capsys):
    arguments = ["compare", "--attentions", "softmax", *TINY]
    run(capsys, *arguments)
    result = home / "runs" / "sparsity0.5-laptop-softmax-seed0" / "result.json"
    before = result.read_text()
    error = fails(capsys, 1, *arguments, "--training.max-steps", "8")
    assert (
        "softmax-seed0 is finished and is not made longer: training.max_steps was 6, is 8; ask for what it was" in error
    )
    assert result.read_text() == before
    error = fails(capsys, 1, *arguments, "--optimiser.learning-rate", "0.5")
    assert "was started with another configuration: optimiser.learning_rate was 0.002, is 0.5" in error


def test_compare_goes_on_where_files_are_damaged(home, capsys):
    arguments = ["compare", "--attentions", "softmax", *TINY]
    run(capsys, *arguments)
    result = home / "runs" / "sparsity0.5-laptop-softmax-seed0" / "result.json"
    whole = json.loads(result.read_text())
    result.write_text(result.read_text()[:50])
    out = run(capsys, *arguments)
    assert "done already" not in out
    assert json.loads(result.read_text())["test"] == whole["test"]


def test_compare_sees_what_is_impossible_before_the_first_run(home, capsys):
    error = fails(capsys, 2, "compare", "--attentions", "linear-elu", "gmm-rks:num_frequencies=7", *TINY)
    assert "multiple of num_components=2, got 7" in error
    assert not (home / "runs").exists()


def test_a_run_finds_its_data_from_another_folder(home, capsys, monkeypatch):
    run(capsys, "train", "--attention", "linear-elu", *TINY, "--data.root", "here", "--out", "runs")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert "45 examples" in run(capsys, "eval", home / "runs" / "sparsity0.5-laptop-linear-elu-seed0")
    assert list((home / "elsewhere").iterdir()) == []


def test_list_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = run(capsys, "list")
    assert max(map(len, out.splitlines())) <= 60
    assert all(word in out for word in ("gmm-rks: ", "listops: ", "num_frequencies=256", "causal"))
    assert "│" not in out


def test_list(capsys):
    out = run(capsys, "list")
    for word in ("gmm-rks", "linear-elu", "listops", "num_frequencies=256", "20,000 steps"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train", "--training.max-steps", "-5"], "klformer: --training.max-steps: Input should be greater than"),
        (["compare", "--data.sparsity", "2"], "klformer: --data.sparsity: Input should be less than 1, got 2.0"),
        (["train", "--attention", "gmm-rsk"], "did you mean 'gmm-rks'"),
        (["train", "--task", "lisp"], "unknown task 'lisp'; did you mean 'listops'? Known: listops"),
        (["train", "--attention", "gmm-rks:num_frequencies=7", *TINY], "multiple of num_components=2, got 7"),
        (["compare", "--attentions", "softmax:frozen=true"], "softmax has no option 'frozen'"),
        (
            ["compare", "--attentions", "gmm-rks", "gmm-rks:num_frequencies=64"],
            "every run must be named once, got twice: sparsity0.5-laptop-gmm-rks-seed0",
        ),
        (["compare", "--attentions", "softmax", "--seeds", "1", "1"], "twice: sparsity0.5-laptop-softmax-seed1"),
        (["eval", "nowhere", "--draws", "0"], "draws must be at least 1, got 0"),
        (["analyze", "varience"], "unknown analysis 'varience'; did you mean 'variance'?"),
        *(
            (["train", "--name", name, *more], "--name must be the name of a folder, without / and not beginning with")
            for name in ("../../x", "/etc/x", "..", ".", "", "a\nb", "a/b", ".hidden", "checkpoints")
            for more in ([], ["--resume"])
        ),
        (["bench", "modle"], "unknown benchmark 'modle'; did you mean 'model'?"),
    ],
)
def test_mistakes_are_one_line(home, capsys, arguments, message):
    error = fails(capsys, 2, *arguments)
    assert message in error
    assert "Traceback" not in error


def test_other_mistakes(home, capsys):
    assert "there is no folder nowhere" in fails(capsys, 1, "eval", "nowhere")
    error = fails(capsys, 2, "train", "--training.batch-size", "0")
    assert error == "klformer: --training.batch-size: Input should be greater than or equal to 1, got 0\n"
    error = fails(capsys, 2, "train", "--seed", "-1")
    assert "seed: Input should be greater than or equal to 0, got -1" in error
    assert not (home / "runs").exists()


def test_a_first_try_does_not_block_the_second(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    small = ["--data.max-len", "9", "--data.validation-limit", "2", "--data.test-limit", "4"]
    arguments = ["compare", "--task", "text", "--attentions", "linear-elu", *small, *TINY_MODEL]
    assert "did not give 'stanfordnlp/imdb'" in fails(capsys, 1, *arguments)
    for part, label in ((part, label) for part in ("train", "test") for label in ("neg", "pos")):
        folder = home / "reviews" / part / label
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}_1.txt").write_text(f"{label} review {number}")
    assert "accuracy on the test set" in run(capsys, *arguments, "--data.root", home / "reviews")


def test_help_is_for_newcomers(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert all(f"\n  {name} " in out and entry.summary in words for name, entry in COMMANDS.items())
    assert all(len(line) <= 80 for line in out.splitlines())


def helped(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_of_many_options_shows_the_first_group_and_names_the_others(capsys):
    out = helped(capsys, "train", "--task", "text", "--preset", "paper", "--help")
    assert "klformer train --task" in out
    assert "  --seed INT\n" in out
    assert "--training.* batch-size" in out
    assert "--training.batch-size" not in out
    assert len(out.splitlines()) < 60
    of_training = helped(capsys, "train", "--task", "text", "--preset", "paper", "--help", "training")
    assert "(default: 20000)" in of_training
    assert "--data.root {None}" not in of_training
    whole = helped(capsys, "train", "--help", "all")
    assert all(f"--{name}" in whole for name in ("seed INT", "data.root", "training.max-steps", "model.num-layers"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("doctor", "export")])
def test_help_fits_80_columns(name, capsys):
    for topic in ([], ["all"]):
        out = helped(capsys, name, "--help", *topic)
        assert out.startswith(f"usage: klformer {name}")
        assert [line for line in out.splitlines() if len(line) > 80] == []
        assert "(default" in out or name in ("analyze", "bench", "completion", "list")


@pytest.mark.parametrize("name", ["analyze", "bench", "data", "list"])
def test_help_fits_narrow_terminals(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, helped(capsys, name, "--help").splitlines())) <= 60


def test_completion(capsys):
    bash = run(capsys, "completion", "bash")
    assert "complete -o default -F _klformer klformer" in bash
    assert all(word in bash for word in (*COMMANDS, "--data.text-column", "gmm-rks", "eigenvalues", "listops"))
    assert subprocess.run(["bash", "-n"], input=bash, text=True, check=False).returncode == 0
    script = f"{bash}\nCOMP_WORDS=(klformer train --data.tr); COMP_CWORD=2; _klformer; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True)
    assert sorted(done.stdout.split()) == ["--data.train", "--data.train-limit"]
    assert run(capsys, "completion", "zsh").startswith("autoload -U +X bashcompinit")
    assert "complete -c klformer -n '__fish_seen_subcommand_from train' -l data.train" in run(
        capsys, "completion", "fish"
    )
    assert "invalid choice" in fails(capsys, 2, "completion", "tcsh")


def test_curves_are_drawn(home, capsys):
    run(capsys, "compare", "--attentions", "linear-elu", "softmax", *TINY, "--quiet")
    runs = sorted((home / "runs").glob("sparsity*"))
    assert "written to c.svg" in run(capsys, "curves", *runs, "--out", "c.svg", "--title", "two runs")
    drawing = (home / "c.svg").read_text()
    assert ">linear-elu</text>" in drawing
    assert ">softmax</text>" in drawing
    assert "written to d.svg" in run(capsys, "curves", home, "--out", "d.svg")  # a folder of runs
    assert "is not a run" in fails(capsys, 1, "curves", home / "nowhere")
    assert "give at least one run" in fails(capsys, 2, "curves")
    assert "c.xyz must end in one of" in fails(capsys, 2, "curves", *runs, "--out", "c.xyz")
    assert "can't write c.svg/d.svg: File exists" in fails(capsys, 1, "curves", *runs, "--out", "c.svg/d.svg")


def test_profile_says_memory_and_share(tmp_path, capsys):
    file = tmp_path / "profile.json"
    out = run(capsys, "profile", "--task", "sparsity", "--preset", "laptop", "--batch-size", "2", "--json", file)
    assert "2 x 64 tokens" in out
    share = int(out.split("% of it in the attention")[0].split()[-1])
    assert 0 < share < 100
    report = json.loads(file.read_text())
    (row,) = report["results"]
    assert (row["task"], row["attention"], row["batch_size"], row["length"]) == ("sparsity", "gmm-rks", 2, 64)
    assert f"{100 * row['attention_seconds'] / row['seconds']:.0f}" == str(share)
    assert report["command"]
    assert report["environment"]["date"]


def test_profile_of_padding(home, capsys, monkeypatch):
    monkeypatch.setattr(ListOps, "evaluation_size", 12)
    small = {"num_examples": 60, "max_len": 40}
    monkeypatch.setattr(ListOps, "presets", {"laptop": {**ListOps.presets["laptop"], "data": small}})
    out = run(
        capsys, "profile", "--task", "listops", "--preset", "laptop", "--attention", "linear-elu", "--padding", "1"
    )
    assert "1 batches padded to the longest sequence of all" in out
    ratio, difference = float(out.split("x the tokens")[0].split()[-1]), float(out.split("differ by ")[1].split()[0])
    assert ratio >= 1
    assert difference < 1e-5
    assert "padding must be at least 1 batch, got 0" in fails(capsys, 2, "profile", "--padding", "0")


def test_a_group_names_its_commands_and_each_has_its_own_help(capsys):
    for arguments, words in (
        (["analyze", "--help"], ("variance", "eigenvalues", "klformer analyze NAME --help")),
        (["bench", "--help"], ("peers", "attention", "klformer bench NAME --help")),
        (["bench", "layer", "--help"], ("klformer bench layer", "--length")),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.parametrize("command", ["train", "compare", "data"])
def test_help_shows_the_data_options_of_the_task_alone(capsys, command):
    for task, shown in (("sparsity", True), ("text", False)):
        with pytest.raises(SystemExit):
            main([command, "--task", task, "--help", "data"])
        assert ("--data.sparsity" in capsys.readouterr().out) is shown


def test_data_options_of_one_task_reach_its_configuration():
    arguments = ["--data.sparsity", "0.25", "--data.root", "here"]
    options = train.COMMAND.parse(arguments, "klformer train")
    config = options.resolve(AttentionSpec(name="gmm-rks"), seed=3)
    assert config.data == SparsityData(
        **Sparsity.presets["laptop"]["data"], sparsity=0.25, root=Path("here").absolute()
    )
    assert config.seed == 3
    commands = data.COMMAND.parse(["where", *arguments], "klformer data")
    assert [command.data.sparsity for command in commands if command.task == "sparsity"] == [0.25]
    assert len(commands) == len(task_names())


def test_an_option_that_no_task_has_is_a_mistake(capsys):
    for stray in (["--data.separator", "/"], ["nonsense"]):
        assert f"no task has the option {stray[0]}" in fails(capsys, 2, "data", "where", *stray)


def test_a_configuration_is_the_preset_with_what_was_typed():
    options = train.COMMAND.parse(["--task", "listops", "--preset=paper", "--model.num-layers", "3"], "klformer train")
    attention = AttentionSpec(name="fastfood-rks", options={"frozen": True})
    config = options.resolve(attention, seed=0)
    usual = preset("paper", "listops", attention)
    assert config == usual.model_copy(update={"model": usual.model.model_copy(update={"num_layers": 3})})
