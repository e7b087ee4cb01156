"""Pictures of result files: what is drawn, read back from the axes and the pixels."""

import json
import sys

import pytest

from deepdecode.__main__ import main
from deepdecode.bench import plots
from deepdecode.bench.plots import plot_results, series

pytest.importorskip("matplotlib")


def row(implementation, T, H=8, fmt="fp8_584", extra_keys=512, **values):
    case = {"op": "attention", "implementation": implementation, "T": T, "H": H, "window_keys": 128}
    return case | {"extra_keys": extra_keys, "fmt": fmt, "floor_us": 0.1 * T} | values


ROWS = [
    row("flash_mla", 8, us_warm=21.0, us_rotated=23.0),
    row("flash_mla", 1, us_warm=16.7, us_rotated=17.0),
    row("deepdecode", 8, us_warm=5.8, us_rotated=7.5),
    row("deepdecode", 1, us_warm=4.8, us_rotated=5.0),
    row("deepdecode", 1, H=64, us_warm=5.5, us_rotated=6.5),
    # no time: a failed check, another op, a time that is none
    row("deepdecode", 16, error="outside the error bounds"),
    row("sglang fallback", 1, us_warm=float("nan")),
    row("deepdecode", 1, fmt="bf16", us_warm=6.0),
    {"op": "indexer", "implementation": "deepdecode", "us_warm": 1.0},
]


def write(path, rows=ROWS):
    path.write_text(json.dumps({"schema": 1, "device": {"name": "NVIDIA H200", "arch": 90}, "rows": rows}))
    return path


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    return figures


def test_one_picture_for_each_form_and_key_count(tmp_path, drawn):
    files = plot_results(write(tmp_path / "attention.json"))
    assert [file.name for file in files] == ["attention_fp8_584_128_512.png", "attention_bf16_128_512.png"]
    assert all(file.parent == tmp_path and file.read_bytes().startswith(b"\x89PNG") for file in files)
    first, second = drawn
    assert first.get_suptitle() == "attention, 128+512 keys, fp8_584 rows, NVIDIA H200"
    titles = [axes.get_title() for axes in first.axes]
    assert titles == ["8 heads, warm", "64 heads, warm", "8 heads, rotated past L2", "64 heads, rotated past L2"]
    # only a warm time was measured there
    assert [axes.get_title() for axes in second.axes] == ["8 heads, warm"]
    assert [text.get_text() for text in first.legends[0].get_texts()] == ["deepdecode", "flash_mla", "floor"]


def test_lines_are_the_rows(tmp_path, drawn):
    plot_results(write(tmp_path / "attention.json"))
    for axes, mine, theirs in ((drawn[0].axes[0], [4.8, 5.8], [16.7, 21.0]), (drawn[0].axes[2], [5.0, 7.5], [17.0, 23.0])):
        lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        assert lines == {"deepdecode": ([1, 8], mine), "flash_mla": ([1, 8], theirs), "floor": ([1, 8], [0.1, 0.8])}
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    colours = {line.get_label(): line.get_color() for axes in drawn[0].axes + drawn[1].axes for line in axes.lines}
    assert len(set(colours.values())) == 3
    for axes in drawn[0].axes + drawn[1].axes:
        assert all(line.get_color() == colours[line.get_label()] for line in axes.lines)


def test_white_paper_in_a_dark_style_and_the_same_bytes(tmp_path):
    import matplotlib
    from matplotlib.image import imread

    path = write(tmp_path / "attention.json")
    before = [file.read_bytes() for file in plot_results(path)]
    with matplotlib.rc_context({"axes.facecolor": "black", "figure.facecolor": "black", "text.color": "white"}):
        files = plot_results(path)
        assert matplotlib.rcParams["axes.facecolor"] == "black"
    assert [file.read_bytes() for file in files] == before
    pixels = imread(files[0])[..., :3]
    assert (pixels[0] == 1).all()
    assert pixels.mean() > 0.9


def test_a_point_measured_twice_is_its_later_row():
    rows = [row("deepdecode", 4, us_warm=9.0), row("deepdecode", 2, us_warm=3.0), row("deepdecode", 4, us_warm=8.0)]
    assert series(rows, "us_warm") == {"deepdecode": ([2, 4], [3.0, 8.0])}
    assert series(rows, "us_rotated") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "attention.json must be JSON, got Expecting property name"),
        ("[" * 100000, "attention.json must be JSON, got brackets nested too deep"),
        ("[]", "attention.json must be a result file with a list of rows, got none"),
        ('{"rows": [1]}', "attention.json must be a result file with a list of rows, got none"),
        ('{"rows": [{"op": "attention", "us_warm": 1}]}', "must have implementation in every row, got none in row 1"),
        ('{"rows": [{"op": "indexer", "us_warm": 1}]}', "must have a row of attention with a time, got 1 rows without one"),
    ],
)
def test_refuses(tmp_path, capsys, text, message):
    path = tmp_path / "attention.json"
    path.write_text(text)
    assert main(["bench", "--plot", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]


def test_the_command(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "attention.json")
    assert main(["bench", "attention", "--plot", str(path)]) == 0
    assert capsys.readouterr().out.split() == [str(file) for file in sorted(tmp_path.glob("*.png"), reverse=True)]
    assert main(["bench", "--plot", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", str(path)]) == 2
    assert "hint: pip install 'deepdecode[report]'" in capsys.readouterr().err


def test_every_rival_of_the_benchmark_looks_different():
    from deepdecode.bench.__main__ import jobs

    # what is run as PTX has no time to draw
    rivals = {implementation for _, implementation, runner, _ in jobs(True) if not isinstance(runner, int)}
    assert len(rivals) > 5
    assert len(set(zip(plots.COLOURS, plots.MARKERS, strict=True))) >= len(rivals)
