"""The tokenizer of a checkpoint, which is untrusted, and text that streams."""

import copy
import json
import random

import pytest

from deepdecode.text import KEEP, TAIL, Stream, Text
from deepdecode.tiny import TOKENIZER

GOOD = json.loads(TOKENIZER.read_text())
PROMPT = "def add(a, b):"


def text_with(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(copy.deepcopy(GOOD) | changes))
    return Text(folder, bos_id=0)


def test_a_file_that_would_cut_or_fill_prompts_does_not(tmp_path):
    want = Text(TOKENIZER.parent, bos_id=0).encode(PROMPT)
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 5, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    assert len(want) > 4
    assert text_with(tmp_path, truncation=cut).encode(PROMPT) == want
    assert text_with(tmp_path, padding=fill).encode(PROMPT) == want


# the library raises bare exceptions, quotes the file, and panics
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": "\x1b[31m9"}, r"be a tokenizers file, got: Unknown tokenizer version '\?\[31m9'"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "be a tokenizers file, got: Precompiled"),
        ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "z"}}, "encode the prompt, got: WordLevel error: Missing"),
        ({"decoder": {"type": "Strip", "content": "d", "start": 0, "stop": 2**31}}, "decode what the model makes, got: "),
    ],
    ids=["escape", "panic", "words", "panic in decode"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_tokenizer_is_one_sentence(tmp_path, changes, what):
    with pytest.raises(ValueError, match="^tokenizer: .*/tokenizer.json must " + what) as problem:
        (text := text_with(tmp_path, **changes)).decode(text.encode("d"))
    assert str(problem.value).isprintable()


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1]", b"[" * 100_000], ids=["empty", "binary", "list", "deep"])
def test_no_tokenizer(tmp_path, content):
    with pytest.raises(ValueError, match=r"must have a tokenizer.json, got none"):
        Text(tmp_path, bos_id=0)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"/tokenizer.json must be a tokenizers file, got: "):
        Text(tmp_path, bos_id=0)


def test_a_tokenizer_without_an_end(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(ValueError, match=r"/tokenizer.json must be at most 67108864 bytes, got 68719476736"):
        Text(tmp_path, bos_id=0)


def test_ids_that_the_tokenizer_does_not_know_have_no_text():
    text = Text(TOKENIZER.parent, bos_id=0)
    assert text.decode([2**32 - 1, *text.encode("ab")[1:], 10**6]) == "ab"


def test_a_long_stream_is_the_text_of_its_ids_at_the_price_of_a_short_one():
    """Random bytes and characters, whole and broken, and special tokens."""
    text = Text(TOKENIZER.parent, bos_id=0)
    draw = random.Random(4)
    ids = text.encode("é漢字🙂 plain words, 1 2 3" * 20)[1:] + [draw.randrange(1024) for _ in range(600)]
    ids += text.encode("the end é")[1:] + [0] * (2 * TAIL) + text.encode("🙂" * 50)
    decoded = []
    plain = text.decode
    text.decode = lambda ids: decoded.append(len(ids)) or plain(ids)
    stream = Stream(text)
    assert "".join([stream.put(i) for i in ids] + [stream.end()]) == plain(ids)
    assert stream.ids == ids
    # where the ids' boundaries fall within characters the tail grows for a while
    assert max(decoded) < 4 * TAIL
    assert sum(decoded) / len(ids) < TAIL + KEEP


def test_a_run_without_text_keeps_the_space_after_it(tmp_path):
    """This decoder drops the space before the first word it sees, so the first of the tail must stay a word."""
    special = {token["content"]: token["id"] for token in GOOD["added_tokens"]}
    text = text_with(
        tmp_path,
        model={"type": "WordLevel", "vocab": special | {"\u2581a": 50, "\u2581b": 60, "<unk>": 70}, "unk_token": "<unk>"},
        decoder={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    )
    stream, ids = Stream(text), [50, 60] + [0] * (3 * TAIL) + [60, 50] * TAIL
    assert "".join([stream.put(i) for i in ids] + [stream.end()]) == text.decode(ids) == "a b" + " b a" * TAIL
