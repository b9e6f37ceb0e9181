"""`klformer recommend`: the answer, its reasons and the table, for every option."""

from cli_support import fails, run


def recommended(capsys, *options):
    """The answer, and all that is printed as one line: tables break theirs."""
    out = run(capsys, "recommend", *options)
    return out.splitlines()[0], " ".join(out.split())


def test_recommend_says_what_to_use_and_why(capsys):
    answer, text = recommended(capsys)
    assert answer == "gmm-rks"
    assert "of softmax's work" in text
    assert "time relative to softmax at 4,096 tokens, D = 64" in text


def test_the_table_begins_with_the_answer_and_has_five_rows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = run(capsys, "recommend", "--length", "16384")
    rows = [line.split("│")[1:3] for line in out.splitlines() if line.startswith("│")]
    assert [mark.strip() for mark, _ in rows] == ["->", "", "", "", ""]
    assert rows[0][1].strip() == out.splitlines()[0]
    assert "more that fit" in out
    assert max(map(len, out.splitlines())) <= 100


def test_recommend_takes_all_needs(capsys):
    sizes = ("--length", "512", "--head-dim", "32")
    answer, text = recommended(capsys, *sizes, "--budget", "0.5", "--deterministic")
    assert answer == "gmm-rks:redraw=false"
    assert "at 512 tokens, D = 32" in text
    assert text.count("redrawn") == 1, "only the reason says so, no row of the table"
    assert recommended(capsys, *sizes, "--budget", "0.1")[0] == "linear-elu"
    answer, text = recommended(capsys, *sizes, "--budget", "0.001")
    assert answer == "linear-elu"
    assert "nothing that was measured fits a budget of 0.001" in text


def test_recommend_refuses_what_is_no_size(capsys):
    assert "length must be at least 1, got 0" in fails(capsys, 2, "recommend", "--length", "0")
    assert "head_dim must be at least 1, got 0" in fails(capsys, 2, "recommend", "--head-dim", "0")
    assert "budget must be finite and above 0, got 0.0" in fails(capsys, 2, "recommend", "--budget", "0")
