"""The text: CPython 3.11.7's standard library without its tests, every file pinned by hash; its tokenizer; its tokens.

The library is under the Python Software Foundation License Version 2, which allows copies and derived works. Any unmodified
CPython 3.11.7 has these files: a `Lib` folder of its source archive, or `sysconfig.get_path("stdlib")` of an installed one.
"""

import hashlib
import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.repeats import SHORT, copies, definitions, with_tellings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = "3.11.7"
MANIFEST = Path(__file__).parent / "stdlib.txt"
SPECIAL = ["<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>"]
BOS, EOS = 0, 1
SPLITS = ("train", "valid", "test")
# definitions with made-up names that are kept beside the tokens, and the seed they are made from
MADE, MADE_SEED = 60_000, 1
# not the library's code: tests, tables of code pages, generated prose, what a build writes
_TESTS = {"test", "tests", "idle_test"}
_OTHERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "__phello__"}
_TABLES = ("cp", "iso8859", "koi8", "mac_", "kz1048", "ptcp154", "hp_roman8", "tis_620", "palmos")


@dataclass(frozen=True)
class File:
    path: str
    split: str
    text: str


def wanted(path: str) -> bool:
    """Whether a file of the library, by its path, belongs to the text."""
    parts = path.split("/")
    if _TESTS & {*parts} or _OTHERS & {*parts} or parts[0].startswith(("config-", "_sysconfigdata")):
        return False
    return not (parts[0] == "encodings" and parts[-1].startswith(_TABLES))


def split_of(path: str) -> str:
    """Which part a file belongs to, by its name alone: 1 of 32 for choosing, 1 of 16 to be reported on, the rest to learn."""
    number = hashlib.sha256(path.encode()).digest()[0] % 32
    return {0: "valid", 1: "test", 2: "test"}.get(number, "train")


def make_manifest(stdlib: Path) -> str:
    """The manifest of an unmodified library: a line for each file, SHA-256, split and path."""
    lines = []
    for file in sorted(stdlib.rglob("*.py")):
        path = file.relative_to(stdlib).as_posix()
        data = file.read_bytes()
        if wanted(path) and len(data) > 200:
            lines.append(f"{hashlib.sha256(data).hexdigest()} {split_of(path)} {path}")
    return "\n".join(lines) + "\n"


def read_library(stdlib: Path) -> list[File]:
    """Every file of the manifest, checked.

    Raises:
        ValueError: a file is missing or is not CPython 3.11.7's.
    """
    files = []
    for line in MANIFEST.read_text().splitlines():
        digest, split, path = line.split(" ", 2)
        want = f"data: {path} must be CPython {VERSION}'s, SHA-256 {digest[:16]}..."
        try:
            data = (stdlib / path).read_bytes()
        except OSError:
            raise ValueError(f"{want}, got no such file in {stdlib}") from None
        got = hashlib.sha256(data).hexdigest()
        if got != digest:
            raise ValueError(f"{want}, got {got[:16]}... in {stdlib}")
        files.append(File(path, split, data.decode("utf-8", "replace")))
    return files


def train_tokenizer(texts: Iterable[str], vocab: int) -> "Tokenizer":
    """Byte-level BPE; ids 0, 1 and 2 are the beginning, end and padding marks that V4's config names."""
    # training itself, on a machine with a GPU, does without this library
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class Tokens:
    """One split: ids of all files, each from its beginning mark to its end mark, and where each begins.

    sizes: bytes of UTF-8 of each file, which bits are counted against. lines: places where a line without an indent begins,
    ascending, or None where that is not known. made: definitions with made-up names, for sequences that tell them again.
    """

    ids: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    lines: np.ndarray | None = None
    made: tuple[np.ndarray, ...] = ()

    def files(self) -> list[np.ndarray]:
        return np.split(self.ids, self.starts[1:])


def prepare(stdlib: Path, out: Path, vocab: int) -> dict[str, dict[str, int]]:
    """Write tokenizer.json, {train,valid,test}.npz, made.npz and held_out.json.xz (the test split's text); their counts."""
    files = read_library(stdlib)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((file.text for file in files if file.split == "train"), vocab)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    counts = {}
    for split in SPLITS:
        own = [file for file in files if file.split == split]
        encoded = [np.array([BOS, *tokenizer.encode(file.text).ids, EOS], np.uint16) for file in own]
        sizes = np.array([len(file.text.encode()) for file in own])
        starts = np.cumsum([0, *map(len, encoded[:-1])])
        np.savez_compressed(out / f"{split}.npz", ids=np.concatenate(encoded), starts=starts, sizes=sizes)
        counts[split] = {"files": len(own), "bytes": int(sizes.sum()), "tokens": sum(map(len, encoded))}
    texts = [file.text for file in files if file.split == "train"]
    made = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(list(definitions(texts, MADE, MADE_SEED)))]
    made = [ids for ids in made if SHORT[0] <= len(ids) <= SHORT[1]]
    np.savez_compressed(out / "made.npz", ids=np.concatenate(made), starts=np.cumsum([0, *map(len, made[:-1])]))
    counts["made"] = {"definitions": len(made), "tokens": sum(map(len, made))}
    held_out = [{"path": file.path, "text": file.text} for file in files if file.split == "test"]
    (out / "held_out.json.xz").write_bytes(lzma.compress(json.dumps(held_out).encode(), preset=9))
    return counts


def load_tokens(folder: Path, split: str) -> Tokens:
    if not (folder / f"{split}.npz").is_file():
        raise ValueError(f"data: {folder} must be a folder that data wrote, got no {split}.npz")
    with np.load(folder / f"{split}.npz") as found:
        ids, starts, sizes = found["ids"], found["starts"], found["sizes"]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    made: tuple[np.ndarray, ...] = ()
    if split == "train" and (folder / "made.npz").is_file():
        with np.load(folder / "made.npz") as found:
            made = tuple(np.split(found["ids"], found["starts"][1:]))
    return Tokens(ids, starts, sizes, line_starts(ids, starts, vocabulary), made)


def line_starts(ids: np.ndarray, starts: np.ndarray, vocabulary: dict[str, int]) -> np.ndarray:
    """Where a file begins, behind its mark, and where a token that is not blank follows a line break."""
    ends, goes_on = (np.zeros(1 + max(vocabulary.values()), bool) for _ in range(2))
    for token, i in vocabulary.items():
        # byte-level BPE writes line break, space, tab and carriage return so
        ends[i], goes_on[i] = token.endswith("Ċ"), token[0] not in "ĊĠĉč" and token not in SPECIAL
    return np.union1d(np.flatnonzero(ends[ids[:-1]] & goes_on[ids[1:]]) + 1, starts + 1)


@dataclass(frozen=True)
class Mix:
    """What else than the text as it is a step's sequences are, as parts of them.

    told: the text with made-up definitions in it, told two to four times each, a tenth to six tenths of it.
    copied: stretches of the text again and again, `exchanged` of the vocabulary's tokens exchanged.
    """

    told: float = 0.0
    copied: float = 0.0
    exchanged: float = 0.0


PLAIN = Mix()


def batch(tokens: Tokens, step: int, seed: int, rows: int, length: int, mix: Mix = PLAIN) -> np.ndarray:
    """int64 [rows, length + 1]: stretches from anywhere, each behind a beginning mark, the same for the same step and seed.

    An id below 0 stands for -1 - id, which is read and not to be told (`repeats.unasked`).

    A stretch begins with a line that is not indented, as text does that a model is given, where one begins not far before it.
    """
    random = np.random.default_rng((seed, step))
    at = random.integers(0, len(tokens.ids) - length, rows)
    if tokens.lines is not None:
        line = tokens.lines[np.maximum(0, np.searchsorted(tokens.lines, at, side="right") - 1)]
        # inside a class of many tokens its middle must be read too
        at = np.where(abs(at - line) < length // 4, line, at)
    found = tokens.ids[at[:, None] + np.arange(length)].astype(np.int64)
    for i, draw in enumerate(random.random(rows)):
        if draw < mix.told and tokens.made:
            lines = np.zeros(0, np.int64) if tokens.lines is None else tokens.lines
            lines = lines[slice(*np.searchsorted(lines, (at[i], at[i] + length)))] - at[i]
            found[i] = with_tellings(found[i], lines, tokens.made, random, random.uniform(0.1, 0.6))
        elif mix.told <= draw < mix.told + mix.copied:
            found[i] = copies(found[i], random, int(tokens.ids.max()) + 1, mix.exchanged)
    return np.concatenate((np.full((rows, 1), BOS), found), axis=1)


def pieces(tokens: Tokens, length: int) -> list[np.ndarray]:
    """Files cut into pieces of at most `length` ids to be told, each behind a beginning mark: what an evaluation reads."""
    cut = []
    for ids in tokens.files():
        for start in range(1, len(ids), length):
            cut.append(np.concatenate(([BOS], ids[start : start + length])).astype(np.int64))
    return cut
