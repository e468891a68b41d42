"""Conversations as tokens, the scripts they follow, and holding them with an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_checkpoint import EOS
from uhrc_core.errors import ConfigError
from uhrc_engine import Engine
from uhrc_engine.recall.task import VOCAB_SIZE
from uhrc_engine.tokenizer import Tokenizer
from uhrc_engine.workload.config import Script, WorkloadTable, load_scripts
from uhrc_engine.workload.conversation import Conversation
from uhrc_engine.workload.dialogue import ScriptedDialogue, make_dialogues
from uhrc_engine.workload.drive import Turn, hold_conversations

ANSWER = [ord("h"), ord("i")]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_checkpoint)


def test_a_prompt_is_the_rendered_chat(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer, "be kind")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert talk.ask("hello") == tokenizer.encode_chat(messages)


@pytest.mark.parametrize("end", [[], [EOS]])
def test_the_next_prompt_extends_the_last_one_and_its_answer(
    tokenizer: Tokenizer, end: list[int]
) -> None:
    talk = Conversation(tokenizer)
    first = talk.ask("one")
    answer = [7, 200, 31]  # ids that are no text encoding of anything
    talk.answer(answer + end)
    second = talk.ask("two")
    assert second[: len(first) + 3] == first + answer
    assert second[len(first) + 3] == EOS
    tail = "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert second[len(first) + 3 :] == tokenizer.encode(tail)


def test_a_template_that_changes_an_answer_is_encoded_afresh(tokenizer: Tokenizer) -> None:
    class Trimming(Tokenizer):
        def __init__(self) -> None:
            self.__dict__ = dict(tokenizer.__dict__)

        def render_chat(self, messages, *, add_generation_prompt=True):  # type: ignore[no-untyped-def]
            trimmed = [m | {"content": m["content"].strip()} for m in messages]
            return super().render_chat(trimmed, add_generation_prompt=add_generation_prompt)

    talk = Conversation(Trimming())
    talk.ask("one")
    assert talk.answer(tokenizer.encode("  hi ")) == "  hi "
    assert "assistant\nhi<|im_end|>" in tokenizer.decode(talk.ask("two"), skip_special_tokens=False)


def test_the_built_in_conversations_share_prompts_in_pairs() -> None:
    scripts = load_scripts(WorkloadTable())
    assert len(scripts) >= 4
    assert all(len(script.questions) >= 3 for script in scripts)
    assert len({script.system for script in scripts}) * 2 == len(scripts)
    assert all(len(script.system.split()) > 700 for script in scripts)


def test_turns_limits_the_questions() -> None:
    assert {len(s.questions) for s in load_scripts(WorkloadTable(turns=2))} == {2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[conversation]]\nquestions = [", "not valid TOML"),
        ("", "conversation: Field required"),
        ("[[conversation]]\nquestions = []", r"conversation\.0\.questions: List should have"),
        ('[[conversation]]\nquestion = ["x"]', r"conversation\.0\.question: Extra inputs"),
        ('[[conversation]]\ndocument = "no.txt"\nquestions = ["x"]', r"no\.txt': cannot be read"),
    ],
)
def test_a_bad_conversation_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "talk.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_scripts(WorkloadTable(conversations=file))


def test_conversations_interleave_and_hit_what_they_said_before(
    tiny_checkpoint: Path, tokenizer: Tokenizer
) -> None:
    engine = Engine.from_pretrained(
        tiny_checkpoint,
        {
            "cache": {
                "enable_unified_radix_tree": True,
                "page_size": 16,
                "max_requests": 2,
                "max_context_len": 1024,
            },
            "components": {"full": {"num_tokens": 4096}},
            "scheduler": {"chunked_prefill_size": 64},
            "engine": {"decode_rows": [2]},
        },
    )
    system = "words " * 20
    scripts = [Script(system=system, questions=[f"{i} {j}" for j in range(3)]) for i in range(3)]
    dialogues = [ScriptedDialogue(tokenizer, script) for script in scripts]
    order: list[Turn] = []
    talks = hold_conversations(engine, dialogues, 20, order.append)
    assert [(t.conversation, t.number) for t in talks.turns] == [
        (i, j) for i in range(3) for j in range(3)
    ]
    assert [t.conversation for t in order] != sorted(t.conversation for t in order)
    by_turn = {(t.conversation, t.number): t for t in talks.turns}
    assert by_turn[0, 0].cached_tokens == 0
    assert by_turn[1, 0].cached_tokens >= len(system) // 16 * 16
    for talk in range(3):
        for number in (1, 2):
            before, now = by_turn[talk, number - 1], by_turn[talk, number]
            said = before.prompt_tokens + len(before.token_ids) - 1
            assert now.cached_tokens >= said // 16 * 16 - 16
            assert now.cached_tokens > before.prompt_tokens - 16


def test_dialogues_of_random_tokens_share_documents_and_are_made_anew_alike() -> None:
    table = WorkloadTable(
        source="random_tokens",
        turns=2,
        documents=2,
        dialogues_per_document=2,
        document_tokens=50,
        question_tokens=5,
    )
    dialogues, again = (make_dialogues(table, 100, None) for _ in range(2))
    prompts = [dialogue.ask(0) for dialogue in dialogues]
    assert prompts == [dialogue.ask(0) for dialogue in again]
    assert [len(prompt) for prompt in prompts] == [55] * 4
    assert prompts[0][:50] == prompts[1][:50] != prompts[2][:50]
    assert prompts[0][50:] != prompts[1][50:]
    assert dialogues[0].answer([7, 8]) == "7 8"
    second = dialogues[0].ask(1)
    assert second[:57] == [*prompts[0], 7, 8] and len(second) == 62
    assert dialogues[0].is_right(0, [7]) is None


def test_recall_questions_have_right_answers() -> None:
    table = WorkloadTable(source="recall", turns=3, documents=2, document_tokens=256)
    dialogues = make_dialogues(table, 256, None)
    assert len(dialogues) == 6
    prompts = [dialogue.ask(0) for dialogue in dialogues]
    assert prompts[0][:256] == prompts[2][:256] != prompts[1][:256]
    verdicts = [[d.is_right(0, [token]) for token in range(VOCAB_SIZE)] for d in dialogues]
    assert all(sum(map(bool, row)) == 1 for row in verdicts)
