"""The ``[workload]`` table and the file of conversations it names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from uhrc_core.errors import ConfigError
from uhrc_core.registry.tables import ConfigPath, ConfigTable, PositiveInt

BUILT_IN = Path(__file__).parent / "data" / "conversations.toml"


class WorkloadTable(ConfigTable):
    """What ``uhrc run`` sends to the engine."""

    source: Literal["conversations", "random_tokens", "recall"] = Field(
        default="conversations",
        description="Written conversations; random token ids, for a model without a tokenizer; or "
        "the questions of `uhrc_engine.recall`, which have right answers.",
    )
    conversations: ConfigPath = Field(
        default=BUILT_IN,
        description="TOML file of [[conversation]] tables; built-in ones where not set.",
    )
    turns: PositiveInt | None = Field(
        default=None,
        description="Questions asked in each conversation, at most; unset: all written ones, else "
        "one. For recall: questions about each document.",
    )
    documents: PositiveInt = Field(
        default=2, description="Not for written conversations: documents that prompts begin with."
    )
    document_tokens: PositiveInt = Field(
        default=1024, description="Not for written conversations: their length."
    )
    dialogues_per_document: PositiveInt = Field(
        default=2, description="For random tokens: conversations that share a document."
    )
    question_tokens: PositiveInt = Field(
        default=32, description="For random tokens: length of a question."
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Not for written conversations: makes the tokens."
    )
    max_new_tokens: PositiveInt = Field(default=24, description="Length of an answer, at most.")


class Script(BaseModel):
    """One conversation to be held.

    Attributes:
        system: the system prompt.
        document: a text file beside the conversations' file, put after the system prompt.
        questions: the user's messages, one a turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    system: str = ""
    document: str = ""
    questions: list[str] = Field(min_length=1)


class _ScriptFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    conversation: list[Script] = Field(min_length=1)


def load_scripts(table: WorkloadTable) -> list[Script]:
    """The conversations of the table, documents read into their system prompts, turns limited.

    Raises:
        ConfigError: a file cannot be read, or what is wrong in it, one problem a line.
    """
    path = table.conversations
    text = _read(path, "workload.conversations")
    try:
        scripts = _ScriptFile.model_validate(tomllib.loads(text)).conversation
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        ) from error
    return [_with_document(script, path.parent, table.turns) for script in scripts]


def _with_document(script: Script, folder: Path, turns: int | None) -> Script:
    parts = [script.system] if script.system else []
    if script.document:
        parts.append(_read(folder / script.document, "document").strip())
    return Script(system="\n\n".join(parts), questions=script.questions[:turns])


def _read(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = '{path}': cannot be read: {error}") from error
