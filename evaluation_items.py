"""What must not be trained on, asked of one row at a time.

items = EvaluationItems(supply, eval_rows).with_samples(result.samples)
items.asks_same(row), items.held_by(row)        # False, "83% of sample arc_easy/17"
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from evaluation import EVAL_FILE_TASK, SampleResult
from near_matches import NearMatcher
from overlap import dialogue_key, fingerprint, prompt_key, question_keys, question_text
from row_record import Row


class EvaluationItems:
    """Evaluation rows, and the samples of tasks whose items are in no file. `supply` are the training rows, by which
    common n-grams are told (`near_matches`)."""

    def __init__(self, supply: Sequence[Row], rows: Sequence[Row], samples: Sequence[SampleResult] = ()) -> None:
        self._supply, self._rows = supply, rows
        self._names = {question_text(row): f"item {row.id!r}" for row in rows}
        self.keys = {prompt_key(row) for row in rows}
        for sample in samples:
            if not sample.input.strip():
                continue
            told = f"sample {sample.task}/{sample.id}"
            self._names[sample.input] = told
            self.keys.add(fingerprint([sample.input]))
            if sample.turns is not None:
                self._names["\n".join(turn["content"] for turn in sample.turns if turn["role"] == "user")] = told
                self.keys.add(dialogue_key(sample.turns))

    @cached_property
    def _matcher(self) -> NearMatcher:
        return NearMatcher.against(list(self._names), self._supply)

    def with_samples(self, samples: Sequence[SampleResult]) -> EvaluationItems:
        """These items and what `samples` ask. Those of `eval_file` are there as rows already: a turn of such a dialogue
        is no item of its own."""
        others = [sample for sample in samples if sample.task != EVAL_FILE_TASK or not self._rows]
        return EvaluationItems(self._supply, self._rows, others) if others else self

    def asks_same(self, row: Row) -> bool:
        """Whether `row` asks what an item asks."""
        return not self.keys.isdisjoint(question_keys(row))

    def held_by(self, row: Row) -> str | None:
        """The item that `row` holds most of, in words; None when it is near none."""
        found = self._matcher.match_text(question_text(row)) if self._names else None
        return None if found is None else f"{found[1]:.0%} of {list(self._names.values())[found[0]]}"
