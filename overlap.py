"""Questions that are the same: what must not be in training and evaluation at once.

`question_keys` gives the fingerprints by which two rows ask the same thing: exact up to case, white space, Unicode
form and surrounding punctuation (`evaluation.normalise`). `find_overlap` compares two sets of rows by hashes, in time
linear in their sizes::

    leaks = find_overlap(train_rows, eval_rows)

A system turn does not make an evaluation item another one, with one exception (`Asked.differs`): "Translate into
French" and "Translate into German" before the same user turn are two tasks. So a row is no copy of an item when both
have system turns, these differ, and their answers differ, that is, neither mentions the other ("Paris" and "It is
Paris." are one answer). Such pairs are told to a person (`contamination.Comparison.differing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

from evaluation import mentions, normalise


class Asks(Protocol):
    """The part of a `data_loader.Row` that says what it asks."""

    @property
    def messages(self) -> tuple[dict[str, str], ...]: ...
    @property
    def text(self) -> str | None: ...
    @property
    def prompt(self) -> tuple[dict[str, str], ...]: ...
    @property
    def target(self) -> str: ...


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


@dataclass(frozen=True, slots=True)
class Asked:
    """What tells an evaluation item from others: the key of its dialogue, that of its system turns (None without any),
    and its answer ('' without system turns, as it then does not matter)."""

    key: bytes
    system: bytes | None = None
    answer: str = ""

    @classmethod
    def by(cls, item: Asks, *, by_system_turns: bool = True) -> Asked:
        """Of `item`; unless `by_system_turns`, its user turn is the same question under whatever system turns."""
        system = system_key(item) if by_system_turns else None
        return cls(prompt_key(item), system, "" if system is None else item.target)

    def differs(self, row: Asks) -> bool:
        """Whether a row with this user turn asks something else all the same: under other system turns, and with no
        answer that mentions this one or is mentioned in it."""
        if self.system is None or (system := system_key(row)) is None or system == self.system:
            return False
        wanted = normalise(self.answer)
        answers = (normalise(turn["content"]) for turn in row.messages if turn["role"] == "assistant")
        return not any(mentions(answer, wanted) or mentions(wanted, answer) for answer in answers)


def system_key(row: Asks) -> bytes | None:
    """The key of a row's system turns; None without any."""
    system = [turn["content"] for turn in row.messages if turn["role"] == "system"]
    return fingerprint(system) if system else None


def find_overlap(rows: Sequence[R], others: Sequence[S], *, by_system_turns: bool = True) -> list[tuple[R, S]]:
    """Pairs (training row, evaluation row) that ask the same (see `Asked`). Every row of either side that has a partner
    is listed at least once, but not every combination, so that the list stays linear in the number of rows."""
    asked = [Asked.by(other, by_system_turns=by_system_turns) for other in others]
    first_other: dict[Asked, int] = {}
    by_key: dict[bytes, list[Asked]] = {}
    for position, item in enumerate(asked):
        if first_other.setdefault(item, position) == position:
            by_key.setdefault(item.key, []).append(item)
    pairs = []
    first_row: dict[Asked, R] = {}
    listed: set[int] = set()
    for row in rows:
        partners: set[int] = set()
        for key in question_keys(row) & by_key.keys():
            same = [item for item in by_key[key] if not item.differs(row)]
            for item in same:
                first_row.setdefault(item, row)
            partners.update(first_other[item] for item in same[:1])
        pairs += [(row, others[partner]) for partner in sorted(partners)]
        listed.update(partners)
    for position, item in enumerate(asked):
        if item in first_row and position not in listed:
            pairs.append((first_row[item], others[position]))
    return pairs
