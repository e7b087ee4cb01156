"""Text to token ids and back, with the checkpoint's own tokenizer.json."""

from pathlib import Path

from tokenizers import Tokenizer

REPLACEMENT = "�"


class Text:
    """A checkpoint's tokenizer.

    Raises:
        ValueError: the folder has no tokenizer.json, or it cannot be read.
    """

    def __init__(self, folder: Path, bos_id: int | None) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"tokenizer: {folder} must have a tokenizer.json, got none")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer: {path} must be a tokenizers file, got: {error}") from None
        self.bos_id = bos_id

    def encode(self, text: str) -> list[int]:
        """Token ids, the beginning-of-sequence id first."""
        # a lone surrogate (undecodable bytes on the command line) has no UTF-8 form
        ids = self.tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8")).ids
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class Stream:
    """The text of one row as its tokens come: each piece is final, a character split over tokens is held back."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.ids: list[int] = []
        self.shown = 0

    def put(self, token: int) -> str:
        self.ids.append(token)
        return self._new(self.text.decode(self.ids), final=False)

    def end(self) -> str:
        return self._new(self.text.decode(self.ids), final=True)

    def _new(self, whole: str, *, final: bool) -> str:
        # up to 3 bytes of an unfinished character decode to replacement characters at the end
        ready = whole if final else whole.rstrip(REPLACEMENT)
        piece, self.shown = ready[self.shown :], max(self.shown, len(ready))
        return piece
