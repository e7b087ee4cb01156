"""Definitions with made-up names, told more than once in a sequence: what only looking far back can tell.

The text alone hardly asks for that: the window holds most of what a token follows from. They are made from the training text's
own short functions and from a few forms, and put between its lines; nothing of the held-out files is used.
"""

import ast
import builtins
import io
import itertools
import keyword
import random
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator

import numpy as np

from deepdecode.quality.text import SYLLABLES

# names that are looked for when quality is measured are made of other syllables
_ONSETS = (*"bcdfghjklmnprstvwxz", "st", "tr", "pl", "sh", "qu", "gr", "fl")
_OWN = sorted({a + b for a in _ONSETS for b in "aeiou"} - {*SYLLABLES})
_SOUGHT = re.compile(f"(?:{'|'.join(SYLLABLES)})+")
_VERBS = ("get", "set", "make", "find", "read", "parse", "check", "load", "build", "add", "split", "merge", "update", "count")
_FORMS = (
    "def {verb}_{a}(self, {b}):\n    return self.{c} {op} {b} {op2} {n}\n",
    "def {verb}_{a}(self, {b}):\n    self.{c} = {b} {op} {n}\n",
    "def {a}_{verb}({b}, {c}):\n    return {b} {op} {c} {op2} {n}\n",
    "def {a}({b}, {c}={n}):\n    return {d}({b}, {c})\n",
    "def {verb}_{a}(self, {b}={n}):\n    return self.{c}.{d}({b})\n",
    "class {A}({B}):\n    {c} = {n}\n    {d} = {m}\n",
    "{a}_{b} = {c}({n}, {d})\n",
    "{a} = {{'{b}': {n}, '{c}': {m}}}\n",
    "def {a}(self):\n    {b} = self.{c}({n})\n    return {b}.{d}\n",
    "def is_{a}(self, {b}):\n    return {b}.{c} == {n}\n",
)  # fmt: skip
# tokens of a function that is worth telling again
SHORT = (20, 90)
# tokens of a telling that nothing says beforehand
HEAD = 5
_KEPT = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"}
Source = random.Random


def made_name(source: Source) -> str:
    """Nothing that the text has, but by chance."""
    kind = source.random()
    if kind < 0.6:
        return "".join(source.choice(_OWN) for _ in range(source.randint(2, 4)))
    letters = "".join(source.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(source.randint(3, 6)))
    if _SOUGHT.fullmatch(letters):
        return made_name(source)
    return letters if kind < 0.8 else f"{source.choice(_OWN)}{source.choice(_OWN)}_{letters}"


def made_number(source: Source) -> str:
    return str(source.randrange(10 ** source.randint(0, 3), 10 ** source.randint(4, 5)) // 10 ** source.randint(0, 2))


def from_form(source: Source) -> str:
    a, b, c, d = (made_name(source) for _ in range(4))
    return source.choice(_FORMS).format(
        a=a, b=b, c=c, d=d, A=a.title().replace("_", ""), B=b.title().replace("_", ""), verb=source.choice(_VERBS),
        op=source.choice("+-*"), op2=source.choice("+-*%"), n=made_number(source), m=made_number(source),
    )  # fmt: skip


def functions(texts: Iterable[str]) -> Iterator[str]:
    """The short functions of these files, from their margin."""
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and 1 <= node.end_lineno - node.lineno <= 8:
                lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
                if lines and max(map(len, lines)) < 100:
                    yield textwrap.dedent("\n".join(lines)) + "\n"


def renamed(function: str, source: Source) -> str:
    """A function under another name, with other arguments, half of its other names and most of its numbers."""
    names: dict[str, str] = {}
    made, at = [], (1, 0)
    lines = list(io.StringIO(function))
    tokens = list(tokenize.generate_tokens(io.StringIO(function).readline))
    name = next((t.string for before, t in itertools.pairwise(tokens) if before.string == "def"), "")
    for token in tokens:
        made.append(_between(lines, at, token.start))
        at, word = token.end, token.string
        if token.type == tokenize.NAME and word not in _KEPT and not word.startswith("__"):
            if word not in names:
                names[word] = made_name(source) if word == name or source.random() < 0.6 else word
            word = names[word]
        elif token.type == tokenize.NUMBER and len(word) > 1 and word.isdigit():
            word = made_number(source)
        made.append(word)
    return "".join(made)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]] if start[0] <= len(lines) else ""
    part = [lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1]]
    return "".join(part) + (lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else "")


def definitions(texts: Iterable[str], count: int, seed: int) -> Iterator[str]:
    """`count` of them, half from forms."""
    source, own = random.Random(seed), list(functions(texts))
    for i in range(count):
        definition = from_form(source) if i % 2 or not own else renamed(source.choice(own), source)
        yield "\n\n" + re.sub(r"\n+$", "\n", definition)


def unasked(ids: np.ndarray) -> np.ndarray:
    """Ids that are read and not to be told: below 0. Twice gives the ids again."""
    return -1 - ids


def with_tellings(
    hay: np.ndarray, lines: np.ndarray, made: tuple[np.ndarray, ...], draws: np.random.Generator, share: float
) -> np.ndarray:
    """As many ids as the hay has: its beginning, with definitions between its lines, each told two to four times.

    lines: places of the hay where a line begins; share: of the ids that tellings take, at most. Unasked are a definition's
    first telling and the beginning of every other one: nobody is to make up definitions, or to begin one again.
    """
    tellings: list[int] = []
    room = int(share * len(hay))
    while made:
        which, times = int(draws.integers(len(made))), int(draws.integers(2, 5))
        room -= times * len(made[which])
        if room < 0:
            break
        tellings += [which] * times
    kept = len(hay) - sum(len(made[which]) for which in tellings)
    lines = lines[lines < kept]
    anywhere = draws.random() < 0.3 or len(lines) < 8
    places = draws.integers(0, kept + 1, len(tellings)) if anywhere else lines[draws.integers(0, len(lines), len(tellings))]
    found, at, before = [], 0, set[int]()
    # where two stand in one place their order is drawn too
    for i in np.lexsort((draws.permutation(len(places)), places)):
        which = tellings[i]
        ids = made[which].astype(np.int64)
        quiet = HEAD if which in before else len(ids)
        before.add(which)
        found += [hay[at : places[i]], unasked(ids[:quiet]), ids[quiet:]]
        at = int(places[i])
    return np.concatenate([*found, hay[at:kept]])


def copies(hay: np.ndarray, draws: np.random.Generator, vocab: int, exchanged: float) -> np.ndarray:
    """As many ids as the hay has: stretches of it told in any order, again and again, some of their tokens exchanged.

    exchanged: of the vocabulary, the part whose tokens change places; what they stand for only an earlier telling says. First
    tellings are unasked, and the beginning of the others.
    """
    sizes = draws.integers(60, 700, int(draws.integers(2, 7)))
    ends = np.minimum(sizes.cumsum(), len(hay) // 2)
    stretches = [part for part in np.split(hay[: ends[-1]], ends[:-1]) if len(part)]
    order: list[int] = []
    while sum(len(stretches[which]) for which in order) < len(hay):
        order.append(int(draws.integers(len(stretches))))
    # the three marks stay
    table, moved = np.arange(vocab), draws.choice(np.arange(3, vocab), int(exchanged * (vocab - 3)), replace=False)
    table[np.sort(moved)] = moved
    found = []
    for i, which in enumerate(order):
        ids = table[stretches[which]]
        quiet = HEAD if which in order[:i] else len(ids)
        found += [unasked(ids[:quiet]), ids[quiet:]]
    return np.concatenate(found)[: len(hay)]
