"""Dialogues: whom the engine talks to. Each turn's prompt extends the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from uhrc_engine.recall.task import Case, DocumentShape, make_cases
from uhrc_engine.tokenizer import Tokenizer
from uhrc_engine.workload.config import Script, WorkloadTable, load_scripts
from uhrc_engine.workload.conversation import Conversation


class Dialogue(Protocol):
    """One conversation to be held, turn by turn, once.

    Attributes:
        questions: what is asked, one a turn, as shown to a reader.
        stop_token_ids: an answer ends with any of them.
    """

    @property
    def questions(self) -> Sequence[str]: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def ask(self, number: int) -> list[int]:
        """The prompt of turn ``number``; turns are asked in order, each after the last answer."""
        ...

    def answer(self, token_ids: Sequence[int]) -> str:
        """Take what the model generated into the dialogue; its text."""
        ...

    def is_right(self, number: int, token_ids: Sequence[int]) -> bool | None:
        """Whether the answer is the right one; ``None`` where there is no right one."""
        ...


class ScriptedDialogue:
    """A user's messages in the model's chat format."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._talk = Conversation(tokenizer, script.system)
        self.questions: Sequence[str] = script.questions
        self.stop_token_ids = tuple(tokenizer.eos_token_ids)

    def ask(self, number: int) -> list[int]:
        return self._talk.ask(self.questions[number])

    def answer(self, token_ids: Sequence[int]) -> str:
        return self._talk.answer(token_ids)

    def is_right(self, number: int, token_ids: Sequence[int]) -> bool | None:
        return None


class TokenDialogue:
    """Token ids without a meaning, for a model that has no tokenizer."""

    def __init__(self, document: list[int], questions: Sequence[list[int]]) -> None:
        self._ids = list(document)
        self._asked = questions
        self.questions = [f"{len(question)} tokens" for question in questions]
        self.stop_token_ids: tuple[int, ...] = ()

    def ask(self, number: int) -> list[int]:
        self._ids += self._asked[number]
        return list(self._ids)

    def answer(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        return " ".join(map(str, token_ids))

    def is_right(self, number: int, token_ids: Sequence[int]) -> bool | None:
        return None


class RecallDialogue(TokenDialogue):
    """A document and one question about it, whose answer is a single token."""

    def __init__(self, case: Case) -> None:
        super().__init__([], [case.prompt.tolist()])
        self.questions = [f"document {case.document}: what is the value of {case.name}?"]
        self._expected = case.expected

    def is_right(self, number: int, token_ids: Sequence[int]) -> bool | None:
        return token_ids[0] == self._expected


def make_dialogues(
    table: WorkloadTable, vocab_size: int, tokenizer: Tokenizer | None
) -> list[Dialogue]:
    """Fresh dialogues of the workload; equal ones at each call.

    Args:
        tokenizer: needed for written conversations alone.

    Raises:
        ConfigError: the file of conversations cannot be used.
    """
    if table.source == "conversations":
        assert tokenizer is not None
        return [ScriptedDialogue(tokenizer, script) for script in load_scripts(table)]
    if table.source == "recall":
        shape = DocumentShape(table.document_tokens)
        cases = make_cases(table.seed, table.documents, table.turns or 1, shape)
        return [RecallDialogue(case) for case in cases]
    rng = np.random.default_rng(table.seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, vocab_size, count).tolist()

    documents = [tokens(table.document_tokens) for _ in range(table.documents)]
    return [
        TokenDialogue(document, [tokens(table.question_tokens) for _ in range(table.turns or 1)])
        for document in documents
        for _ in range(table.dialogues_per_document)
    ]
