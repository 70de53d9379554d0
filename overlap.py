"""Questions that are the same: what must not be in training and evaluation at once.

`question_keys` gives the fingerprints by which two rows ask the same thing: exact up to case, white space, Unicode
form and surrounding punctuation (`evaluation.normalise`). `find_overlap` compares two sets of rows by hashes, in time
linear in their sizes::

    leaks = find_overlap(train_rows, eval_rows)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

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
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update((normalise(part) or part.strip()).encode("utf-8", "surrogatepass") + b"\x00")
    return digest.digest()


def prompt_key(row: Asks) -> bytes:
    """The key of the whole dialogue before the target, without system turns; of a text row, of its text."""
    if row.text is not None:
        return fingerprint([row.text])
    return _dialogue_key(row.prompt)


def question_keys(row: Asks) -> set[bytes]:
    """Keys of everything a training row has an answer to: each dialogue before an assistant turn, and each user turn
    that is answered. A system turn does not make a question another one, so it is left out."""
    if row.text is not None:
        return {fingerprint([row.text])}
    keys = set()
    dialogue: list[dict[str, str]] = []
    for turn in row.messages:
        if turn["role"] == "assistant":
            keys.add(_dialogue_key(dialogue))
            # Alone, the turn has the key of the dialogue already.
            if len(dialogue) > 1 and dialogue[-1]["role"] == "user":
                keys.add(fingerprint([dialogue[-1]["content"]]))
        if turn["role"] != "system":
            dialogue.append(turn)
    return keys


def _dialogue_key(messages: Sequence[dict[str, str]]) -> bytes:
    turns = [turn for turn in messages if turn["role"] != "system"]
    if len(turns) == 1:
        return fingerprint([turns[0]["content"]])
    return fingerprint([part for turn in turns for part in (turn["role"], turn["content"])])


def question_text(row: Asks) -> str:
    """What a row asks, for similarity: its user turns before the target (a text row's text). Never the answer."""
    if row.text is not None:
        return row.text
    return "\n".join(turn["content"] for turn in row.prompt if turn["role"] == "user")


def find_overlap(rows: Iterable[R], others: Iterable[S]) -> list[tuple[R, S]]:
    """Pairs (training row, evaluation row) that ask the same. Every row of either side that has a partner is listed
    at least once, but not every combination, so that the list stays linear in the number of rows."""
    overlap = Overlap[R, S](others)
    for row in rows:
        overlap.add(row)
    return overlap.pairs()


class Overlap(Generic[R, S]):
    """`find_overlap` for training rows that come one after the other."""

    def __init__(self, others: Iterable[S]) -> None:
        self._by_key: dict[bytes, list[S]] = {}
        for other in others:
            self._by_key.setdefault(prompt_key(other), []).append(other)
        self._first_row: dict[bytes, R] = {}
        self._pairs: list[tuple[R, S]] = []

    def add(self, row: R) -> bool:
        """Compare one more row; True when it asks what one of the others asks."""
        keys = [key for key in question_keys(row) if key in self._by_key]
        for key in sorted(keys):
            self._first_row.setdefault(key, row)
            self._pairs.append((row, self._by_key[key][0]))
        return bool(keys)

    def pairs(self) -> list[tuple[R, S]]:
        """See `find_overlap`."""
        further = [(row, other) for key, row in self._first_row.items() for other in self._by_key[key][1:]]
        return self._pairs + further
