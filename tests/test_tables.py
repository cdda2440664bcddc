"""Tables of text, as people will see them."""

from mpgluon_tools.tables import Table

import pytest

TABLE = Table(
    ("layer", "share", "bytes"), [("conv0", "12.5 %", "1,024"), ("a longer name", "-", "8")]
)


def test_words_are_aligned_left_and_figures_right():
    assert str(TABLE).splitlines() == [
        "layer           share  bytes",
        "conv0          12.5 %  1,024",
        "a longer name       -      8",
    ]


def test_a_document_gets_rules_that_say_how_columns_are_aligned():
    assert TABLE.to_markdown().splitlines() == [
        "| layer         |  share | bytes |",
        "| ------------- | -----: | ----: |",
        "| conv0         | 12.5 % | 1,024 |",
        "| a longer name |      - |     8 |",
    ]


def test_a_notebook_gets_an_escaped_table_with_figures_on_the_right():
    page = Table(("layer", "error"), [("a<b", "0.5")]).to_html()
    assert page.startswith("<table>")
    assert '<td style="text-align: left">a&lt;b</td>' in page
    assert '<td style="text-align: right">0.5</td>' in page


FIGURES = ("0", "-1.5", "1e-05", "inf", "nan", "3 MiB", "<0.1 %", "2,000")
WORDS = ("conv0", "3 of 5", "multi_precision", "not known")


@pytest.mark.parametrize("text", [*FIGURES, *WORDS])
def test_figures_are_recognized(text):
    assert Table(("a",), [(text,)]).numeric == [text in FIGURES]


def test_a_table_without_rows_is_its_headings():
    assert str(Table(("one", "two"), [])) == "one  two"


def test_uneven_rows_are_refused():
    with pytest.raises(ValueError, match="a row has 2 cells"):
        Table(("one", "two"), [("only",)])
