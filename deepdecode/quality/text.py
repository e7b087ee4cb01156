"""What quality is measured on: held-out files, pieces of them in tokens, and needles in the hay that they make."""

import json
import lzma
import random
from dataclasses import dataclass
from pathlib import Path

from deepdecode.text import Text

# CPython 3.11.7's library files that the embedded model is never trained on; data/tiny/LICENSE-PYTHON.txt is their licence
HELD_OUT = Path(__file__).parent.parent / "data" / "tiny" / "held_out.json.xz"
SYLLABLES = ("ba", "co", "du", "fe", "gi", "ka", "lo", "mu", "ne", "pi", "ra", "so", "tu", "ve", "wi", "zo")


@dataclass(frozen=True)
class Piece:
    """The beginning of a file: ids from the beginning mark on, and the bytes of text that all but the first tell."""

    name: str
    ids: list[int]
    size: int


@dataclass(frozen=True)
class Needle:
    """A definition, hay of other text, and the definition again.

    told: positions of its second telling, behind the function's name; argument, attribute and number are made up as that is.
    distance: tokens from the first telling to the second.
    """

    ids: list[int]
    told: list[int]
    distance: int


def held_out(files: list[Path]) -> list[tuple[str, str]]:
    """(name, text) of these files, or of the embedded model's held-out files.

    Raises:
        ValueError: a file cannot be read.
    """
    if not files:
        documents = json.loads(lzma.decompress(HELD_OUT.read_bytes()))
        return [(document["path"], document["text"]) for document in documents]
    read = []
    for file in files:
        try:
            read.append((file.name, file.read_text(errors="replace")))
        except OSError as error:
            raise ValueError(f"quality: --text must be a file to read, got {file}: {error.strerror}") from None
    return read


def pieces(text: Text, documents: list[tuple[str, str]], length: int, budget: int) -> list[Piece]:
    """The beginnings of the longest files, up to `length` tokens each, until they have `budget` together; one at least."""
    made: list[Piece] = []
    for name, content in sorted(documents, key=lambda document: -len(document[1])):
        if made and sum(len(piece.ids) for piece in made) + length > budget:
            break
        ids = text.encode(content)[:length]
        if len(ids) > 1:
            made.append(Piece(name, ids, len(text.decode(ids[1:]).encode())))
    if not made:
        raise ValueError("quality: the text must have two tokens or more, got none that has")
    return made


def needles(text: Text, documents: list[tuple[str, str]], distance: int, count: int, seed: int = 0) -> list[Needle]:
    """`count` needles, their two tellings `distance` tokens apart, in hay from one file after another.

    Raises:
        ValueError: the distance does not leave room for a definition, or there is too little text.
    """

    def ids_of(content: str) -> list[int]:
        ids = text.encode(content)
        return ids[len(begin) :]

    rng = random.Random(seed)
    begin = [] if text.bos_id is None else [text.bos_id]
    hay = [i for _, content in documents for i in ids_of(content)]
    made = []
    for _ in range(count):
        name, attribute, argument = ("".join(rng.choice(SYLLABLES) for _ in range(k)) for k in (3, 2, 2))
        tail = ids_of(f"(self, {argument}):\n    return self.{attribute} + {argument} * {rng.randrange(100, 1000)}\n")
        definition = ids_of(f"\n\ndef compute_{name}") + tail
        room = distance - len(definition)
        if room < 0 or len(hay) < room:
            want = f"{len(definition)} to {len(definition) + len(hay)}, the definition and the text there is"
            raise ValueError(f"quality: the distance of a needle must be {want}, got {distance}")
        at = rng.randrange(len(hay) - room + 1)
        ids = begin + definition + hay[at : at + room] + definition
        start = len(ids) - len(tail)
        made.append(Needle(ids, list(range(start, len(ids))), distance))
    return made
