"""Make research/report.html, the report of all runs that are kept: `python -m research.publish`.

It is made of the runs in research/runs, an archive for each task, and of the analyses in research/data.
research/pages/results.md has the same as commands.
"""

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from klformer.files import write_text
from klformer.lab.report.collect import Collection, collect
from klformer.lab.report.page import render

EVIDENCE = Path(__file__).parent
REPORT = EVIDENCE / "report.html"
TITLE = "Long Range Arena and sparsity at laptop budgets"


def unpack(folder: Path) -> None:
    """Put the runs of every archive into a folder of its own: runs of two archives may have the same name."""
    for archive in sorted((EVIDENCE / "runs").glob("*.tar.xz")):
        with tarfile.open(archive) as file:
            file.extractall(folder / archive.name.removesuffix(".tar.xz"), filter="data")


def kept() -> Collection:
    """All runs that are kept, and the analyses of them."""
    with TemporaryDirectory() as folder:
        unpack(Path(folder))
        return collect([Path(folder)], analysis=EVIDENCE / "data")


def page(collection: Collection) -> str:
    """The report of them."""
    with TemporaryDirectory() as folder:
        return render(collection, Path(folder), title=TITLE)[0]


def main() -> None:
    """Write the report, and say of how many runs it is."""
    collection = kept()
    write_text(REPORT, page(collection))
    print(f"{REPORT}: {len(collection.runs)} runs")


if __name__ == "__main__":
    main()
