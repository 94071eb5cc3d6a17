"""Tables on a terminal that is narrower than they are."""

import io

import pytest
from rich.console import Console

from fedbcgd.core.ledger import Ledger
from fedbcgd.display.tables import text_table
from fedbcgd.engine.loop import Outcome
from fedbcgd.runs import compare


def shown(table, columns):
    console = Console(width=columns, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def outcome(seed):
    row = {"round": 100 + seed, "test_accuracy": 0.2931 + 0.02 * seed, "test_loss": 2.1 + 0.2 * seed}
    return Outcome("fedbcgd", [row], Ledger(4, 4, 1), 100 + 10 * seed, 50.0 + 10 * seed, "rounds")


@pytest.mark.parametrize(("columns", "tables"), [(140, 1), (110, 2), (80, 2), (60, 4)])
def test_a_comparison_is_split_into_tables_where_it_does_not_fit(columns, tables):
    text = shown(compare.table({"fedbcgd+derived": {k: outcome(k) for k in range(2)}}), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert text.count("fedbcgd+derived") == text.count("algorithm") == tables
    for words in (
        "0.3031 ± 0.0141",
        "2.2000 ± 0.1414",
        "105 ± 7",
        "55 ± 7",
        "evaluations",
        "of a client, MB",
        "seconds",
    ):
        assert text.count(words) == 1
    assert text.count("mean ± standard deviation") == 1


def test_a_long_name_is_wrapped():
    text = shown(text_table("", ("options", "loss", "rounds"), [("lr 0.1, momentum 0.5, blocks 5", 0.1234, 100)]), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("0.1234") == text.count("100") == text.count("options") == 1
    assert all(word in text for word in ("lr 0.1,", "momentum", "blocks 5"))
