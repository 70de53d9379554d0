"""What must not be trained on, asked of one row at a time.

items = EvaluationItems(supply, eval_rows).with_samples(result.samples)
items.asks_same(row), items.held_by(row)        # False, "83% of sample arc_easy/17"
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property

from evaluation import EVAL_FILE_TASK, SampleResult
from near_matches import NearMatcher, told_share
from overlap import Asked, dialogue_key, fingerprint, last_question, question_keys, question_text
from row_record import Row


class EvaluationItems:
    """Evaluation rows, and the samples of tasks whose items are in no file. `supply` are the training rows, by which
    common n-grams are told (`near_matches`). A row with the user turn of an item is no copy of it when system turns and
    answers differ (`overlap.Asked`); of samples it always is, as a task's target is seldom what a row would answer."""

    def __init__(self, supply: Sequence[Row], rows: Sequence[Row], samples: Sequence[SampleResult] = ()) -> None:
        self._supply, self._rows = supply, rows
        self._items: dict[tuple[str, Asked], str] = {}
        for row in rows:
            for text in (question_text(row), last_question(row.prompt)):
                if text is not None:
                    self._items[text, Asked.by(row)] = f"item {row.id!r}"
        for sample in samples:
            if not sample.input.strip():
                continue
            told = f"sample {sample.task}/{sample.id}"
            self._items[sample.input, Asked(fingerprint([sample.input]))] = told
            if sample.turns is not None:
                spoken = "\n".join(turn["content"] for turn in sample.turns if turn["role"] == "user")
                for text in (spoken, last_question(sample.turns)):
                    if text is not None:
                        self._items[text, Asked(dialogue_key(sample.turns))] = told
        self._by_key: dict[bytes, list[Asked]] = {}
        for _, asked in self._items:
            self._by_key.setdefault(asked.key, []).append(asked)

    @property
    def keys(self) -> Set[bytes]:
        """`overlap.prompt_key` of every item: only a row with one of these can ask the same."""
        return self._by_key.keys()

    @cached_property
    def _matcher(self) -> NearMatcher:
        return NearMatcher.against([text for text, _ in self._items], self._supply)

    def with_samples(self, samples: Sequence[SampleResult]) -> EvaluationItems:
        """These items and what `samples` ask. Those of `eval_file` are there as rows already: a turn of such a dialogue
        is no item of its own."""
        others = [sample for sample in samples if sample.task != EVAL_FILE_TASK or not self._rows]
        return EvaluationItems(self._supply, self._rows, others) if others else self

    def asks_same(self, row: Row) -> bool:
        """Whether `row` asks what an item asks."""
        shared = question_keys(row) & self.keys
        return any(not asked.differs(row) for key in shared for asked in self._by_key[key])

    def held_by(self, row: Row) -> str | None:
        """The item that `row` holds most of, in words; None when it is near none."""
        if not self._items:
            return None
        items = list(self._items.items())
        for match in self._matcher.match_text(question_text(row)):
            (_, asked), name = items[match.item]
            if not asked.differs(row):
                return f"{told_share(match.share, match.own)} of {name}"
        return None
