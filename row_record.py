"""One row of a file, and the rules by which a record becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from record_files import RowFault, kind_of
from row_formats import SHAPE_NAMES, Message, Purpose, RowContent, convert_record, plain_pair


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file. Either `messages` (ending on an assistant turn, the target) or `text` holds its content.

    `id` is unique in its file; `shape` names the rule that converted it; `line` counts from 1; `metadata` holds the
    record's further fields.
    """

    id: str
    messages: tuple[Message, ...]
    text: str | None
    shape: str
    source: str
    line: int
    category: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _last_reply(self) -> int:
        turns = range(len(self.messages) - 1, -1, -1)
        return next((i for i in turns if self.messages[i]["role"] == "assistant"), len(self.messages))

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns before the final assistant turn; empty for a text row."""
        return self.messages[: self._last_reply]

    @property
    def target(self) -> str:
        """The content of the final assistant turn; a text row has none and gives ''."""
        last = self._last_reply
        return self.messages[last]["content"] if last < len(self.messages) else ""

    @property
    def question(self) -> str:
        """The first user turn (a text row's text); '' when no user speaks."""
        if self.text is not None:
            return self.text
        return next((turn["content"] for turn in self.messages if turn["role"] == "user"), "")

    @property
    def where(self) -> str:
        """file:line"""
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class RowRules:
    """What turns the records of one file into rows. `source` is the file as messages name it, `stem` begins the ids
    of rows that have none of their own."""

    source: str
    stem: str
    purpose: Purpose
    category_field: str | None = None
    train_on_what: str = "last_assistant_turn"

    def content(self, record: Mapping[str, Any]) -> RowContent:
        """The turns or the text of a record; `RowFault` when it has neither."""
        return convert_record(record, purpose=self.purpose, train_on_what=self.train_on_what)

    def default_id(self, line: int) -> str:
        return f"{self.stem}:{line}"

    def category(self, record: Mapping[str, Any]) -> str | None:
        """What the record holds in the category's field; `RowFault` when that is a list or an object."""
        for key in self._category_keys():
            value = record.get(key)
            if isinstance(value, list | dict):
                raise RowFault(f"the category {key!r} is {kind_of(value)}, expected a text")
            if value is not None and value != "":
                return str(value)
        return None

    def _category_keys(self) -> tuple[str, ...]:
        """`category_field`, and for training rows `category` in its absence: they need not be of the same origin."""
        if self.category_field is None:
            return ("category",)
        return (self.category_field, "category") if self.purpose == "train" else (self.category_field,)

    def row(self, record: Mapping[str, Any], line: int, content: RowContent | None = None) -> Row:
        """The row of a record; `RowFault` says why it is none. `content` is that of the record, when it is known."""
        pair = plain_pair(record) if content is None and self.purpose == "train" else None
        if pair is not None and len(record) == pair.used:  # nothing else to look at: most rows of most files
            turns = record.get("messages") or (
                {"role": "user", "content": pair.asked},
                {"role": "assistant", "content": pair.answered},
            )
            return Row(self.default_id(line), tuple(turns), None, SHAPE_NAMES[pair.shape], self.source, line)
        content = content or self.content(record)
        used = content.used_keys
        metadata: dict[str, Any] = {}
        if len(record) > len(used):
            beside = {"id", *self._category_keys()}
            metadata = {key: value for key, value in record.items() if key not in used and key not in beside}
        identity = given_id(record)
        return Row(
            id=self.default_id(line) if identity is None else identity,
            messages=content.messages,
            text=content.text,
            shape=content.shape,
            source=self.source,
            line=line,
            category=self.category(record),
            metadata=metadata,
        )


def given_id(record: Mapping[str, Any]) -> str | None:
    """The record's own `id` as a text; None when it has none. `RowFault` when it is neither text nor whole number."""
    given = record.get("id")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise RowFault(f"'id' is {'empty' if given == '' else kind_of(given)}, expected a text or a whole number")
    return str(given)
