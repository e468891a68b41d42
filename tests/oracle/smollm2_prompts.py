"""The conversations of the SmolLM2 golden, and what is kept of each."""

NEW_TOKENS = 40
TOP_LOGITS = 32
LOGIT_STRIDE = 499

_RULES = "\n".join(
    f"{n}. Drawer {n} of the cabinet holds {what}; it is opened with the {key} key."
    for n, (what, key) in enumerate(
        [
            (what, key)
            for key in ("brass", "iron", "silver", "copper")
            for what in ("maps", "seeds", "lenses", "letters", "coins", "shells")
        ],
        start=1,
    )
)


def _ask(text: str, system: str | None = None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


CONVERSATIONS: list[list[dict[str, str]]] = [
    _ask("What is the capital of France?"),
    _ask("Explain in two sentences why the sky is blue."),
    _ask("Write a Python function that adds two numbers."),
    _ask("List three uses of a paper clip.", system="You answer in one short line."),
    _ask("Translate 'good morning' into Spanish and German."),
    _ask("How many legs do 3 spiders and 12 cats have together? Think step by step."),
    _ask("Naïve café, 日本語, emoji 🙂: which of these words are not English?"),
    _ask("What does drawer 17 hold?", system="Answer from this list.\n" + _RULES),
    [
        *_ask("My name is Ada and I like chess."),
        {"role": "assistant", "content": "Nice to meet you, Ada! Chess is a wonderful game."},
        {"role": "user", "content": "What is my name, and what do I like?"},
    ],
    _ask("Tell me a story about a lighthouse keeper who finds a map.", system=_RULES),
]
