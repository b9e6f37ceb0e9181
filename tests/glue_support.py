"""A small tree of GLUE with the quirks of the real one."""

MNLI = ["index", "promptID", "pairID", "genre", "parse1", "parse2", "p1", "p2", "sentence1", "sentence2", "label1"]
QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"]
PAIR = ["index", "sentence1", "sentence2", "label"]


def _write(path, rows, *, mark=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mark + "".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")


def write_glue(root, size=40):
    """All tasks, with train of `size` rows and half of it in dev."""
    labels = ("entailment", "not_entailment")
    for name, count in (("train", size), ("dev", size // 2)):
        numbers = range(count)
        _write(root / f"SST-2/{name}.tsv", [("sentence", "label"), *((f'an " odd quote {n} ', n % 2) for n in numbers)])
        _write(root / f"CoLA/{name}.tsv", [("gj04", int(n % 3 > 0), "*" * (n % 3 == 0), f"words {n}") for n in numbers])
        header = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
        rows = [(n % 2, n, n, f'" He said {n}', f"she {n}") for n in numbers]
        _write(root / f"MRPC/{name}.tsv", [header, *rows], mark="\ufeff")
        for task in ("RTE", "QNLI"):
            header = PAIR if task == "RTE" else ["index", "question", "sentence", "label"]
            _write(
                root / f"{task}/{name}.tsv", [header, *((n, f"one {n}", f"two {n}", labels[n % 2]) for n in numbers)]
            )
        _write(root / f"WNLI/{name}.tsv", [PAIR, *((n, f"one {n}", f"two {n}", n % 2) for n in numbers)])
        rows = [(n, "g", "f", "y", n, "a", "b", f"one {n}", f"two {n}", f"{n % 6}.000") for n in numbers]
        _write(root / f"STS-B/{name}.tsv", [STSB, *rows])
        rows = [(n, "", "", f"what {n}?", f"how {n}?", n % 2) for n in numbers]
        _write(root / f"QQP/{name}.tsv", [QQP, *rows, (99, "", "", "cut in the middle"), (98, "", "", "", "x", 1)])
    three = ("contradiction", "entailment", "neutral")
    for name, more in (("train", 1), ("dev_matched", 5), ("dev_mismatched", 5)):
        header = [*MNLI, *(f"label{n}" for n in range(2, more + 1)), "gold_label"]
        count = size if name == "train" else size // 2
        rows = [(n, *[""] * 7, f"one {n}", f"two {n}", *["x"] * more, three[n % 3]) for n in range(count)]
        _write(root / f"MNLI/{name}.tsv", [header, *rows])
    _write(root / "CoLA/test.tsv", [("index", "sentence"), (0, "words"), (1, "other")])
    return root
