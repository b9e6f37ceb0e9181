"""Benchmarks in the report: what `klformer bench` writes is read, refused where it is broken, and shown as it is."""

import json
import re

import pytest
from report_support import (
    Elements,
    edit,
    hostile_benchmarks,
    make_run,
    page_of,
    text_of,
    write_benchmark,
    write_models,
    write_peers,
)

from klformer.lab.bench.attention import length_table
from klformer.lab.bench.model import output
from klformer.lab.bench.model.step import MATERIALISED
from klformer.lab.bench.peers import peer_table, subject_table
from klformer.lab.plotting import ticks_of
from klformer.lab.report.benchmarks import read_benchmark
from klformer.lab.report.collect import collect

DASH = "\N{EN DASH}"


def shown(row):
    """Texts of a row, with the small print in brackets."""
    return [f"{cell.text} [{cell.note}]" if cell.note else cell.text for cell in row]


def column(table, heading, by_two=False):
    """Texts of a column, by the first cell of its row, or by the first two."""
    place = [column.title for column in table.columns].index(heading)
    return {" ".join(cell.text for cell in row[:2]) if by_two else row[0].text: shown(row)[place] for row in table.rows}


def rows_of(path, name):
    return read_benchmark(path).rows(name)


def test_attentions_are_shown_in_numbers(tmp_path):
    write_benchmark(tmp_path / "attention.json")
    rows = json.loads((tmp_path / "attention.json").read_text())["results"]
    rows[0] |= {"memory": None}
    rows[2] |= {"memory": 5 * 2**20, "seconds": {"median": 0.012, "low": 0.01, "high": 0.02}}
    edit(tmp_path / "attention.json", results=rows[:-1])
    (benchmark,) = collect([tmp_path]).benchmarks_of("attention")
    memory = length_table(benchmark.rows("results"), "memory")
    assert column(memory, "L=64") == {"softmax": DASH, "gmm-rks": "0"}
    assert column(memory, "L=256") == {"softmax": "5", "gmm-rks": DASH}
    times = length_table(benchmark.rows("results"))
    assert column(times, "lowest to highest, longest") == {"softmax": "10 to 20", "gmm-rks": DASH}
    assert column(times, "L=256") == {"softmax": "12", "gmm-rks": DASH}


def test_growth_and_crossover_are_shown(tmp_path):
    write_benchmark(tmp_path / "attention.json")
    rows = rows_of(tmp_path / "attention.json", "results")
    assert column(length_table(rows, "memory"), "grows as") == {"softmax": "L^1.00", "gmm-rks": "L^1.00"}
    table = length_table(rows)
    assert column(table, "grows as") == {"softmax": "L^2.00", "gmm-rks": "L^1.00"}
    assert column(table, "faster than softmax") == {"softmax": DASH, "gmm-rks": "from about 128"}
    for scale, text, sort in ((1e-3, "everywhere", 0), (1e3, "not up to 256", None)):
        changed = [
            row | {"seconds": {"median": row["seconds"]["median"] * (scale if "gmm" in row["name"] else 1)}}
            for row in rows
        ]
        cell = length_table(changed).with_columns(["faster than softmax"]).rows[1][0]
        assert (cell.text, cell.sort) == (text, sort)
    assert "faster than softmax" in text_of(page_of(tmp_path, tmp_path))


def test_speed_is_shown_with_its_spread_and_the_batches(tmp_path):
    rows = rows_of(write_models(tmp_path, tasks=("retrieval", "image"), lengths=()), "speed")
    retrieval = output.speed_table(rows[:3])
    assert column(retrieval, "steps / s") == {
        "softmax": "0.5 [0.25 to 1]",
        "gmm-rks": "2 [1 to 4]",
        "fastfood-prf": "2 [0.25 to 2]",
    }
    assert column(retrieval, "relative to softmax")["fastfood-prf"] == "2.00 [1.00 to 4.00]"
    assert column(retrieval, "MiB")["softmax"] == "4,000"
    assert retrieval.notes == ("A step has 2 pairs of sequences, as in the paper, of 4,000 tokens.",)
    image = output.speed_table(rows[3:])
    note = "A step has 32 sequences (in the paper 256; limited to 32 on the CPU) of 1,024 tokens."
    assert image.notes == (note,)


def test_the_papers_batch_is_said_to_be_the_papers(tmp_path):
    rows = rows_of(write_models(tmp_path, tasks=("text",), lengths=(), batch_size="paper"), "speed")
    (note,) = output.speed_table(rows).notes
    assert note == "A step has 32 sequences, as in the paper, of 4,000 tokens."
    (note,) = output.speed_table([row | {"preset": "laptop", "paper_batch_size": 16} for row in rows]).notes
    assert note.startswith("A step has 32 sequences (in preset laptop 16")


@pytest.mark.parametrize(("task", "what"), [("text", "1 sequence"), ("retrieval", "1 pair of sequences")])
def test_one_sequence_is_not_several(tmp_path, task, what):
    rows = rows_of(write_models(tmp_path, tasks=(task,), lengths=()), "speed")
    (note,) = output.speed_table([row | {"batch_size": 1} for row in rows]).notes
    assert note.startswith(f"A step has {what} (in the paper ")


def test_what_was_not_run_has_a_reason_in_place_of_a_number(tmp_path):
    fails = [("text", "softmax")]
    path = write_models(tmp_path, tasks=("text",), lengths=(), fails=fails)
    table = output.speed_table(rows_of(path, "speed"))
    assert column(table, "steps / s")["softmax"] == "not run [killed by SIGKILL]"
    assert table.rows[0][1].sort is None
    assert table.rows[1][1].sort == 2
    # There is nothing that it could be relative to.
    assert "relative to softmax" not in [column.title for column in table.columns]
    page = page_of(tmp_path, tmp_path)
    assert "training steps a second" in page  # without softmax the figure has speed itself
    assert "training steps a second, softmax = 1" not in page


def test_memory_of_the_whole_model_against_length(tmp_path):
    table = output.length_table(rows_of(write_models(tmp_path, tasks=()), "length"))
    rows = {row[0].text: shown(row)[1:] for row in table.rows}
    assert rows["gmm-rks"] == ["512", "1,024", "2,048", "4,096", "L^1.00"]
    assert rows["softmax"][2:4] == ["2,048", "not run [1]"]
    assert rows[MATERIALISED][-1] == "L^2.00"
    assert table.notes == ("Not run (1): quadratic, above 4,096 tokens.",)
    assert all(row[4].sort is None for row in table.rows if row[0].text != "gmm-rks")
    text = text_of(page_of(tmp_path, tmp_path))
    assert "Memory of the whole Text model against length." in text
    assert "A line ends where an attention was not run" in text


def test_one_round_has_no_spread(tmp_path):
    path = write_models(tmp_path, tasks=("text",), repeats=1)
    assert all(not cell.note for row in output.speed_table(rows_of(path, "speed")).rows for cell in row)
    assert "one process for each attention. There is no spread" in text_of(page_of(tmp_path, tmp_path))


def test_peers_are_compared(tmp_path):
    path = write_peers(tmp_path, levels=("attention",))
    table = peer_table(rows_of(path, "comparisons"))
    softmax, gmm, plain = column(table, "time", by_two=True)
    assert softmax == "torch scaled_dot_product_attention softmax"
    assert plain == "gmm-rks, features materialised gmm-rks"
    assert column(table, "time", by_two=True)[softmax] == "2.50 [2.00 to 3.00]"
    assert column(table, "rounds", by_two=True)[softmax] == "2"
    assert column(table, "memory", by_two=True)[softmax] == "0.50 [0.25 to 1.00]"
    assert float(column(table, "difference", by_two=True)[softmax]) < 1e-5
    assert column(table, "difference", by_two=True)[gmm] == DASH  # not meant to be the same
    assert column(table, "time", by_two=True)[plain] == "1.00 [0.50 to 2.00]"
    assert column(table, "memory", by_two=True)[plain] == "2.50 [1.50 to 5.00]"
    each = subject_table(rows_of(path, "subjects"))
    assert column(each, "ms")["softmax"] == "2,000.0 [1,000.0 to 4,000.0]"
    assert column(each, "MiB")["softmax"] == "2 [1 to 4]"
    text = text_of(page_of(tmp_path, tmp_path))
    assert "above 1, the peer takes longer or more memory than klformer" in text
    assert "heads H = 2, size of a head D = 4" in text


def test_times_with_freed_memory_kept_are_beside_the_others(tmp_path):
    path = write_peers(tmp_path, levels=("attention",))
    rows = json.loads(path.read_text())["comparisons"]
    rows[0]["time_ratio_kept"] = {"median": 1.5, "low": 1.25, "high": 1.75}
    edit(path, comparisons=rows)
    table = peer_table(rows_of(path, "comparisons"))
    assert list(column(table, "time, freed memory kept", by_two=True).values()) == ["1.50 [1.25 to 1.75]", DASH, DASH]


def test_results_that_differ_are_said_to(tmp_path):
    path = write_peers(tmp_path, levels=("attention",))
    rows = json.loads(path.read_text())["comparisons"]
    rows[0]["errors"] = {"error": 0.25}
    rows[1]["errors"] = {"error": 3e-7, "error_with_epsilon": 0.0625}
    rows[2] |= {"errors": {"error": 0.0}, "memory_ratio": None, "time_ratio": None}
    edit(path, comparisons=rows)
    table = peer_table(rows_of(path, "comparisons"))
    assert list(column(table, "difference", by_two=True).values()) == ["2e-01", "3e-07 [6e-02]", "0e+00"]
    assert [list(column(table, heading, by_two=True).values())[2] for heading in ("time", "memory")] == [DASH, DASH]
    assert (
        "performer-pytorch adds to each feature"
        in {column.title: column.hint for column in table.columns}["difference"]
    )


def test_memory_of_peers_may_be_left_out(tmp_path):
    path = write_peers(tmp_path, memory=False)
    assert "memory" not in [column.title for column in peer_table(rows_of(path, "comparisons")).columns]
    assert "MiB" not in [column.title for column in subject_table(rows_of(path, "subjects")).columns]


def test_a_peer_that_was_not_there_is_said(tmp_path):
    path = write_peers(tmp_path)
    assert "left out" not in text_of(page_of(tmp_path, tmp_path))
    edit(path, left_out="performer-pytorch is left out: not installed")
    assert "performer-pytorch is left out: not installed." in text_of(page_of(tmp_path, tmp_path))


def test_benchmarks_are_found_beside_runs_or_where_one_says(tmp_path):
    make_run(tmp_path / "runs" / "a")
    nothing = text_of(page_of(tmp_path, tmp_path / "runs"))
    for command in ("model", "attention", "peers"):
        assert f"klformer bench {command} --out bench" in nothing
    assert nothing.count("Missing: ") - text_of(page_with(tmp_path)).count("Missing: ") == 4
    for path in (tmp_path / "bench", tmp_path / "bench" / "model.json"):
        assert len(collect([tmp_path / "runs"], bench=path).benchmarks_of("model")) == 1
    assert collect([], bench=tmp_path / "bench" / "peers.json").benchmarks_of("model") == []
    found = collect([tmp_path], bench=tmp_path / "bench")  # each counts once
    assert [len(found.benchmarks_of(kind)) for kind in ("attention", "model", "peers")] == [1, 1, 1]


def page_with(tmp_path):
    write_benchmark(tmp_path / "bench" / "attention.json")
    write_models(tmp_path / "bench")
    write_peers(tmp_path / "bench")
    return page_of(tmp_path, tmp_path / "runs", bench=tmp_path / "bench")


def test_a_file_may_have_any_name(tmp_path):
    write_models(tmp_path, tasks=("image",), lengths=()).rename(tmp_path / "monday.json")
    (benchmark,) = collect([], bench=tmp_path / "monday.json").benchmarks
    assert {row["task"] for row in benchmark.rows("speed")} == {"image"}


def test_several_benchmarks_of_a_kind_stand_one_after_the_other(tmp_path):
    for number in "ab":
        write_models(tmp_path / number, tasks=("text",))
        write_peers(tmp_path / number)
        write_benchmark(tmp_path / number / "attention.json")
    page = page_of(tmp_path, tmp_path)
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    files = {path.name for path in (tmp_path / "out" / "report-figures").iterdir()}
    assert {"model-speed-text.svg", "model-speed-text-2.svg", "memory-against-length-2.svg"} <= files


def test_a_benchmark_of_a_part_has_the_rest_missing(tmp_path):
    write_models(tmp_path / "speed", tasks=("text",), lengths=())
    write_models(tmp_path / "length", tasks=())
    speed, length = (text_of(page_of(tmp_path, tmp_path / part)) for part in ("speed", "length"))
    assert "Missing: memory of the whole Text model against length" in speed
    assert "Missing: speed and memory of whole models" not in speed
    assert "Missing: speed and memory of whole models" in length


def test_numbers_that_are_not_there_are_missing(tmp_path):
    path = write_models(tmp_path, tasks=("text",))
    content = json.loads(path.read_text())
    for row in (*content["speed"], *content["length"]):
        row |= {"memory": float("nan"), "relative": None, "steps_per_second": {"median": 10**400}}
        row |= {"batch_size": None}
    content["speed"][1]["memory"] = 2**20
    edit(path, environment=None, options={}, **{key: content[key] for key in ("speed", "length")})
    table = output.speed_table(rows_of(path, "speed"))
    assert column(table, "relative, processor")["gmm-rks"] == "4.00"
    assert column(table, "MiB") == {"softmax": DASH, "gmm-rks": "1", "fastfood-prf": DASH}
    cells = [cell for row in output.length_table(rows_of(path, "length")).rows for cell in row[1:]]
    assert {cell.text for cell in cells} <= {"not run", DASH}
    text = text_of(page_of(tmp_path, tmp_path))
    assert "machine and date unknown" in text
    assert f"A step has {DASH} sequences (in the paper 32; limited to 4 on the CPU)" in text
    assert "nan" not in text.lower().split()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("attention.json", '{"results": 3}', r"attention\.json has no list of results"),
        ("attention.json", '{"results": [{"name": "a", "length": "b"}]}', r"attention\.json is not a benchmark"),
        ("attention.json", '{"results": [{"name": "a", "length": 1, "seconds": 2}]}', r"seconds must be an object"),
        (
            "attention.json",
            '{"results": [], "sizes": 3}',
            r"attention\.json .* sizes must be an object, got 3",
        ),
        ("model.json", "{}", r"model\.json is not a benchmark of attentions, models or peers"),
        ("model.json", '{"layers": 3}', r"model\.json is not a benchmark .* none of results, speed, comparisons"),
        ("model.json", '{"speed": [', r"model\.json is not JSON"),
        ("model.json", "[" * 100000, r"model\.json is not JSON"),
        ("model.json", "7" * 5000, r"model\.json is not JSON"),
        ("model.json", '{"speed": []}', r"model\.json has no list of length"),
        ("model.json", '{"speed": [3], "length": []}', r"model\.json has no list of speed"),
        ("model.json", '{"speed": [{"task": "a"}], "length": []}', r"model\.json: a row of speed has no 'attention'"),
        (
            "model.json",
            '{"speed": [{"task": "a", "attention": "b", "length": 0}], "length": []}',
            r"model\.json .* length must be a positive number, got 0",
        ),
        (
            "model.json",
            '{"speed": [{"task": "a", "attention": "b", "length": 1, "relative": 7}], "length": []}',
            r"model\.json .* relative must be an object, got 7",
        ),
        ("peers.json", '{"comparisons": []}', r"peers\.json has no list of subjects"),
        ("peers.json", '{"comparisons": [{"peer": "a"}]}', r"peers\.json: a row of comparisons has no 'klformer'"),
        ("peers.json", b"\xff", r"can't read .*peers\.json"),
    ],
)
def test_what_is_broken_is_named(tmp_path, file, content, message):
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    for found in (collect([tmp_path]), collect([], bench=tmp_path / file)):
        (damaged,) = found.damaged
        assert re.search(message, damaged.problem)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no benchmark .*nowhere; `klformer bench attention"):
        collect([], bench=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no benchmark in .*\(attention\.json, model\.json, peers\.json\)"):
        collect([], bench=tmp_path)


def test_names_of_benchmarks_are_text(tmp_path):
    hostile_benchmarks(tmp_path / "bench")
    page = page_of(tmp_path, tmp_path / "bench")
    elements = Elements(page)
    assert elements.open == []
    assert [tag for tag, _ in elements.found].count("script") == 1
    assert "img" not in {tag for tag, _ in elements.found}
    assert page.count("&lt;script&gt;window.hacked = 1&lt;/script&gt;") > 20
    assert all(re.fullmatch(r"[a-z0-9.-]+\.svg", path.name) for path in (tmp_path / "out" / "report-figures").iterdir())


def test_labels_of_lengths_have_room():
    lengths = {1024, 2048, 3072, 4096, 8192, 16384, 32768, 65536}
    assert ticks_of(lengths) == [65536, 32768, 16384, 8192, 4096, 2048, 1024]
    assert ticks_of({64}) == [64]
