"""What must hold for any profiles: random kernels, odd names, any number of steps."""

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_profiles import profile

from deepdecode.trace import html
from deepdecode.trace.advise import advise
from deepdecode.trace.compare import ACCEPTABLE, compare
from deepdecode.trace.findings import entry
from deepdecode.trace.model import CATEGORIES
from deepdecode.trace.redact import redact_profile
from deepdecode.trace.render import clean, code_span, markdown, plain
from deepdecode.trace.report import advice_doc, comparison_doc, profile_doc, to_json

NAMES = st.text(st.characters(), min_size=1, max_size=40) | st.sampled_from(
    ["a|b", "`", "\\|", "</script>", "[/x]", "\x1b[0m", "\n| x |", "\ud800"]
)
KERNELS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(sorted(CATEGORIES)),
        st.floats(0.001, 50),
        st.fixed_dictionaries({"launches": st.integers(1, 3000), "blocks": st.none() | st.integers(1, 4000)}),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda kernel: kernel[0],
)
PROFILES = st.builds(
    profile,
    KERNELS,
    idle=st.floats(0, 50),
    steps=st.integers(1, 12),
    jitter=st.floats(0, 0.3),
    name=st.sampled_from("ab"),
    gpu=NAMES | st.just(""),
    sms=st.sampled_from([0, 132]),
    batch=st.none() | st.integers(1, 64),
    phase=st.sampled_from(["decode", "prefill", "mixed", "unknown"]),
    graph_mode=st.sampled_from(["full", "piecewise", "eager", "unknown"]),
    agreement=st.floats(0, 1),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(PROFILES, PROFILES)
def test_verdicts_never_contradict_the_numbers(a, b):
    comparison = compare([a, b], ["x", "y"], allow=list(ACCEPTABLE))
    verdict = comparison.verdicts[0]
    before, after = comparison.runs[0].step_ns, comparison.runs[1].step_ns
    assert verdict.word != "refused"
    assert (verdict.word == "faster") <= (after < before)
    assert (verdict.word == "slower") <= (after > before)
    strict = compare([a, b], ["x", "y"])
    assert strict.refused == any(flag.severity == "refuse" for flag in strict.flags)
    for run, cells in ((0, [row.cells[0] for row in comparison.kernels]), (1, [row.cells[1] for row in comparison.kernels])):
        total = sum(cell.step_ns for cell in cells if cell)
        assert abs(total - comparison.runs[run].busy_ns) <= len(cells) + 1


@quick
@given(PROFILES)
def test_candidates_never_claim_more_than_the_step(one):
    advice = advise(one, "x")
    assert sum(c.step_ns for c in advice.candidates) <= advice.step_ns + len(advice.candidates)
    for c in advice.candidates:
        assert c.ceiling is None or c.ceiling_at_k is None or c.ceiling_at_k <= c.ceiling + 1e-9
        assert 0 <= c.saved_ns <= c.step_ns
    scores = [c.score for c in advice.candidates]
    assert scores == sorted(scores, reverse=True)
    assert advice.choice in {c.id for c in advice.candidates} | {None}


@quick
@given(PROFILES, PROFILES, NAMES)
def test_nothing_a_file_says_acts_anywhere(a, b, label):
    labels = [label, label + "2"]
    docs = [profile_doc(a, label), comparison_doc(compare([a, b], labels)), advice_doc(advise(b, labels[1]))]
    texts = [plain(doc) for doc in docs] + [markdown(doc) for doc in docs] + [entry(clean(label), label, [a, b], docs, label)]
    for text in texts:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]", text)
    for text in texts[3:]:
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({re.sub(r"\\.", "", row).count("|") for row in table.splitlines()}) == 1
    to_json(a)
    to_json(redact_profile(a, 0))


@settings(quick, max_examples=15)
@given(PROFILES, PROFILES)
def test_any_profile_has_a_page(a, b):
    page = html.page([a, b], ["x", "y"], compare([a, b], ["x", "y"]), advise(b, "y"))
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert page.endswith("</html>")


@given(st.text(st.characters(), max_size=60))
def test_cleaning_is_idempotent_and_code_cannot_be_closed(text):
    assert clean(clean(text)) == clean(text)
    clean(text).encode()  # fails on half a surrogate pair
    span = code_span(text)
    assert span == "-" or (span[0] == span[-1] == "`" and "`" not in span[1:-1] and "|" not in span)
