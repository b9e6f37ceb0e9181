"""Tables of the docs are what the data says, and data says where it is from."""

import json
import re
from pathlib import Path

import pytest

from research.evidence.pages import render

ROOT = Path(__file__).parents[2]
DATA = ROOT / "research/data"
MEASURED = ROOT / "klformer/lab/analysis/measured.json"
CONVERTED = ROOT / "examples/conversion/measured.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "research").rglob("*.md"))]
WITH_TABLES = [page for page in PAGES if "<!-- table" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_as_their_data_says(page):
    text = page.read_text()
    assert render(text, ROOT, str(page)) == text, "make evidence renders it again"


@pytest.mark.parametrize("file", [*sorted(DATA.glob("*.json")), MEASURED, CONVERTED], ids=lambda file: file.name)
def test_data_says_where_it_is_from(file):
    data = json.loads(file.read_text())
    settings = {row["setting"].partition(":")[0] for row in data["rows"] if "setting" in row}
    assert data["caption"]
    assert {"date", "processor", "torch", "klformer"} <= data["environment"].keys()
    assert data["commands"], "tests/docs/test_docs.py reads them"
    assert settings <= data["commands"].keys()
    assert data.get("differs", {}).keys() <= settings


NUMBER_WITH_ERROR = re.compile(r"(\d[\d,]*(?:\.\d+)?) \+- (\d[\d,]*(?:\.\d+)?)")


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: page.name)
def test_a_number_with_its_error_is_in_a_table_of_its_page(page):
    """What sentences say of the data is what tables say, rounded: sentences are typed, and would drift."""
    lines = page.read_text().splitlines()
    said = [found for line in lines if not line.startswith(("|", "    ")) for found in NUMBER_WITH_ERROR.findall(line)]
    shown = [found for line in lines if line.startswith("|") for found in NUMBER_WITH_ERROR.findall(line)]
    for numbers in said:
        assert any(is_rounded(numbers, others) for others in shown), f"{' +- '.join(numbers)} is in no table"


def is_rounded(numbers, others):
    """Whether all of the numbers are the others with as many decimals as they have, or fewer."""
    for number, other in zip(numbers, others, strict=True):
        unit = 10 ** -len(number.partition(".")[2])
        if abs(float(number.replace(",", "")) - float(other.replace(",", ""))) > 0.5 * unit + 1e-9:
            return False
    return True
