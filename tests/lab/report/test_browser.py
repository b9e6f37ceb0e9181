"""The page of `klformer report` in a real browser: it sorts, fits, prints, and hostile names do nothing."""

import base64
import tempfile

import pytest
from report_support import (
    ATTACK,
    Browser,
    hostile,
    make_run,
    needs_browser,
    page_of,
    write_analyses,
    write_benchmark,
    write_models,
    write_peers,
)


@pytest.fixture(scope="module")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with everything on it."""
    tmp_path = tmp_path_factory.mktemp("report")
    for number, name in enumerate(("softmax", "gmm-rks", "performer", "gmm-prf")):
        for task in ("listops", "text", "retrieval"):
            make_run(tmp_path / "runs" / f"{task}-{name}", name, task=task, accuracy=0.5 + 0.03 * number)
    make_run(tmp_path / "runs" / "text-elu", "linear-elu", finished=False)
    write_analyses(tmp_path / "runs" / "analysis")
    write_benchmark(tmp_path / "runs" / "bench" / "attention.json")
    write_models(tmp_path / "runs" / "bench", fails=[("image", "gmm-rks")])
    write_peers(tmp_path / "runs" / "bench")
    page_of(tmp_path, tmp_path / "runs")
    return tmp_path / "out" / "report.html"


COLUMN = (
    "[...document.querySelector('#table-{}').tBodies[0].rows].map(row => row.cells[{}].firstChild.textContent.trim())"
)


CLICK = "[...document.querySelector('#table-{}').tHead.rows].at(-1).cells[{}].querySelector('button').click()"


@needs_browser
def test_tables_sort_when_clicked(browser, report):
    browser.open(report)
    names, accuracies = COLUMN.format("setting-B", 0), COLUMN.format("setting-B", 3)
    assert browser.run(accuracies) == ["59.00", "56.00", "53.00", "50.00", "unfinished"]
    browser.run(CLICK.format("setting-B", 0))
    assert browser.run(names) == ["gmm-prf", "gmm-rks", "linear-elu", "performer", "softmax"]
    browser.run(CLICK.format("setting-B", 3))
    assert browser.run(accuracies) == ["59.00", "56.00", "53.00", "50.00", "unfinished"]
    assert browser.run("document.querySelectorAll('#table-setting-B [aria-sort=descending]').length") == 1
    browser.run(CLICK.format("setting-B", 3))
    assert browser.run(accuracies) == ["50.00", "53.00", "56.00", "59.00", "unfinished"]  # missing stays last
    browser.run(CLICK.format("lra", 2))
    assert browser.run(COLUMN.format("lra", 2))[:3] == ["37.42", "37.08", "37.05"]
    for table, column, order in (
        ("speed-0-3", 1, ["2", "0.5", "not run"]),
        ("model-length-0", 4, ["4,096", "not run", "not run"]),
        ("peers-0", 5, ["2.50", "0.50", "0.50", "0.50", "0.50"]),
    ):
        browser.run(CLICK.format(table, column))
        assert browser.run(COLUMN.format(table, column)) == order
    assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")])
def test_the_page_fits_and_can_be_read(browser, report, width, scheme):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", media="", features=[feature])
    browser.open(report)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.querySelectorAll('figure svg').length") == 16
    assert browser.run(
        "[...document.querySelectorAll('figure svg')].every(svg => svg.getBoundingClientRect().height > 100)"
    )
    # Names of rows stay inside of their cells.
    assert browser.run("[...document.querySelectorAll('tbody th')].every(cell => cell.scrollWidth <= cell.clientWidth)")
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 23, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
    # The ink of the figures is that of the page, and so is the ground.
    label = "[...document.querySelectorAll('figure svg text')].find(text => text.textContent == 'training step')"
    assert browser.run(f"getComputedStyle({label}).fill") == browser.run("getComputedStyle(document.body).color")
    assert browser.complaints() == []


@needs_browser
def test_everything_is_on_paper(browser, report):
    browser.open(report)
    opened = "document.querySelectorAll('details[open]').length"
    assert browser.run(opened) == 0
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(opened) == browser.run("document.querySelectorAll('details').length") > 10
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(opened) == 0
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert browser.complaints() == []


@needs_browser
def test_hostile_names_do_nothing(browser, tmp_path):
    page_of(tmp_path, hostile(tmp_path), title=ATTACK)
    browser.open(tmp_path / "out" / "report.html")
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.title").startswith("<script>")
    assert browser.complaints() == []
    # Even a script that did get in would not run.
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert browser.run("typeof window.hacked") == "undefined"
