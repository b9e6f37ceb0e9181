"""The example of documents asks what it has read, and reads once."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "merge_states.py"


def test_a_folder_is_read_once_and_any_of_it_is_asked(tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))

    def ask(*arguments):
        script["ask"](tmp_path, *arguments)
        return capsys.readouterr().out

    (tmp_path / "france.txt").write_text("The capital of France is Paris and its river is the Seine")
    (tmp_path / "spain.txt").write_text("In Spain the capital is Madrid where the river is shallow")
    first = ask("france is")
    assert first.count("read ") == 2
    assert "france is ... paris" in first
    for document in tmp_path.glob("*.txt"):
        document.write_text("")  # nobody looks at them again
    assert "france is ... paris" in ask("france is", "spain.txt", "france.txt")
    assert "river is ... the (" in ask("river is", "france.txt")
    assert "river is ... shallow (" in ask("river is", "spain.txt")
    both = ask("river is")
    assert "shallow (" in both
    assert "the (" in both
    assert "read " not in both
