"""Write what the ladder's top rung must follow, `deepdecode/data/tiny/followed.json`, for the embedded model as it is.

    python tools/follow.py

Some ten seconds on one core. To be run when the embedded model has changed.
"""

import torch

from deepdecode.ladder.follow import FILE, follow, turn_gates
from deepdecode.quality.text import held_out, pieces
from deepdecode.text import Text
from deepdecode.tiny import CONFIG, EMBEDDED

# beside, across and behind the borders of window (128), ratio-4 and ratio-128 entries; the last token is the first to be fed
LENGTHS = (126, 71, 260, 34, 191)


def main() -> None:
    torch.set_num_threads(1)
    longest = pieces(Text(EMBEDDED, CONFIG.bos_id), held_out([]), max(LENGTHS), max(LENGTHS) * len(LENGTHS))
    found = follow([piece.ids[:length] for piece, length in zip(longest, LENGTHS, strict=True)])
    FILE.write_text(found.written())
    for gate in turn_gates(found, found.own):
        print(f"{gate.name}: {gate.error:g} by the reference table in bfloat16, bound {gate.bound:g}")


if __name__ == "__main__":
    main()
