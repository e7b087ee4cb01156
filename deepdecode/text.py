"""Text to token ids and back, with the checkpoint's own tokenizer.json."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from deepdecode.config import MAX_JSON_BYTES, shown

REPLACEMENT = "\ufffd"
# a stream decodes again what lies behind the last KEEP to TAIL ids
KEEP, TAIL = 8, 64
T = TypeVar("T")


class Text:
    """A checkpoint's tokenizer.

    Raises:
        ValueError: the folder has no tokenizer.json, or it cannot be read.
    """

    def __init__(self, folder: Path, bos_id: int | None) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"tokenizer: {folder} must have a tokenizer.json, got none")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"tokenizer: {path} must be at most {MAX_JSON_BYTES} bytes, got {size}")
        self.path, self.bos_id = path, bos_id
        self.tokenizer = self._guard("be a tokenizers file", lambda: Tokenizer.from_file(str(path)))
        # either may have stayed in the file from training; a prompt would be cut or filled up in silence
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids, the beginning-of-sequence id first."""
        # a lone surrogate (undecodable bytes on the command line) has no UTF-8 form
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids = self._guard("encode the prompt", lambda: self.tokenizer.encode(text).ids)
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """The text of ids; special tokens, and ids that the tokenizer does not know, give none."""
        return self._guard("decode what the model makes", lambda: self.tokenizer.decode(ids, skip_special_tokens=True))

    def highest_id(self) -> int:
        """The largest id that `encode` can give; -1 where there is none."""
        vocabulary = self._guard("list its tokens", lambda: self.tokenizer.get_vocab(with_added_tokens=True))
        return max(vocabulary.values(), default=-1)

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        # the library raises bare Exception, and for its own mistakes a PanicException, which is none
        except BaseException as error:
            raise ValueError(f"tokenizer: {self.path} must {what}, got: {shown(str(error))}") from None


class Stream:
    """The text of one row as its tokens come: each piece is final, a character split over tokens is held back.

    A step decodes the last ids alone, so that it costs the same however long the text has become.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.ids: list[int] = []
        # first of the ids that are decoded again, and how many characters of their text are out
        self.start = self.shown = 0

    def put(self, token: int) -> str:
        self.ids.append(token)
        return self._new(final=False)

    def end(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        tail = self.text.decode(self.ids[self.start :])
        # up to 3 bytes of an unfinished character decode to replacement characters at the end
        ready = tail if final else tail.rstrip(REPLACEMENT)
        piece, self.shown = ready[self.shown :], max(self.shown, len(ready))
        if len(self.ids) - self.start > TAIL and self.shown == len(tail):
            short = self.text.decode(self.ids[-KEEP:])
            # not where these ids begin within a character, or have no text that the next could follow
            if tail.endswith(short) and bool(short) == bool(tail):
                self.start, self.shown = len(self.ids) - KEEP, len(short)
        return piece
