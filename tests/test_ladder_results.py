"""Result files of the ladder: damaged ones are refused in one sentence, and nothing that was measured is lost."""

import json
from pathlib import Path

import pytest

from deepdecode.__main__ import main
from deepdecode.bench.files import save_results
from deepdecode.ladder.gates import Gate
from deepdecode.ladder.results import make_room, read_results, set_aside
from deepdecode.ladder.table import gate_table

RESULTS = sorted((Path(__file__).parents[1] / "results").glob("*/ladder-*.json"))


@pytest.fixture
def document():
    return json.loads(RESULTS[0].read_text())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_was_measured_is_read(path):
    assert len(read_results(path)["rows"]) == len(json.loads(path.read_text())["rows"]) > 0


@pytest.mark.parametrize(
    ("damage", "got"),
    [
        (lambda d: d.update(schema=2), "schema 2, not 1"),
        (lambda d: d.pop("rows"), "no rows"),
        (lambda d: d.update(rows=5), "no rows"),
        (lambda d: d.pop("device"), "no device"),
        (lambda d: d.update(rungs={"0": 1}), "a rung '0' that is not described"),
        (lambda d: d["rows"].insert(1, None), "no rung that it names, or no concurrency, in row 2"),
        (lambda d: d["rows"][0].update(rung="9"), "no rung that it names, or no concurrency, in row 1"),
        (lambda d: d["rows"][2].update(us_warm="fast"), "no us_warm in row 3"),
        (lambda d: d["rows"][0].update(us_warm_low=0), "no us_warm_low in row 1"),
        (lambda d: d["rows"][0].update(floor_us=float("nan")), "no floor_us in row 1"),
        (lambda d: d["rows"][0].pop("profile"), "no profile in row 1"),
        (lambda d: d["rows"][0]["profile"]["categories"].update(moe=3), "a profile without its numbers in row 1"),
        (lambda d: d["rows"][0]["gates"].append(7), "a gate that is not described in row 1"),
        (lambda d: d["rows"][0].update(compiled=3), "a profile without its numbers in row 1"),
        (lambda d: d["rows"][0].update(trace="../../secrets.json"), "a trace that is not beside it in row 1"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, capsys, document, damage, got):
    damage(document)
    path = tmp_path / "l.json"
    path.write_text(json.dumps(document))
    assert main(["ladder", "--report", str(path), "--no-findings"]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: ladder: {path} must be a result file of the ladder, got {got}\n"
    assert not shown.out


def test_brackets_without_end_are_refused(tmp_path):
    path = tmp_path / "l.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="must be JSON, got "):
        read_results(path)


def test_a_folder_that_cannot_be_written_is_found_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^ladder: --out must be a folder to write in, got .*file/h200: "):
        make_room(tmp_path / "file" / "h200" / "ladder-tp8.json")
    make_room(tmp_path / "new" / "h200" / "ladder-tp8.json")
    assert not list((tmp_path / "new" / "h200").iterdir())


def test_what_a_new_run_would_overwrite_is_set_aside(tmp_path, capsys, document):
    path = tmp_path / "ladder-tp8.json"
    set_aside(path, [])
    save_results(path, document)
    before = path.read_text()
    # all rows are kept: nothing to set aside
    set_aside(path, document["rows"])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    set_aside(path, document["rows"][1:])
    assert (tmp_path / "ladder-tp8.json.before").read_text() == before
    assert capsys.readouterr().err == f"ladder: {path} is begun anew; what it held is in {path}.before\n"
    # what cannot be read may be something else of the user's
    path.write_text("notes")
    set_aside(path, [])
    assert (tmp_path / "ladder-tp8.json.before").read_text() == "notes"


def test_an_error_that_is_no_number_is_written_as_json():
    for error in (float("nan"), float("inf")):
        told = Gate("its worst row", error, 1e-2, "4 tokens").told()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert (told["error"], told["passed"]) == (None, False)
        small = {"name": "its worst row", "error": 1e-3, "bound": 1e-2, "passed": True, "note": "1 tokens"}
        table = gate_table({"rows": [{"rung": "0", "gates": [small]}, {"rung": "0", "gates": [told]}]})
        assert table.rows == (("0", "its worst row", "not finite", "1.00e-02", "FAILED", "4 tokens"),)
