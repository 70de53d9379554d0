"""Training and evaluation files as rows, rows as `tinker.Datum`s with a loss mask, and the order in which they train.

Use::

    data = load_run_data("train.jsonl", eval_file="eval.jsonl")         # every fault of every file in one DataError
    loader = DataLoader(chat_format, max_seq_length=2048)
    print(loader.check(data.train.rows).describe())                     # trained tokens 812 of 10233 (7.9 %), ...
    rows = loader.usable(data.train.rows)
    for step in range(steps):
        batch = batch_rows(rows, batch_size=8, seed=42, round=1, step_in_round=step)
        datums = [example.datum for row in batch for example in loader.render(row)]

Reading files is the work of `row_files` and `run_data`, comparing questions that of `overlap` and `contamination`;
their names are offered here too.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from contamination import nearest_pair
from error_handling import DataError
from overlap import find_overlap
from record_files import first_ten
from row_files import HELD_ROWS, LoadedRows, Row, load_rows
from row_table import RowsById, RowTable
from run_data import RunData, load_run_data

if TYPE_CHECKING:
    import tinker

    from rendering import ChatFormat, TokenSequence

__all__ = [
    "DataLoader",
    "LoadedRows",
    "RenderStats",
    "RenderedExample",
    "Row",
    "RowTable",
    "RowsById",
    "RunData",
    "batch_rows",
    "find_overlap",
    "load_rows",
    "load_run_data",
    "nearest_pair",
    "steps_per_epoch",
]

T = TypeVar("T")

# Tokens of rendered rows that are kept; one takes about 100 bytes, most of them in lists of Python numbers.
KEPT_TOKENS = 3_000_000
# Rows of a large file that are rendered before training starts.
CHECKED_ROWS = 2_000


@dataclass(frozen=True)
class RenderedExample:
    """A training example. `n_tokens` counts the datum's target tokens, `n_trained` those with a loss weight."""

    datum: tinker.Datum
    n_tokens: int
    n_trained: int


@dataclass(frozen=True)
class RenderStats:
    """What rendering some rows gave; `tokens` and `trained` are summed over the `examples` of the kept rows.

    `rows` counts the rows that were rendered, `of` all there are: the others are rendered when they are chosen.
    """

    rows: int
    dropped: int
    examples: int
    tokens: int
    trained: int
    of: int

    def describe(self) -> str:
        share = 100 * self.trained / max(self.tokens, 1)
        lost = f", {self.dropped} of {self.rows} rows dropped" if self.dropped else ""
        told = f"trained tokens {self.trained} of {self.tokens} ({share:.1f} %) in {self.examples} examples{lost}"
        if self.rows < self.of:
            told += f"; checked {self.rows:,} of {self.of:,} rows; the others are rendered when they are chosen"
        return told


class DataLoader:
    """Renders rows when they are asked for, and keeps the newest of them, up to `KEPT_TOKENS`.

    A row longer than `max_seq_length` tokens is dropped whole: cut from the right it would lose the very tokens to be
    learnt. So is a row without a trained token. `dropped` holds the reasons by row id.
    """

    def __init__(
        self, chat_format: ChatFormat, *, max_seq_length: int, train_on_what: str = "last_assistant_turn"
    ) -> None:
        self.chat_format = chat_format
        self.max_seq_length = max_seq_length
        self.train_on_what = train_on_what
        self.dropped: dict[str, str] = {}
        self._rendered: OrderedDict[tuple[str, int, str], tuple[RenderedExample, ...]] = OrderedDict()
        self._kept_tokens = 0

    def sequences(self, row: Row) -> list[TokenSequence]:
        """The row's token sequences before the limit is applied; `DataError` when the chat format refuses them."""
        try:
            if row.text is not None:
                return [self.chat_format.text_example(row.text)]
            return self.chat_format.training_examples([dict(turn) for turn in row.messages], self.train_on_what)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error

    def render(self, row: Row) -> tuple[RenderedExample, ...]:
        """The row's training examples; empty when it is dropped (see `dropped`).

        Raises `DataError` with the row's place when the chat format refuses its conversation.
        """
        key = (row.source, row.line, row.id)
        if key in self._rendered:
            self._rendered.move_to_end(key)
            return self._rendered[key]
        sequences = self.sequences(row)
        reason = self._reason_to_drop(sequences)
        if reason:
            self.dropped[row.id] = reason
        examples = () if reason else tuple(_example(sequence) for sequence in sequences)
        self._rendered[key] = examples
        self._kept_tokens += _cost(examples)
        while self._kept_tokens > KEPT_TOKENS and len(self._rendered) > 1:
            self._kept_tokens -= _cost(self._rendered.popitem(last=False)[1])
        return examples

    def can_train(self, row: Row) -> bool:
        """Whether the row can be trained on; if not, `dropped` holds the reason, a refusal by the chat format too."""
        if row.id in self.dropped:
            return False
        try:
            return bool(self.render(row))
        except DataError as error:
            self.dropped[row.id] = str(error)
            return False

    def usable(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that are not dropped, in order. Of a large file all of them: ask `can_train` when one is chosen."""
        return rows if len(rows) > HELD_ROWS else [row for row in rows if self.render(row)]

    def check(self, rows: Sequence[Row], *, seed: int = 0) -> RenderStats:
        """Renders the rows, of a large file `CHECKED_ROWS` drawn by `seed`, and counts. `DataError` tells the rows that
        the chat format refuses, all together, and is raised too when no row at all can be trained on."""
        places: Sequence[int] = range(len(rows))
        if len(rows) > HELD_ROWS:
            places = sorted(random.Random(f"check/{seed}").sample(places, CHECKED_ROWS))
        groups, refused = [], []
        for row in _at(rows, places):
            try:
                groups.append(self.render(row))
            except DataError as error:
                refused.append(f"  {error}")
        if refused:
            listed = "\n".join(first_ten(refused))
            checked = len(places) if len(places) == len(rows) else f"{len(places)} (of {len(rows)}) checked"
            raise DataError(f"{len(refused)} of {checked} rows cannot be rendered:\n{listed}")
        if not any(groups) and not any(self.can_train(row) for row in rows):
            reasons = first_ten(f"  {row.where}: {self.dropped[row.id]}" for row in rows)
            remedy = "raise max_seq_length, or shorten the rows"
            raise DataError("\n".join([f"none of {len(rows)} rows can be trained on; {remedy}:", *reasons]))
        examples = [example for group in groups for example in group]
        return RenderStats(
            rows=len(places),
            dropped=sum(not group for group in groups),
            examples=len(examples),
            tokens=sum(example.n_tokens for example in examples),
            trained=sum(example.n_trained for example in examples),
            of=len(rows),
        )

    def mask_preview(self, row: Row, *, colour: bool = False) -> str:
        """The row's (first) example for the terminal: its text in stretches, marked as trained (`>`) or context
        (`|`), with `colour` also in green and dim. Control characters in the data are shown as escapes."""
        sequences = self.sequences(row)
        if not sequences:
            return f"{row.where}: no example"
        sequence = sequences[0]
        reason = self._reason_to_drop(sequences)
        title = f"{row.where}: trained tokens {_trained(sequence)} of {len(sequence.tokens) - 1}"
        title += f" (example 1 of {len(sequences)})" if len(sequences) > 1 else ""
        lines = [title + (f"; dropped: {reason}" if reason else "")]
        start = 0
        for end in range(1, len(sequence.tokens) + 1):
            trained = sequence.weights[start] > 0
            if end < len(sequence.tokens) and (sequence.weights[end] > 0) == trained:
                continue
            text = self.chat_format.tokenizer.decode(list(sequence.tokens[start:end]))
            for piece in text.removesuffix("\n").split("\n"):
                shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in piece)
                line = f"{'>' if trained else '|'} {shown}"
                lines.append(f"\x1b[{32 if trained else 2}m{line}\x1b[0m" if colour else line)
            start = end
        return "\n".join(lines)

    def _reason_to_drop(self, sequences: Sequence[TokenSequence]) -> str | None:
        longest = max((len(sequence.tokens) for sequence in sequences), default=0)
        if longest > self.max_seq_length:
            return f"{longest} tokens, longer than max_seq_length {self.max_seq_length}"
        if not sequences or any(_trained(sequence) == 0 for sequence in sequences):
            return "no token of it would be trained"
        return None


def _at(rows: Sequence[Row], places: Sequence[int]) -> Iterable[Row]:
    if len(places) == len(rows):
        return rows
    return rows.take(places) if isinstance(rows, RowTable) else (rows[place] for place in places)


def _cost(examples: Sequence[RenderedExample]) -> int:
    return 1 + sum(example.n_tokens for example in examples)


def _trained(sequence: TokenSequence) -> int:
    """Trained tokens of a sequence; its first token is predicted from nothing, so it never counts."""
    return sum(weight > 0 for weight in sequence.weights[1:])


def _example(sequence: TokenSequence) -> RenderedExample:
    return RenderedExample(make_datum(sequence), len(sequence.tokens) - 1, _trained(sequence))


def make_datum(sequence: TokenSequence) -> tinker.Datum:
    """The sequence shifted for next-token prediction: input tokens[:-1], targets tokens[1:], weights[1:].

    Made by tinker-cookbook where it is installed and by hand otherwise, with equal arrays.
    """
    import tinker

    tokens = [int(token) for token in sequence.tokens]
    weights = [float(weight) for weight in sequence.weights]
    if len(tokens) != len(weights):
        raise DataError(f"a token sequence has {len(tokens)} tokens but {len(weights)} weights")
    try:
        import torch
        from tinker_cookbook.supervised.common import datum_from_model_input_weights
    except ImportError:
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "weights": tinker.TensorData(data=weights[1:], dtype="float32", shape=[len(weights) - 1]),
                "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            },
        )
    return datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), torch.tensor(weights))


def steps_per_epoch(n_rows: int, batch_size: int) -> int:
    """Optimizer steps that show every row once; the last batch may be a partial one."""
    return -(-n_rows // batch_size)


def batch_rows(rows: Sequence[T], *, batch_size: int, seed: int, round: int, step_in_round: int) -> list[T]:
    """The rows of one step, a function of its arguments alone. `step_in_round` counts from 0.

    Each epoch is another permutation of all rows; its last batch may be smaller and is trained, never filled up from
    the next epoch.
    """
    if not rows:
        raise DataError("there are no rows to make a batch of")
    if batch_size < 1 or step_in_round < 0:
        raise ValueError(f"batch_size {batch_size} must be at least 1 and step_in_round {step_in_round} at least 0")
    epoch, step = divmod(step_in_round, steps_per_epoch(len(rows), batch_size))
    order = _permutation(len(rows), seed, round, epoch)
    return [rows[index] for index in order[step * batch_size : (step + 1) * batch_size]]


@lru_cache(maxsize=4)  # the steps of an epoch ask for the same permutation one after the other
def _permutation(size: int, seed: int, round: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"batches/{seed}/{round}/{epoch}").shuffle(order)
    return tuple(order)
