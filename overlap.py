"""Questions that are the same: what must not be in training and evaluation at once.

`question_keys` gives the fingerprints by which two rows ask the same thing: exact up to case, white space, Unicode
form and surrounding punctuation (`evaluation.normalise`). `find_overlap` compares two sets of rows by hashes, in time
linear in their sizes::

    leaks = find_overlap(train_rows, eval_rows)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import xxhash

from evaluation import normalise


class Asks(Protocol):
    """The part of a `data_loader.Row` that says what it asks."""

    @property
    def messages(self) -> tuple[dict[str, str], ...]: ...
    @property
    def text(self) -> str | None: ...
    @property
    def prompt(self) -> tuple[dict[str, str], ...]: ...


R = TypeVar("R", bound=Asks)
S = TypeVar("S", bound=Asks)


def fingerprint(parts: Iterable[str]) -> bytes:
    """16 bytes that are equal for texts equal after `normalise` (a text of punctuation only stays as it is)."""
    folded = ((normalise(part) or part.strip()).encode("utf-8", "surrogatepass") + b"\x00" for part in parts)
    return xxhash.xxh3_128_digest(b"".join(folded))


def prompt_key(row: Asks) -> bytes:
    """The key of the whole dialogue before the target, without system turns; of a text row, of its text."""
    if row.text is not None:
        return fingerprint([row.text])
    return dialogue_key(row.prompt)


def question_keys(row: Asks) -> set[bytes]:
    """Keys of everything a training row has an answer to: each dialogue before an assistant turn, and each user turn
    that is answered. A system turn does not make a question another one, so it is left out."""
    if row.text is not None:
        return {fingerprint([row.text])}
    keys = set()
    for index, turn in enumerate(row.messages):
        if turn["role"] == "assistant":
            keys.add(dialogue_key(row.messages[:index]))
            if index and row.messages[index - 1]["role"] == "user":
                keys.add(fingerprint([row.messages[index - 1]["content"]]))
    return keys


def dialogue_key(messages: Sequence[Mapping[str, str]]) -> bytes:
    """The key of turns, system turns left out; of a single one, its content's."""
    turns = [turn for turn in messages if turn["role"] != "system"]
    if len(turns) == 1:
        return fingerprint([turns[0]["content"]])
    return fingerprint([part for turn in turns for part in (turn["role"], turn["content"])])


def question_text(row: Asks) -> str:
    """What a row asks, for similarity: its user turns before the target (a text row's text). Never the answer."""
    if row.text is not None:
        return row.text
    messages = row.messages
    if len(messages) == 2 and messages[0]["role"] == "user" and messages[1]["role"] == "assistant":
        return messages[0]["content"]
    return "\n".join(turn["content"] for turn in row.prompt if turn["role"] == "user")


def find_overlap(rows: Sequence[R], others: Sequence[S]) -> list[tuple[R, S]]:
    """Pairs (training row, evaluation row) that ask the same. Every row of either side that has a partner is listed
    at least once, but not every combination, so that the list stays linear in the number of rows."""
    first_other: dict[bytes, int] = {}
    other_keys = [prompt_key(other) for other in others]
    for position, key in enumerate(other_keys):
        first_other.setdefault(key, position)
    pairs = []
    first_row: dict[bytes, R] = {}
    listed: set[int] = set()
    for row in rows:
        shared = question_keys(row) & first_other.keys()
        partners = sorted({first_other[key] for key in shared})
        for key in shared:
            first_row.setdefault(key, row)
        pairs += [(row, others[partner]) for partner in partners]
        listed.update(partners)
    for position, key in enumerate(other_keys):
        if key in first_row and position not in listed:
            pairs.append((first_row[key], others[position]))
    return pairs
