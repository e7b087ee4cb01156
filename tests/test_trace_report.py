"""The report page in a real browser, and the documents it shares its numbers with."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from chromium import Browser, find
from made_profiles import profile

from deepdecode.trace import html
from deepdecode.trace.advise import advise
from deepdecode.trace.compare import compare
from deepdecode.trace.model import Health, Profile, Slice, Timeline, TraceError, Warning
from deepdecode.trace.redact import redact_command, redact_profile
from deepdecode.trace.render import plain
from deepdecode.trace.report import advice_doc, change, comparison_doc, profile_doc, to_json

HOSTILE = [
    "</script><script>window.hit=1</script>",
    "<img src=http://127.0.0.1:9/x onerror=window.hit=1>",
    '"><svg onload=window.hit=1>',
    "</title></style><style>*{display:none}</style>",
    "{{7*7}}{% raw %}<!--",
    "\x1b[31m[/x]|`x`\n\u202e\ud800]]>",
    "javascript:window.hit=1",
]
CATEGORIES = ["attention", "gemm_simt", "glue", "norm", "moe", "mhc", "topk"]
LABELS = ["before <b>", "after </title>"]


def pair():
    times = [27.0, 4.0, 9.0, 2.5, 1.0, 0.5, 0.25]
    before = [(name, cat, ms) for name, cat, ms in zip(HOSTILE, CATEGORIES, times, strict=True)]
    after = [(name, cat, ms / (5 if cat == "attention" else 1)) for name, cat, ms in before]
    warnings = [Warning("w", "a <script>window.hit=1</script> warning")]
    return [profile(before, name="a", warnings=warnings, gpu="GPU <b>"), profile(after, name="b", gpu="GPU <b>")]


def report(tmp_path, profiles=None, labels=LABELS):
    profiles = profiles or pair()
    path = tmp_path / "report.html"
    html.write_html(path, profiles, labels, compare(profiles, labels), advise(profiles[1], labels[1]))
    return path


class Tags(HTMLParser):
    """Every tag and attribute that a parser sees."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]


def test_names_add_no_tag_and_no_attribute(tmp_path):
    ours = Tags(report(tmp_path, [profile([("k", c, 1.0) for c in CATEGORIES], name=n) for n in "ab"], ["x", "y"]).read_text())
    text = report(tmp_path).read_text()
    seen = Tags(text)
    assert {"img", "iframe", "link", "a"}.isdisjoint(seen.tags)
    assert seen.tags.count("script") == ours.tags.count("script") == 2
    assert seen.tags.count("style") == 1
    assert {name for _, name, _ in seen.attributes} <= {name for _, name, _ in ours.attributes}
    assert not [name for _, name, _ in seen.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", text)
    assert "49" not in re.findall(r"<code>\{\{.*?</code>", text)[0]


def test_page_is_one_offline_file(tmp_path):
    path = report(tmp_path)
    text = path.read_text()
    assert "default-src 'none'" in text
    assert "_HASH" not in text
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", re.sub(r"<code>.*?</code>", "", text))
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]  # no temporary file stays


def test_page_replaces_whole_or_not_at_all(tmp_path):
    with pytest.raises(TraceError, match=r"report: .*r\.html must be a file that can be written, got No such file"):
        html.write_html(tmp_path / "no" / "r.html", [pair()[0]], ["x"])
    target = tmp_path / "dir"
    target.mkdir()
    with pytest.raises(TraceError, match=r"report: .*dir must be a regular file, got something else"):
        html.write_html(target, [pair()[0]], ["x"])
    assert [p.name for p in tmp_path.iterdir()] == ["dir"]


def test_missing_jinja_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(TraceError, match="report: jinja2 must be installed for --html") as caught:
        html.write_html(tmp_path / "r.html", [pair()[0]], ["x"])
    assert caught.value.hint == "pip install 'deepdecode[report]'"


def test_bars_add_up_to_the_step():
    bars = html._bars(pair(), ["a", "b"])
    for bar, one in zip(bars, pair(), strict=True):
        ms = sum(float(segment.label.split(": ")[1].split(" ")[0]) for segment in bar.segments)
        assert ms == pytest.approx(one.device.window_ns / 8 / 1e6, abs=0.005)
    assert sum(segment.width for segment in bars[0].segments) == pytest.approx(html.WIDTH, abs=0.1)
    ratio = sum(s.width for s in bars[1].segments) / sum(s.width for s in bars[0].segments)
    assert ratio == pytest.approx(pair()[1].device.window_ns / pair()[0].device.window_ns, rel=1e-3)


def test_overlapping_kernels_get_rows_of_their_own():
    timeline = Timeline(
        0,
        100,
        ("a", "b"),
        ("glue", "norm"),
        (Slice(7, 0, 40, 0), Slice(7, 30, 40, 1), Slice(7, 70, 30, 0), Slice(9, 0, 100, 1)),
    )
    rows, names = html._rows(timeline)
    assert rows == [0, 1, 0, 2]
    assert names == ["stream 7", "", "stream 9"]


def test_a_page_shows_the_busiest_streams_and_says_how_much_it_left_out():
    slices = tuple(Slice(i, i, 10 + i, 0) for i in range(1000))
    lanes = html._lanes(replace_timeline(pair()[0], Timeline(0, 3000, ("a",), ("glue",), slices, left_out=5)), "x")
    assert len(lanes.streams) == html.MAX_LANES
    assert lanes.streams[-1][1] == "stream 999"
    assert lanes.note == f"{html.MAX_LANES} activities; {5 + 1000 - html.MAX_LANES} left out"
    deep = tuple(Slice(7, i, 5000, 0) for i in range(1000))  # one stream, all at once
    lanes = html._lanes(replace_timeline(pair()[0], Timeline(0, 6000, ("a",), ("glue",), deep)), "x")
    assert len(lanes.streams) == html.MAX_LANES


def replace_timeline(profile: Profile, timeline: Timeline) -> Profile:
    return replace(profile, devices=(replace(profile.devices[0], timeline=timeline), *profile.devices[1:]))


def test_huge_timelines_are_thinned_and_say_so():
    n = 20_000
    timeline = Timeline(0, n * 10, ("a", "b"), ("glue", "norm"), tuple(Slice(7, i * 10, 9, i // 100 % 2) for i in range(n)))
    merged = html._merge(timeline, [0] * n)
    assert len(merged) <= html.MAX_SLICES
    assert sum(number for *_, number in merged) == n
    assert merged[0][:2] == (0, 0)
    assert max(end for _, _, end, _, _ in merged) == n * 10 - 1


def test_empty_profile_has_a_page():
    empty = Profile(1, (), (), (), None, "cpu-only", (), None, Health(events=5, capture="cpu-only"), ())
    assert "holds no GPU activity" in html.page([empty], ["x"])
    assert "there is no time to account for" in plain(profile_doc(empty, "x"))


def test_ranks_and_gaps_are_on_the_page():
    two = profile([("k", "collective", 4.0)], gpus=2, idle=1.0)
    text = html.page([two], ["x"])
    assert text.count('<td class="l">NVIDIA H200</td><td>5.000</td><td>4.000</td><td>1.000</td><td>4.000</td>') == 2
    assert '<td>500.00</td><td class="k"><code>k</code></td>' in text


def test_profile_doc_numbers():
    text = plain(profile_doc(pair()[0], "x"))
    row = next(line for line in text.splitlines() if line.startswith("  attention"))
    assert row.split() == ["attention", "27.000", "61.0", "%", "43", "216.000"]
    assert re.search(r"^  idle +1\.000 +8\.000$", text, re.MULTILINE)


def test_comparison_doc_numbers():
    profiles = pair()
    text = plain(comparison_doc(compare(profiles, ["x", "y"])))
    row = next(line for line in text.splitlines() if line.startswith("  attention"))
    assert row.split() == ["attention", "27.000", "61.0", "%", "43", "5.400", "23.8", "%", "43", "-21.600", "-80.0", "%"]
    row = next(line for line in text.splitlines() if re.match(r"  step +\d", line))
    assert row.split() == ["step", "45.250", "23.650", "-21.600", "-47.7", "%"]


def test_a_capture_without_steps_is_called_one():
    none = "none: the whole capture is one step"
    health = Health(events=1, orphans=1, overlapping=1)
    one = profile([("k", "glue", 4.0)], signal=none, steps=1, agreement=0.0, phase="unknown", batch=None, gpu="", health=health)
    text = plain(profile_doc(one, "x"))
    assert text.startswith("`x`: phase unknown, no steps found: capture of 5.000 ms\n")
    assert "no signal tells steps apart (votes: `" in text
    assert "1 activity starts before" in text
    assert "1 record in us; 1 kernel has no launch in the file" in text
    for odd in ("signals agree", "1 by", "p50 5", "1 steps", "1 gaps", "1 records"):
        assert odd not in text
    page = html.page([one], ["x"])
    assert "phase unknown, no steps found: capture of 5.000 ms" in page
    assert "signals agree" not in page
    assert "phase unknown, no steps found: 5.000 ms in all, 4.000 busy, 1.000 idle." in plain(advice_doc(advise(one, "x")))
    both = plain(comparison_doc(compare([one, replace(one, sources=pair()[0].sources)], ["x", "y"], ["same-file"])))
    assert re.search(r"^  steps +none found +none found$", both, re.MULTILINE)
    assert "no change, 5.000 -> 5.000 ms in all (0.0 %)" in both


def test_rows_of_a_comparison_stay_apart_and_say_what_is_gone():
    functor = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float>, std::array<char*, 3ul>>(int, std::array)"
    )
    base = [(functor.format(name), "glue", 2.0) for name in ("MulFunctor", "CUDAFunctor_add")]
    columns = [base, [*base, ("middle_kernel", "moe", 5.0)], base]
    labels = ["a", "b", "c"]
    comparison = compare([profile(k, name=n) for k, n in zip(columns, labels, strict=True)], labels)
    text = plain(comparison_doc(comparison))
    first = next(line for line in text.splitlines() if line.startswith("  middle_kernel"))
    assert first.split()[-2:] == ["-", "gone"]
    assert [word in text for word in ("MulFunctor", "CUDAFunctor_add")] == [True, True]
    assert change([3_000_000, None, None]) == ("-3.000", "gone")
    assert change([None, None, 1_000_000]) == ("+1.000", "new")
    assert "<td>gone</td>" in html.page([profile(k, name=n) for k, n in zip(columns, labels, strict=True)], labels)


def test_redaction(tmp_path):
    secret = profile([("/home/alice/project/k.py: kern", "attention", 4.0)], name="worker0-alice")
    redacted = redact_profile(secret, 0)
    text = to_json(redacted) + plain(profile_doc(redacted, "trace-1")) + html.page([redacted], ["trace-1"])
    for word in ("alice", "/data", "/home", "step[DECODE", "json.gz"):
        assert word not in text
    assert redacted.sources[0].sha256 == secret.sources[0].sha256
    assert "<path>: kern" in redacted.device.kernel_rows[0].name
    assert (
        redact_command(["compare", "/a/b", "--label=x", "--json", "/c"])
        == "deepdecode compare <...> --label=<...> --json <...>"
    )


def test_json_holds_even_broken_names():
    data = json.loads(to_json(pair()[0]))
    assert data["schema"] == 1
    assert {row["name"] for row in data["devices"][0]["kernel_rows"]} == set(HOSTILE)


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = find()
    if binary is None:
        pytest.skip("no Chromium found (install chromium, or name one in CHROMIUM)")
    browser = Browser(binary, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def column(browser, index):
    rows = "[...document.querySelectorAll('#ktable tbody tr')].filter(row => row.offsetParent)"
    return browser.evaluate(f"{rows}.map(row => row.cells[{index}].textContent.trim())")


def click(browser, selector):
    browser.evaluate(f"document.querySelector({selector!r}).click()")


def test_page_runs_without_a_word_and_without_network(browser, tmp_path):
    path = report(tmp_path)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.evaluate("window.hit === undefined")
    assert browser.evaluate("document.title") == "before <b> | after </title>"
    names = column(browser, 0)
    assert names[0] == HOSTILE[0]
    assert len(names) == len(HOSTILE)


def test_an_injected_script_would_be_blocked(browser, tmp_path):
    """The policy holds even if escaping failed: the same page with a script and an image put in by force."""
    path = report(tmp_path)
    path.write_text(path.read_text().replace("<main>", "<main><script>window.hit=1</script><img src=http://127.0.0.1:9/x>"))
    browser.open(path)
    assert browser.evaluate("window.hit === undefined")
    assert len(browser.complaints()) >= 2


def test_sorting(browser, tmp_path):
    browser.open(report(tmp_path))
    click(browser, "#ktable th:nth-child(3) button")  # ms/step before, largest first
    values = [float(text) for text in column(browser, 2)]
    assert values == sorted(values, reverse=True) == [27.0, 9.0, 4.0, 2.5, 1.0, 0.5, 0.25]
    assert browser.evaluate("document.querySelector('#ktable th:nth-child(3)').getAttribute('aria-sort')") == "descending"
    click(browser, "#ktable th:nth-child(3) button")
    assert [float(text) for text in column(browser, 2)] == values[::-1]
    click(browser, "#ktable th:nth-child(1) button")
    names = [name.lower() for name in column(browser, 0)]
    assert names == sorted(names)
    click(browser, "#ktable th:last-child button")
    click(browser, "#ktable th:last-child button")  # the largest fall
    assert float(column(browser, 8)[0]) == -21.6
    assert browser.complaints() == []


def type_filter(browser, text):
    browser.evaluate(
        f"filter.value = {text!r}; filter.dispatchEvent(new Event('input'))".replace(
            "filter", "document.getElementById('filter')"
        )
    )


def test_filtering(browser, tmp_path):
    browser.open(report(tmp_path))
    type_filter(browser, "SCRIPT hit=1")
    assert column(browser, 0) == [HOSTILE[0], HOSTILE[6]]
    assert browser.evaluate("document.getElementById('shown').textContent") == "2 of 7"
    type_filter(browser, "")
    browser.evaluate("const s = document.getElementById('category'); s.value = 'norm'; s.dispatchEvent(new Event('change'))")
    assert column(browser, 1) == ["norm"]


def test_legend_theme_and_timeline(browser, tmp_path):
    browser.scheme("light")
    browser.open(report(tmp_path))
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(background)
    click(browser, "#theme")
    dark = browser.evaluate(background)
    assert (light, dark) == ("rgb(246, 247, 249)", "rgb(16, 19, 23)")
    browser.scheme("dark")
    browser.open(report(tmp_path))
    assert browser.evaluate(background) == dark
    click(browser, "#theme")
    assert browser.evaluate(background) == light
    click(browser, "[data-legend=norm]")
    assert browser.evaluate("[...new Set([...document.querySelectorAll('rect:not(.dim)')].map(r => r.dataset.c))]") == ["norm"]
    click(browser, "[data-legend=norm]")
    assert browser.evaluate("document.querySelectorAll('rect.dim').length") == 0
    click(browser, "[data-for='0'][data-zoom='2']")
    assert browser.evaluate("document.querySelector('svg.tl').getAttribute('viewBox')").startswith("250 0 500 ")
    click(browser, "[data-for='0'][data-zoom='0']")
    assert browser.evaluate("document.querySelector('svg.tl').getAttribute('viewBox')").startswith("0 0 1000 ")
    browser.evaluate("document.querySelector('svg.tl rect').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    readout = browser.evaluate("document.querySelector('.readout').textContent")
    assert readout == f"{HOSTILE[0]}: at 0.000 ms, for {27e3 / 43:.2f} us"
    assert browser.complaints() == []


def test_phone_does_not_scroll_sideways(browser, tmp_path):
    browser.size(360, 740, mobile=True)
    browser.open(report(tmp_path))
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    assert browser.evaluate("document.querySelector('.bar svg').getBoundingClientRect().width") > 250
    browser.size(1280, 900)


def test_print_has_no_controls(browser, tmp_path):
    browser.open(report(tmp_path))
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    shown = "[...document.querySelectorAll('button.act, #filter')].filter(e => e.offsetParent).length"
    assert browser.evaluate(shown) == 0
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(27, 33, 41)"
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000
    browser.size(794, 1123)  # A4: nothing may be cut at the page's edge, of three runs neither
    three = [*pair(), pair()[0]]
    names = ["original", "MMA", "MMA + split-K"]
    html.write_html(tmp_path / "three.html", three, names, compare(three, names))
    browser.open(tmp_path / "three.html")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 794
    browser.size(1280, 900)
    browser.scheme("light")


def test_reads_without_scripts(browser, tmp_path):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report(tmp_path))
        text = browser.call("Runtime.evaluate", expression="document.body.innerText", returnByValue=True)["result"]["value"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "45.250 -> 23.650 ms a step" in text
    assert "Filter by name" not in text
    assert "Zoom in" not in text
