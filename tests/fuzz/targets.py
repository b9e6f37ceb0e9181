"""What is fuzzed: a door of klformer that takes files of other people, and inputs for it that are nearly right.

A target is built once, in a folder of its own, and called with a random generator for every input. It may raise
UserError, which is a refusal; everything else is a crash.
"""

import contextlib
import csv
import io
import json
import os
import shutil
import struct
import sys
from unittest import mock

import pyarrow
from mutate import STRANGE, mutated_bytes, mutated_text
from pyarrow import parquet
from run_support import sealed, tiny

from klformer.attention import AttentionSpec
from klformer.errors import UserError
from klformer.files import sha256
from klformer.lab.cli.main import _split_first, main
from klformer.lab.report.collect import collect
from klformer.lab.report.run import read_run
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import train_run
from klformer.lab.tasks.csv import Csv, CsvData
from klformer.lab.tasks.text import Text, TextData
from klformer.lab.training.progress import SilentReporter
from klformer.plugins import load_plugin


def _trained(folder):
    """A finished run, tiny."""
    run = folder / "run"
    if not run.exists():
        train_run(tiny(folder, max_steps=4), run, resume=False, reporter=SilentReporter())
    return run


class ConfigFile:
    """config.json of a run, as training, evaluation and reports read it."""

    def __init__(self, folder):
        self.whole = (_trained(folder) / RunFolder.CONFIG).read_bytes()
        self.path = folder / "changed" / RunFolder.CONFIG
        self.path.parent.mkdir(exist_ok=True)

    def __call__(self, random):
        self.path.write_bytes(mutated_text(random, self.whole))
        if random.random() < 0.7:
            ExperimentConfig.from_file(self.path)
        else:
            read_run(self.path.parent)


class Tables:
    """Texts and labels in csv, tsv and parquet files."""

    rows = (
        ("text", "label"),
        ("good, very good", "1"),
        ('he said "no"', "0"),
        ("über\nzwei Zeilen", "pos"),
        ("x" * 50, "0.0"),
    )

    def __init__(self, folder):
        self.folder = folder
        self.whole = {suffix: self._delimited(delimiter) for suffix, delimiter in ((".csv", ","), (".tsv", "\t"))}
        columns = dict(zip(self.rows[0], map(list, zip(*self.rows[1:], strict=True)), strict=True))
        sink = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), sink)
        self.whole[".parquet"] = sink.getvalue()

    def _delimited(self, delimiter):
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter).writerows(self.rows)
        return text.getvalue().encode()

    def __call__(self, random):
        suffix = random.choice(list(self.whole))
        for old in self.folder.glob("train.*"):
            old.unlink()
        (self.folder / f"train{suffix}").write_bytes(mutated_bytes(random, self.whole[suffix]))
        Text(TextData(root=self.folder, max_len=100)).read("train")


class RunFiles:
    """All files of a run folder, as evaluation and reports read them; a changed manifest may have its checksum."""

    def __init__(self, folder):
        self.whole = _trained(folder)
        self.run = folder / "changed"
        self.files = [
            path.relative_to(self.whole)
            for path in self.whole.rglob("*")
            if path.is_file() and path.suffix in (".json", ".jsonl")
        ]

    def __call__(self, random):
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.whole, self.run, ignore=shutil.ignore_patterns("tensorboard"))
        for name in random.sample(self.files, random.choice((1, 1, 2))):
            path = self.run / name
            content = mutated_text(random, path.read_bytes())
            if name.name == "manifest.json" and random.random() < 0.8:
                with contextlib.suppress(ValueError, AttributeError):
                    content = sealed(json.loads(content)).encode("utf-8", "surrogatepass")
            path.write_bytes(content)
        if random.random() < 0.5:
            load_run(self.run, SilentReporter()).examples("test")
        else:
            collect([self.run])


class TensorFiles:
    """safetensors files with other headers, under manifests with the right checksums."""

    def __init__(self, folder):
        self.run = _trained(folder)
        self.weights = sorted(self.run.glob("checkpoints/best-*"))[-1] / "weights.safetensors"
        self.whole = self.weights.read_bytes()
        (size,) = struct.unpack("<Q", self.whole[:8])
        self.header, self.body = self.whole[8 : 8 + size], self.whole[8 + size :]
        self.manifest = self.weights.with_name("manifest.json")
        self.content = json.loads(self.manifest.read_text())

    def __call__(self, random):
        header = mutated_text(random, self.header)
        size = len(header) if random.random() < 0.8 else random.choice((0, 1, 7, 2**31, 2**62, 2**64 - 1))
        body = self.body if random.random() < 0.8 else mutated_bytes(random, self.body)
        self.weights.write_bytes(struct.pack("<Q", size) + header + body)
        self.content["files"]["weights.safetensors"] = sha256(self.weights)
        self.manifest.write_text(sealed(self.content))
        load_run(self.run, SilentReporter())


class PluginDoor:
    """Names of plugins, files that are plugins, and attentions as text.

    The files are put together of harmless lines: they are executed.
    """

    lines = (
        *("import klformer", "import nowhere", "raise ValueError('x')", "x = (", "\tif", "1 / 0", "x: int", "pass"),
        *(
            "klformer.register_attention('gmm-rks', int, 'x')",
            "klformer.register_task(int)",
            "from klformer import nothing",
        ),
        *(
            "klformer.register_spectrum('a b', object)",
            "klformer.register_task(type('T', (), {}))",
            "raise SystemExit(3)",
        ),
        *(
            "class C(klformer.Task): pass",
            "klformer.register_task(C)",
            "\x00",
            "# \udcff",
            "import sys; sys.modules[__name__] = None",
        ),
    )
    names = (
        "json",
        "os.path",
        "nowhere",
        "a.b.c",
        "klformer",
        "klformer.nowhere",
        "..",
        ".",
        "",
        "é",
        "x y",
        "a/b.py",
        "json.py",
        ".py",
    )
    specs = (
        "gmm-rks:num_frequencies=8,init=identity",
        "fastfood-prf",
        "generative-prf:hidden_dims=[8,8]",
        "softmax:x=1",
    )

    def __init__(self, folder):
        self.folder = folder
        self.number = 0

    def __call__(self, random):
        match random.randrange(4):
            case 0:
                self.number += 1
                path = self.folder / f"plugin{self.number}.py"
                text = "\n".join(random.choice(self.lines) for _ in range(random.randrange(1, 6)))
                path.write_bytes(text.encode("utf-8", "surrogateescape"))
                try:
                    load_plugin(str(path))
                finally:
                    path.unlink()
                    sys.modules.pop(f"klformer_plugin_plugin{self.number}", None)
            case 1:
                name = random.choice(self.names)
                text = mutated_bytes(random, name.encode()) if random.random() < 0.7 else name.encode()
                load_plugin(text.decode("utf-8", "surrogateescape"))
            case 2:
                words = ["--plugin", "--plugin=", "--plugin=x", "train", "--help", "-", "", "--plug"]
                _split_first([random.choice(words) for _ in range(random.randrange(4))])
            case _:
                text = mutated_bytes(random, random.choice(self.specs).encode()).decode("utf-8", "replace")
                spec = AttentionSpec.parse(text)
                spec = AttentionSpec(name=spec.name, options=spec.options | self._strange_option(random, spec))
                if not any(isinstance(value, int | float) and value > 512 for value in spec.options.values()):
                    spec.build(num_heads=2, head_dim=4, max_len=8)

    def _strange_option(self, random, spec):
        if not spec.options or random.random() < 0.5:
            return {}
        return {random.choice(list(spec.options)): random.choice(STRANGE)}


class OwnTables:
    """Tables of one's own, put together of quotes, delimiters, line ends, empty fields and lists."""

    cells = (
        *(
            "good",
            "",
            " ",
            '"',
            '""',
            "a,b",
            "x\ny",
            "x\r\ny",
            "'",
            "\\",
            "=1+1",
            "\x1b[2J",
            "é" * 3,
            "1 2 3",
            "[1, 2]",
            "[[1,",
        ),
        *(
            "1e999",
            "nan",
            "\x00",
            "\u202e",
            "-1",
            "text",
            "label",
            "t" * 140_000,
            ";",
            "\t",
            "|",
            "\ufeff",
            "[" * 3000,
            "{}",
        ),
    )
    values = (*cells, *STRANGE, [1, 2, 3], [[1.5], [2.5]], {"a": 1})

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, random):
        suffix = random.choice((".csv", ".csv", ".tsv", ".jsonl"))
        path = self.folder / f"own{suffix}"
        path.write_bytes(self._jsonl(random) if suffix == ".jsonl" else self._delimited(random, suffix))
        task = Csv(
            CsvData(
                train=path,
                inputs=random.choice(("text", "text", "text", "integers", "floats")),
                target=random.choice(("classes", "classes", "number")),
                on_missing=random.choice(("error", "skip", "skip", "empty")),
                quoted=random.random() < 0.8,
                stratified=random.random() < 0.5,
                encoding=random.choice((None, None, "latin-1", "utf-16")),
                delimiter=random.choice((None, None, None, ";", "\t", '"')),
                max_len=64,
            ),
            quiet=True,
        )
        try:
            task.know(task.learn())
            for split in ("train", "validation", "test"):
                task.load(split)
        finally:
            task.notes()
        list(task.read_inputs(path, keep=["label"], chunk=7))

    def _rows(self, random, cells, right):
        """Rows that are right, with some strange cells among them."""
        share = random.choice((0, 0.02, 0.3))
        for number in range(random.choice((1, 12, 40))):
            row = [right[number % len(right)], number % 2]
            yield [random.choice(cells) if random.random() < share else cell for cell in row]

    def _delimited(self, random, suffix):
        delimiter = "\t" if suffix == ".tsv" else random.choice(",,,;|")
        text = io.StringIO()
        writer = csv.writer(text, delimiter=delimiter, lineterminator=random.choice(("\n", "\r\n", "\r")))
        writer.writerow(["text", "label"])
        for row in self._rows(random, self.cells, ("7 8 9", "1 2")):
            if random.random() < 0.05:  # as somebody wrote it who knows no quoting
                text.write(delimiter.join(map(str, row)) + "\n")
            else:
                writer.writerow(row)
        content = text.getvalue().encode("utf-8", "surrogatepass")
        return mutated_bytes(random, content) if random.random() < 0.3 else content

    def _jsonl(self, random):
        rows = self._rows(random, self.values, ("7 8 9", "1 2"))
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        content = "\n".join(lines).encode()
        return mutated_bytes(random, content) if random.random() < 0.3 else content


class CommandLines:
    """Commands with names, files and options as nobody should give them; a crash is called a bug on the last line."""

    names = (
        "x",
        "..",
        ".",
        "../x",
        "/etc/x",
        "",
        "a\nb",
        "\x1b[2J",
        "-x",
        "--",
        "é",
        "a" * 300,
        "x/y",
        ".x",
        "con",
        "'",
        '"',
        "$(x)",
    )

    def __init__(self, folder):
        self.folder = folder
        self.whole = (_trained(folder), _trained_table(folder))
        for name, target in (("zero.csv", "/dev/zero"), ("loop.csv", "loop.csv"), ("null.csv", "/dev/null")):
            (folder / name).symlink_to(target)
        os.mkfifo(folder / "pipe.csv")
        (folder / "folder.csv").mkdir()
        (folder / "empty.csv").touch()
        (folder / "quote.csv").write_text('text,label\n"a,b\nc,d\n')
        self.files = [str(folder / name) for name in ("new.csv", "nowhere.csv", "x.txt", "quote.csv", "empty.csv")]
        self.files += [str(folder / f"{name}.csv") for name in ("zero", "loop", "null", "pipe", "folder")]
        self.files += ["-", "", "/dev/stdin", "/dev/fd/0", "~nobody/x.csv", "a\x00b.csv", "/proc/self/mem"]

    def __call__(self, random):
        run = self._run(random)
        file, other, name = random.choice(self.files), random.choice(self.files), random.choice(self.names)
        out = random.choice((str(self.folder / "out.csv"), str(self.folder / f"out{name[:9]}.jsonl"), other, "-", name))
        more = random.choice(
            ([], [], ["--data.on-missing", "skip"], ["--draws", "1"], ["--quiet"], [name], [f"--{name}"])
        )
        command = random.choice(
            (
                ["predict", run, random.choice((self.files[0], file)), "--out", out, *more],
                ["eval", run, *more],
                ["report", run, "--out", str(self.folder / "page.html"), *more],
                ["data", "check", "--task", "csv", "--data.train", file, *more],
                [
                    "train",
                    "--task",
                    "csv",
                    "--data.train",
                    file,
                    "--out",
                    str(self.folder / "r"),
                    "--name",
                    name,
                    *more,
                ],
                ["train", "--name", name, "--resume", "--out", str(self.folder), *more],
                ["recommend", "--length", random.choice((name, "1", "512", "9" * 30)), *more],
                ["curves", run, "--out", str(self.folder / "curves.svg"), *more],
                [name, *more],
            )
        )
        said = io.StringIO()
        stdin = io.TextIOWrapper(io.BytesIO(random.choice((b"", b"text\nx\n", b"\xff\x00", b'text\n"x'))))
        out = io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out), mock.patch("sys.stdin", stdin):
            try:
                main(command)
            except SystemExit as end:
                if "this is a bug" in said.getvalue():
                    raise RuntimeError(f"{command}\n{said.getvalue()}") from None
                if end.code not in (0, None):
                    raise UserError(said.getvalue()) from None

    def _run(self, random):
        """A run, perhaps with a special file in the place of one of its own."""
        whole = random.choice(self.whole)
        if random.random() < 0.4:
            return str(whole)
        run = self.folder / "changed"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run, ignore=shutil.ignore_patterns("tensorboard"))
        path = random.choice([path for path in run.rglob("*") if path.is_file()])
        content = path.read_bytes()
        path.unlink()
        match random.randrange(5):
            case 0:
                os.mkfifo(path)
            case 1:
                path.symlink_to(random.choice(("/dev/zero", "/dev/null", "/dev/tty", path.name, "/")))
            case 2:
                path.mkdir()
            case 3:
                path.write_bytes(content[: random.randrange(len(content) + 1)])
            case 4:
                path.write_bytes(b'{"a":' * 100_000)
        return str(run)


def _trained_table(folder):
    """A finished run on a table, tiny."""
    (folder / "new.csv").write_text("text,label\n" + "well done,good\nso dull,bad\n" * 20)
    whole = tiny(folder, max_steps=2)
    sizes = {name: getattr(whole, name) for name in ("model", "optimiser", "schedule", "training")}
    config = ExperimentConfig(
        task="csv", preset="laptop", attention=whole.attention, data=CsvData(train=folder / "new.csv"), **sizes
    )
    train_run(config, folder / "table-run", resume=False, reporter=SilentReporter())
    return folder / "table-run"


TARGETS = {
    "own": OwnTables,
    "commands": CommandLines,
    "config": ConfigFile,
    "tables": Tables,
    "runs": RunFiles,
    "tensors": TensorFiles,
    "plugins": PluginDoor,
}
