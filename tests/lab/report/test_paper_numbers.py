"""The paper's figures that are data in the package, held against each other."""

import pytest

from klformer.attention import attention_names
from klformer.lab.report.paper_numbers import EIGENVALUES, ERRATA, GLUE, GLUE_CELLS, LRA, RANDOM


def test_averages_of_the_lra_table_and_their_misprint():
    wrong = [row.attention for row in LRA if row.average_is_misprinted()]
    assert wrong == ["linformer"]
    linformer = next(row for row in LRA if row.attention == "linformer")
    assert linformer.average == 52.56
    assert round(linformer.row_average(), 2) == 47.08
    assert "52.56" in ERRATA["linformer-average"]
    assert "47.08" in ERRATA["linformer-average"]
    assert not RANDOM.average_is_misprinted()


def test_the_papers_models_are_this_librarys_attentions():
    assert {row.attention for row in LRA} <= set(attention_names())
    assert set(GLUE) <= set(attention_names())
    assert len({row.attention for row in LRA}) == len(LRA) == 17
    assert all(len(row) == len(GLUE_CELLS) for row in GLUE.values())


def test_the_best_of_the_paper_are_those_that_it_prints_in_bold():
    best = {task: max(LRA, key=lambda row: row.accuracy(task)).attention for task in ("listops", "text", "retrieval")}
    assert best == {"listops": "generative-prf", "text": "generative-rks", "retrieval": "fastfood-prf"}
    assert max(LRA, key=lambda row: row.row_average()).attention == "fastfood-prf"


@pytest.mark.parametrize("table", EIGENVALUES, ids=lambda table: f"{table.task}-{table.attention}")
def test_eigenvalue_summaries_follow_from_the_heads_but_for_one_misprint(table):
    assert len(table.heads) == 12  # three layers of four heads
    assert all(low < mean < high for low, high, mean in table.heads)
    assert table.mean() == pytest.approx(table.printed_mean, abs=0.0006)
    if (table.task, table.attention) == ("retrieval", "gmm-prf"):
        assert table.printed_maximum == 0.186
        assert round(table.maximum(), 3) == 0.211
        assert "0.211" in ERRATA["eigenvalue-maximum"]
    else:
        assert table.maximum() == pytest.approx(table.printed_maximum, abs=0.001)
