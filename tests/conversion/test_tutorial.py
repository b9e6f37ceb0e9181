"""The tutorial of docs/tutorials/convert.md runs as it stands, and what it says of its figures holds."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "convert.md"


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)
    fixed, learned = (names[name].certificate for name in ("fixed", "learned"))
    assert learned.linear["accuracy"] > learned.teacher["accuracy"] - 0.05
    assert fixed.linear["accuracy"] < learned.linear["accuracy"] - 0.3
    assert "performer:" in capsys.readouterr().out
    assert (tmp_path / "small-bert-linear/certificate.json").exists()
