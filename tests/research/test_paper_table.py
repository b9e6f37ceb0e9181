"""Runs beside the paper's numbers: differences, means over seeds, and averages of what has all tasks."""

from research.evidence.paper_table import averages, beside_the_paper


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


def test_the_average_is_of_what_has_all_three_tasks():
    values = {"listops": 36.0, "text": 80.0, "retrieval": 70.0, "image": 40.0}
    rows = [run(task, "performer", seed, value + seed) for task, value in values.items() for seed in (0, 1)]
    rows += [run("text", "softmax", 0, 99.0)]
    assert averages(rows).splitlines()[2:] == ["| `performer` | 36.50 | 80.50 | 70.50 | 62.50 | 51.74 |"]
