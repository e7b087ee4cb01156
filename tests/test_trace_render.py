"""Documents for terminals, pipes and markdown; names that try to be something else."""

import io
import re

import pytest

from deepdecode.trace.render import (
    Bullets,
    Code,
    Doc,
    Table,
    clean,
    distinct,
    markdown,
    plain,
    quote,
    short,
    show,
    signed_percent,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "[/x] [bold red]b[/]",
    "a|b\\|c",
    "`rm -rf`",
    "one\ntwo\r\nthree",
    "\u202eevil\u202c\u200b",
    ":smile: {{7*7}} %s {0}",
    "@someone https://x.y www.x.y",
    "![i](http://x) # * _ ~~x~~ &lt;",
    "\ud800 lone",
    "\x9b31m c1",
]


def table(*names):
    return Doc(
        "t",
        (Table("kernels", ("name", "n"), "lr", tuple((Code(n), "1") for n in names)), Bullets("b", tuple(map(quote, names)))),
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", HOSTILE)
def test_no_writer_lets_a_name_act(name, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    doc = table(name)
    terminal = Terminal()
    show(doc, terminal)
    bold_only = re.sub(r"\x1b\[[0-3]?m", "", terminal.getvalue())  # NO_COLOR leaves bold and dim
    for text in (plain(doc), bold_only, markdown(doc)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\ud800-\udfff]", text)
        assert clean(name)[:3].replace("`", "'").replace("|", "¦") in text.replace("`", "'").replace("|", "¦")
    assert plain(doc).count("\n") == 9  # a newline in a name does not make a line
    rows = [line for line in markdown(doc).splitlines() if line.startswith("|")]
    assert [row.count("|") for row in rows] == [3, 3, 3]
    outside = re.sub(r"`[^`]*`", "", markdown(doc))
    assert not re.search(r"[<\[@!]|http", outside)


def test_rich_shows_markup_as_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    show(table("[/x] [bold]b[/] :smile:"), terminal)
    assert "[/x] [bold]b[/] :smile:" in terminal.getvalue()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_narrow_terminal_cuts_no_figure(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    figures = tuple(f"{i}23.456789" for i in range(1, 9))
    doc = Doc(
        "t", (Table("x", ("name", *(f"column {i}" for i in range(8))), "l" + "r" * 8, ((Code("kernel_" * 9), *figures),)),)
    )
    terminal = Terminal()
    show(doc, terminal)
    for figure in figures:
        assert figure in terminal.getvalue()
    assert "column 7" in terminal.getvalue()


def test_plain_columns_line_up():
    doc = Doc("t", (Table("", ("name", "ms"), "lr", (("a", "1.0"), (Code("漢字"), "12.0"), ("é", "3"))),))
    assert plain(doc) == "t\n\n  name    ms\n  ----  ----\n  a      1.0\n  漢字  12.0\n  é        3\n"


def test_a_pipe_gets_no_escape_codes():
    out = io.StringIO()
    show(table("k"), out)
    assert out.getvalue() == plain(table("k"))


def test_dumb_terminal_gets_plain(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    show(table("k"), terminal)
    assert terminal.getvalue() == plain(table("k"))


def test_names_are_shortened_in_the_middle():
    name = "void cutlass::" + "x" * 200 + "::run<3>"
    assert len(short(name)) == 64
    assert short(name).startswith("void cutlass::")
    assert short(name).endswith("::run<3>")
    assert isinstance(short("k"), Code)


def test_shortened_names_stay_apart():
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<c10::BFloat16>, std::array<char*, 3ul>>(int, {})"
    tail = "at::native::memory::LoadWithoutCast, std::array<char*, 3ul>"
    functors = ("CUDAFunctor_add", "MulFunctor", "MulFunctor_scalar", "silu_kernel")
    names = [kernel.format(functor, tail) for functor in functors] + ["other", kernel.format("silu_kernel", tail + "9")]
    for width in (48, 64, 100):
        shown = distinct(names, width)
        assert len(set(shown.values())) == len(names)
        assert all(len(text) <= width for text in shown.values())
        assert all(functor in shown[kernel.format(functor, tail)] for functor in functors[:3])
        assert all(text.startswith("void at::native::") for name, text in shown.items() if name != "other")
    assert shown["other"] == "other"
    by_end = [kernel.format("CUDAFunctor_add", tail), kernel.format("MulFunctor", tail + ", int")]  # the word, not the end
    assert ["CUDAFunctor_add" in (texts := list(distinct(by_end).values()))[0], "MulFunctor" in texts[1]] == [True, True]
    # one is a literal escape of the other: only a number can tell them apart
    assert list(distinct(["a\n", "a\\n"]).values()) == ["a\\n #1", "a\\n #2"]
    assert distinct([name * 9 for name in HOSTILE])[HOSTILE[1] * 9].isprintable()


def test_our_sentences_keep_their_code_in_markdown():
    doc = Doc("`a` -> b", ("5 < 6, *x* and snake_case, a `k_1|2` here",))
    assert markdown(doc) == "## `a` -> b\n\n5 \\< 6, \\*x\\* and snake_case, a `k_1¦2` here\n"


@pytest.mark.parametrize(
    ("before", "after", "text"), [(2, 1, "-50.0 %"), (0, 1, "new"), (0, 0, "-"), (1, 1, "0.0 %"), (1e6, 999_990, "0.0 %")]
)
def test_signed_percent(before, after, text):
    assert signed_percent(before, after) == text
