"""Twenty prompts, and whether what a model makes of them is Python."""

import ast
import io
import tokenize
from pathlib import Path

# each ends where a token does: a line break is one with the indent behind it
PROMPTS = (
    "def add(a, b):",
    "import os\nimport sys",
    "class Stack:\n    def __init__(self):",
    "def read_lines(path):\n    with open(path) as f:",
    "for name in sorted(names):",
    "def main():\n    parser = argparse.ArgumentParser(",
    "class Node(object):\n    \"\"\"A node of a tree.\"\"\"\n\n    def __init__(self, value",
    "try:\n    import threading",
    "def test_empty(self):\n    self.assert",
    "    def close(self):\n        if self",
    "if __name__ == '__main__':",
    "def factorial(n):\n    if n",
    "@property\ndef name(self):",
    "while True:\n    line = f.readline()",
    "class ParseError(Exception):",
    "def get(self, key, default=None):\n    try:",
    "from collections import",
    "def _split(s, sep):\n    i = s.find(sep)",
    "result = []\nfor i in range(",
    "def __repr__(self):\n    return",
)  # fmt: skip
_BETWEEN = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def logical_lines(text: str) -> list[tuple[int, str, str]] | None:
    """(number of its last line, first word, last word) of every logical line that has ended; None if there is no reading it."""
    found: list[tuple[int, str, str]] = []
    words: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                found.append((token.start[0], words[0], words[-1]))
                words = []
            elif token.type not in _BETWEEN:
                words.append(token.string)
    except tokenize.TokenError as error:
        # an open bracket or an open string at the end is a line that has not ended
        if not any(word in str(error) for word in ("EOF", "unterminated triple-quoted")):
            return None
    except IndentationError:
        return None
    return found


def parses(prompt: str, completion: str) -> bool:
    """Whether prompt and completion are Python up to their last complete statement, of which the completion must have written.

    The last logical line that has ended is the end; a header that still waits for its body is left out, and a `try` may still
    wait for its `except`. An indented prompt is one from inside a class.
    """
    outside = "class Outside:\n" if prompt.startswith(" ") else ""
    # the lines that were there before it, a last one that it goes on with left out
    begun = len((outside + prompt).rstrip("\n").split("\n")) - (
        not prompt.endswith("\n") and bool(completion.partition("\n")[0].strip())
    )
    text = (outside + prompt + completion).rpartition("\n")[0] + "\n"
    lines = logical_lines(text)
    while lines and (lines[-1][2] == ":" or lines[-1][1] == "@"):
        lines.pop()
    if not lines or lines[-1][0] <= begun:
        return False
    kept = text.split("\n")[: lines[-1][0]]
    open_tries = {line[: len(line) - len(line.lstrip())] for line in kept if line.lstrip().startswith("try:")}
    return any(_is_python([*kept, *more]) for more in ([], *([f"{at}finally:", f"{at} pass"] for at in open_tries)))


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines) + "\n")
    except (SyntaxError, ValueError):
        return False
    return True


def complete(model: Path, tokens: int) -> list[str]:
    """What a checkpoint makes of every prompt, greedily, as it runs by default."""
    # the checks above need no model
    import torch

    from deepdecode.checkpoint import load_model, open_checkpoint
    from deepdecode.kvcache import default_format
    from deepdecode.runner import Runner, Sampling
    from deepdecode.text import Text

    checkpoint = open_checkpoint(model)
    config, text = checkpoint.config, Text(model, checkpoint.config.bos_id)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    length = max(map(len, prompts)) + tokens
    runner = Runner(load_model(checkpoint), max_len=length, slots=len(prompts), fmt=default_format(config))
    rows: list[list[int]] = [[] for _ in prompts]
    # products of this size wait for threads more than they gain: 6 s on one thread, minutes on two of a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for token in runner.generate(prompts, Sampling(tokens, stop_ids=config.eos_ids)):
            if token.id is not None and token.id not in config.eos_ids:
                rows[token.row].append(token.id)
    finally:
        torch.set_num_threads(threads)
    return [text.decode(row) for row in rows]
