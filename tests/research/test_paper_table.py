"""Runs beside the paper's numbers: differences, and means over seeds."""

from research.evidence.paper_table import beside_the_paper


def run(task, attention, seed, value):
    took = {"train_processor_seconds": 90.0, "train_tokens": 2_000_000}
    return {"setting": f"{task}-workstation: accuracy, %", "attention": attention, "seed": seed, "value": value, **took}


def test_a_task_beside_the_paper():
    rows = [
        run("text", "softmax", 0, 60.27),
        run("text", "generative-prf", 0, 80.0),
        run("text", "generative-prf", 1, 82.0),
        run("text", "atoms-prf", 0, 70.0),
    ]
    lines = [line.rsplit(" | ", 1)[0] for line in beside_the_paper(rows).splitlines()[2:]]
    assert lines == [
        "| `generative-prf` | 62.90 | 81.00 +- 1.00 | 2 | +18.10 | 1.5 | 2",
        "| `atoms-prf` |  | 70.00 | 1 |  | 1.5 | 2",
        "| `softmax` | 64.27 | 60.27 | 1 | -4.00 | 1.5 | 2",
    ]


def test_parameters_are_those_of_the_preset():
    lines = beside_the_paper([run("text", name, 0, 50.0) for name in ("softmax", "generative-prf")]).splitlines()[2:]
    fixed, learned = (int(line.split(" | ")[-1].strip(" |").replace(",", "")) for line in lines)
    assert 250_000 < fixed < learned < fixed + 20_000  # 4,000 positions of 64, and the generator


def test_several_tasks_are_told_apart():
    lines = beside_the_paper([run("text", "softmax", 0, 60.0), run("image", "softmax", 0, 40.0)]).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| Text", "`softmax`"], ["| Image", "`softmax`"]]
