"""Kernel names to categories, by ordered rules from a data file. Matching is linear in the name, whatever the rules.

The language (see data/kernel_rules.txt) has substrings, `*`, anchors, whole words, all-of, none-of and one-of. It has
no regular expressions, so a rule that a user writes, or is handed, cannot hang the reader.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deepdecode.trace.model import CATEGORIES, TraceError

BUILTIN = Path(__file__).parent.parent / "data" / "kernel_rules.txt"
MAX_BYTES, MAX_RULES, MAX_LINE = 1 << 20, 5000, 4000
MAX_NAME = 8192  # characters of a kernel name that are looked at

# the narrowest type named decides; (?<![a-z0-9]) keeps i8 out of "tensori8x"
_PRECISIONS = tuple(
    (precision, re.compile(pattern))
    for precision, pattern in (
        ("fp4", r"nvfp4|mxfp4|(?<![a-z])fp4|e2m1|float4_e2m1"),
        ("fp8", r"(?<![a-z])fp8(?!kvcachedatatype)|e4m3|e5m2|float8|(?<![a-z0-9])f8|fp8kvcachedatatype\)[1-9]"),
        ("int8", r"(?<![a-z])int8(?!_t \*)|imma|i16832|i8816|a8w8"),
        ("tf32", r"tf32"),
        ("bf16", r"bf16|bfloat16|df16b|_bbs_"),
        ("fp16", r"(?<![b0-9a-z])f16|fp16|__half|half_t|<half|, half|c10::half|h884|h1688|h16816|_hhs_"),
        ("fp32", r"sgemm|f32f32|fp32|<float|, float|float32|_sb_|scudnn"),
    )
)


@dataclass(frozen=True)
class Rule:
    """One line of a rule file; line 0 is the rule that takes what no line took."""

    source: str
    line: int
    category: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} {self.pattern}" if self.line else f"{self.source} {self.pattern}"


UNKNOWN = Rule("builtin", 0, "unknown", "no rule matches")
COPY = Rule("builtin", 0, "memory", "recorded as a memcpy or memset")


@dataclass(frozen=True)
class _Term:
    parts: tuple[str, ...]
    negated: bool
    start: bool
    end: bool
    word: bool

    def holds(self, name: str) -> bool:
        return self._found(name) is not self.negated

    def _found(self, name: str) -> bool:
        if self.word:
            return _has_word(name, self.parts[0])
        first, *rest = self.parts
        if self.start:
            if not name.startswith(first):
                return False
            at = len(first)
        else:
            found = name.find(first)
            if found < 0:
                return False
            at = found + len(first)
        for part in rest[:-1] if self.end and rest else rest:
            found = name.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        if not self.end:
            return True
        last = rest[-1] if rest else first
        begins = len(name) - len(last)
        return name.endswith(last) and (begins >= at if rest else begins == 0 or not self.start)


def _has_word(name: str, word: str) -> bool:
    at = name.find(word)
    while at >= 0:
        after = at + len(word)
        if (at == 0 or not name[at - 1].isalnum()) and (after == len(name) or not name[after].isalnum()):
            return True
        at = name.find(word, at + 1)
    return False


class Rules:
    """Ordered rules; `classify` gives the first that matches, or UNKNOWN."""

    def __init__(self, rules: tuple[tuple[Rule, tuple[tuple[_Term, ...], ...]], ...], label: str):
        self._rules = rules
        # a name without the longest text that an alternative asks for is not looked at further
        self._tests = [
            (max((part for t in terms if not t.negated for part in t.parts), key=len), terms, rule)
            for rule, alternatives in rules
            for terms in alternatives
        ]
        self.label = label  # "builtin", or the user's file before it
        self._known: dict[str, Rule] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def classify(self, name: str) -> Rule:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._match(name[:MAX_NAME].lower())
        return found

    def _match(self, name: str) -> Rule:
        for needle, terms, rule in self._tests:
            if needle in name and all(term.holds(name) for term in terms):
                return rule
        return UNKNOWN


@lru_cache(maxsize=1)
def builtin() -> Rules:
    """The rules that ship with the package."""
    return Rules(_parse(BUILTIN.read_text(encoding="utf-8"), "builtin", str(BUILTIN)), "builtin")


def load_rules(path: str | Path | None = None) -> Rules:
    """The built-in rules, after those of the user's file where one is given.

    Raises:
        TraceError: the file is not there, is too large, or a line does not say `category: pattern`.
    """
    if path is None:
        return builtin()
    path = Path(path)
    if path.exists() and not path.is_file():
        raise TraceError(f"rules: {path} must be a regular file, got something else")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise TraceError(f"rules: {path} must be a readable file, got {e.strerror}") from None
    if len(data) > MAX_BYTES:
        raise TraceError(f"rules: {path} must be at most {MAX_BYTES >> 20} MB, got more")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TraceError(f"rules: {path} must be UTF-8 text, got other bytes") from None
    return Rules(_parse(text, path.name, str(path)) + builtin()._rules, f"{path.name}, then builtin")


def why(name: str, rules: Rules | None = None) -> Rule:
    """The rule that places a kernel of this name."""
    return (rules or builtin()).classify(name)


def precision(name: str) -> str | None:
    """The narrowest number type that a kernel's name mentions, None where it mentions none."""
    name = name[:MAX_NAME].lower()
    return next((p for p, pattern in _PRECISIONS if pattern.search(name)), None)


def _parse(text: str, source: str, path: str):
    words = {display.lower(): machine for machine, display in CATEGORIES.items()} | {c: c for c in CATEGORIES}
    parsed = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"rules: {path} line {number}"
        if len(line) > MAX_LINE:
            raise TraceError(f"{where} must be at most {MAX_LINE} characters, got {len(line)}")
        category, colon, pattern = (part.strip() for part in line.partition(":"))
        if not colon or not pattern:
            raise TraceError(f"{where} must be `category: pattern`, got {line[:80]!r}")
        machine = words.get(category.lower())
        if machine is None:
            raise TraceError(f"{where} must name one of {', '.join(CATEGORIES)}, got {category[:80]!r}")
        alternatives = tuple(_terms(a, where) for a in pattern.split("|"))
        parsed.append((Rule(source, number, machine, " ".join(pattern.split())), alternatives))
        if len(parsed) > MAX_RULES:
            raise TraceError(f"rules: {path} must hold at most {MAX_RULES} rules, got more")
    return tuple(parsed)


def _terms(alternative: str, where: str) -> tuple[_Term, ...]:
    terms = []
    for text in alternative.lower().split():
        negated = text.startswith("!")
        body = text[negated:]
        if body.startswith("[") and body.endswith("]") and len(body) > 2:
            terms.append(_Term((body[1:-1],), negated, False, False, True))
            continue
        start, end = body.startswith("^"), body.endswith("$")
        parts = body[start : len(body) - end].split("*")
        start, end = start and bool(parts[0]), end and bool(parts[-1])
        parts = tuple(p for p in parts if p)
        if not parts:
            raise TraceError(f"{where} must have text in every term, got {text!r}")
        terms.append(_Term(parts, negated, start, end, False))
    if not any(not t.negated for t in terms):
        raise TraceError(f"{where} must have a term without ! in every alternative, got {alternative.strip()!r}")
    return tuple(terms)
