"""Train the embedded model's tokenizer on this repository's own text: `python tools/make_tokenizer.py`.

Byte-level BPE of 1024 tokens; ids 0, 1 and 2 are the beginning, end and padding marks that V4's config names.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
OUT = ROOT / "deepdecode" / "data" / "tiny" / "tokenizer.json"
SPECIAL = ["<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>"]


def main() -> None:
    texts = [p.read_text() for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("deepdecode/**/*.py"), *ROOT.glob("tests/*.py")])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(OUT), pretty=False)
    print(f"{OUT.relative_to(ROOT)}: {tokenizer.get_vocab_size()} tokens, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
