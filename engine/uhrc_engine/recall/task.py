"""The recall task: names get values early in a long document, and questions ask for them later.

A document is BOS, then pairs `name value` strewn among filler. There are two kinds of names:

- a constant gets its value once, in the first part of the document;
- a variable gets one in the first part and others in the second; the last one counts.

The last part is filler alone. A question is `ASK name ANSWER`, and the next token is the value.
Without rotation, attention does not see which of two values came last: variables live in the
recurrent state, and a state that is lost or stale is seen in the answers. Everything is a pure
function of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

PAD, BOS, EOS, ASK, ANSWER = range(5)
CONSTANTS = range(8, 40)
"""Names that get one value."""
VARIABLES = range(40, 48)
"""Names that get several."""
VALUES = range(48, 96)
FILLER = range(96, 128)
VOCAB_SIZE = 128

QUESTION_TOKENS = 3
"""Of `ASK name ANSWER`."""
_PARTS = (0.375, 0.375)
"""Shares of a document's tokens that the first and the second part take; the rest is the last."""


@dataclass(frozen=True, slots=True)
class DocumentShape:
    """How a document is made.

    Attributes:
        tokens: its length.
        constants: how many constants it has, at most 32.
        variables: how many variables, at most 8.
        assignments: how often each variable gets a value, >= 1.
    """

    tokens: int = 512
    constants: int = 12
    variables: int = 4
    assignments: int = 3

    def __post_init__(self) -> None:
        first, second = _part_tokens(self.tokens)
        pairs = self.constants + self.variables, self.variables * (self.assignments - 1)
        if 2 * pairs[0] > first or 2 * pairs[1] > second:
            raise ValueError(
                f"{self} puts {pairs[0]} and {pairs[1]} pairs into parts of {first} and {second} "
                "tokens; each pair takes 2"
            )


@dataclass(frozen=True, slots=True)
class Document:
    """A document and what it says.

    Attributes:
        token_ids: int32[tokens].
        values: the token of each name's last value, by the name's token; constants first.
    """

    token_ids: IntArray
    values: dict[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt of the evaluation: a document, then one question.

    Attributes:
        document: which one, from 0; cases with the same number share all but the last
            `QUESTION_TOKENS` tokens of their prompts.
        prompt: int32[document's tokens + QUESTION_TOKENS].
        name: the token asked for.
        expected: the token of the right answer.
    """

    document: int
    prompt: IntArray
    name: int
    expected: int


def make_document(rng: np.random.Generator, shape: DocumentShape) -> Document:
    """A document with names and values drawn from ``rng``."""
    constants = rng.choice(CONSTANTS, shape.constants, replace=False)
    variables = rng.choice(VARIABLES, shape.variables, replace=False)
    early = np.concatenate([constants, variables])
    late = rng.permutation(np.repeat(variables, shape.assignments - 1))
    values = {int(name): 0 for name in early}

    def part(names: IntArray, tokens: int) -> list[int]:
        filler = rng.choice(FILLER, tokens - 2 * len(names))
        order = np.concatenate([names, filler])
        written: list[int] = []
        for token in rng.permutation(order).tolist():
            written.append(token)
            if token in values:
                values[token] = int(rng.choice(VALUES))
                written.append(values[token])
        return written

    first, second = _part_tokens(shape.tokens)
    body = part(early, first) + part(late, second)
    body += rng.choice(FILLER, shape.tokens - 1 - len(body)).tolist()
    return Document(np.array([BOS, *body], np.int32), values)


def question(name: int) -> tuple[int, int, int]:
    """The tokens that ask for a name's value."""
    return ASK, name, ANSWER


def make_cases(
    seed: int, documents: int, questions: int, shape: DocumentShape | None = None
) -> list[Case]:
    """``questions`` cases for each of ``documents`` documents, no name asked twice in a document.

    Constants and variables are asked for in turn while there are both. The documents take turns as
    well: the first ``documents`` cases are the first question of each.

    Raises:
        ValueError: a document has fewer names than ``questions``.
    """
    shape = shape or DocumentShape()
    rng = np.random.default_rng(seed)
    made = [make_document(rng, shape) for _ in range(documents)]
    if questions > shape.constants + shape.variables:
        raise ValueError(
            f"questions: {questions} of a document with {shape.constants + shape.variables} names"
        )
    asked = [_in_turn(rng, document) for document in made]
    return [
        Case(
            document=d,
            prompt=np.append(made[d].token_ids, np.array(question(asked[d][q]), np.int32)),
            name=asked[d][q],
            expected=made[d].values[asked[d][q]],
        )
        for q in range(questions)
        for d in range(documents)
    ]


def accuracy(cases: Sequence[Case], answers: Sequence[Sequence[int]]) -> float:
    """The share of cases whose generated tokens (`answers`, in the cases' order) begin right."""
    right = [
        bool(answer) and answer[0] == case.expected
        for case, answer in zip(cases, answers, strict=True)
    ]
    return sum(right) / len(right)


def make_batch(
    rng: np.random.Generator, rows: int, questions: int, shape: DocumentShape
) -> tuple[IntArray, IntArray]:
    """Training rows: a document, then questions with their answers, half of them for variables.

    Returns token_ids int32[rows, tokens + 4 * questions] and targets of the same shape: the token
    that follows at each ANSWER, -1 elsewhere.
    """
    tokens = np.zeros((rows, shape.tokens + questions * (QUESTION_TOKENS + 1)), np.int32)
    for row in tokens:
        document = make_document(rng, shape)
        names = np.array(list(document.values))
        weights = np.where(np.isin(names, VARIABLES), 1 / shape.variables, 1 / shape.constants)
        row[: shape.tokens] = document.token_ids
        at = shape.tokens
        for name in rng.choice(names, questions, p=weights / weights.sum()).tolist():
            row[at : at + QUESTION_TOKENS + 1] = [*question(name), document.values[name]]
            at += QUESTION_TOKENS + 1
    targets = np.full_like(tokens, -1)
    targets[:, :-1] = np.where(tokens[:, :-1] == ANSWER, tokens[:, 1:], -1)
    return tokens, targets


def _part_tokens(tokens: int) -> tuple[int, int]:
    first, second = (int(share * (tokens - 1)) for share in _PARTS)
    return first, second


def _in_turn(rng: np.random.Generator, document: Document) -> list[int]:
    """The document's names in random order, a constant and a variable in turn while there are."""
    names = rng.permutation(list(document.values)).tolist()
    kinds = [[n for n in names if n in CONSTANTS], [n for n in names if n in VARIABLES]]
    both = min(map(len, kinds))
    mixed = [name for pair in zip(*kinds, strict=False) for name in pair]
    return mixed + kinds[0][both:] + kinds[1][both:]
