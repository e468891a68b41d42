"""Holds conversations with an engine, each in its own pace, and notes what every turn cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uhrc_core.errors import UHRCError
from uhrc_engine.engine import Engine
from uhrc_engine.request import Completion, Request
from uhrc_engine.workload.dialogue import Dialogue


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer.

    Attributes:
        conversation, number: which turn this is, both from 0.
        prompt_tokens, cached_tokens: length of the prompt, and how much of it was reused.
        token_ids, text: the answer.
        right: whether it is the right one; ``None`` where there is no right one.
        ttft_s, latency_s: seconds from the question to the first and to the last token.
    """

    conversation: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    text: str
    right: bool | None
    ttft_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Talks:
    """All turns of a run, by conversation and number, and the seconds it took."""

    turns: tuple[Turn, ...]
    wall_s: float


def hold_conversations(
    engine: Engine,
    dialogues: Sequence[Dialogue],
    max_new_tokens: int,
    on_turn: Callable[[Turn], None],
) -> Talks:
    """Ask every dialogue's questions, the next one as soon as the answer is complete.

    All conversations start at once, so their turns interleave. Answers are greedy and become part
    of the next prompt.

    Args:
        on_turn: called after each turn.

    Raises:
        RequestTooLargeError: a conversation outgrew the context.
        UHRCError: a request failed.
    """
    asked: dict[str, tuple[int, int]] = {}
    turns: dict[tuple[int, int], Turn] = {}

    def ask(talk: int, number: int) -> None:
        dialogue = dialogues[talk]
        request = Request(
            dialogue.ask(number), max_new_tokens, stop_token_ids=dialogue.stop_token_ids
        )
        asked[engine.add_request(request)] = talk, number

    started = time.perf_counter()
    for talk in range(len(dialogues)):
        ask(talk, 0)
    while engine.has_work:
        for completion in engine.step().completions:
            talk, number = asked.pop(completion.rid)
            turns[talk, number] = turn = _turn(dialogues[talk], talk, number, completion)
            on_turn(turn)
            if number + 1 < len(dialogues[talk].questions):
                ask(talk, number + 1)
    wall_s = time.perf_counter() - started
    return Talks(tuple(turns[key] for key in sorted(turns)), wall_s)


def _turn(dialogue: Dialogue, talk: int, number: int, completion: Completion) -> Turn:
    if completion.error is not None or completion.ttft_s is None:
        raise UHRCError(
            f"conversation {talk}, turn {number} ended with {completion.finish_reason}: "
            f"{completion.error}"
        )
    return Turn(
        talk,
        number,
        completion.prompt_tokens,
        completion.cached_tokens,
        tuple(completion.token_ids),
        dialogue.answer(completion.token_ids),
        dialogue.is_right(number, completion.token_ids),
        completion.ttft_s,
        completion.latency_s,
    )
