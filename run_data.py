"""The data files of a run, read and checked against each other before anything is spent.

    data = load_run_data("train.jsonl", pool_file="pool.jsonl", eval_file="eval.jsonl")
    data.train.rows[0].question, data.train.describe(), data.warnings

Training and pool rows that ask what an evaluation or test item asks refuse the run; those that hold most of an item
(`contamination`) are left out and listed, and so are pool rows that copy a training row. All faults of all files are
told in one `DataError`, each as `file:line: reason`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contamination import Comparison, NearMatch, compare
from error_handling import DataError
from overlap import prompt_key
from record_files import Fault, first_ten, quote
from row_columns import Array, answer_keys, asked_and_answered, first_with_same
from row_files import LoadedRows, Row, count_shapes, pair_warnings, raise_faults, read_rows
from row_formats import Purpose
from row_supply import RowSupply
from row_table import RowPairs, RowTable, shared_ids


@dataclass(frozen=True)
class RunData:
    """All files of a run, checked together.

    `train` and `pool` are without the rows `near` an evaluation or test item, unless overlap was allowed, and `pool` is
    without copies of training rows. `overlap` is empty unless it was allowed. `nearest` is the most similar (training
    or pool row, evaluation or test row, score in [0, 1]) left, for a person to judge.
    """

    train: LoadedRows
    pool: LoadedRows | None
    evaluation: LoadedRows | None
    overlap: tuple[tuple[Row, Row], ...]
    nearest: tuple[Row, Row, float] | None
    warnings: tuple[str, ...]
    near: tuple[NearMatch, ...] = ()
    test: LoadedRows | None = None

    @property
    def on_training_data(self) -> bool:
        """Whether evaluation items are in the training data, as they are or nearly so: then scores say nothing about
        other data."""
        return bool(self.overlap) or any(match.kept for match in self.near)


def load_run_data(
    train_file: str | Path,
    *,
    pool_file: str | Path | None = None,
    eval_file: str | Path | None = None,
    test_file: str | Path | None = None,
    category_field: str | None = None,
    train_on_what: str = "last_assistant_turn",
    allow_overlap: bool = False,
) -> RunData:
    """The files of a run, checked on their own and against each other; all faults in one `DataError`.

    Refused beside faulty rows: one file in two places, by path or content; an id in both training file and pool;
    training or pool rows that ask what an evaluation or test row asks (exactly or up to case, spaces and Unicode form).
    `allow_overlap` permits it for evaluation rows, and then keeps near matches too; a test file is never trained on.
    """
    faults: list[Fault] = []
    files: dict[str, LoadedRows] = {}
    places: tuple[tuple[str, str | Path | None, Purpose], ...] = (
        ("training", train_file, "train"),
        ("pool", pool_file, "train"),
        ("evaluation", eval_file, "eval"),
        ("test", test_file, "eval"),
    )
    unread: list[str] = []
    for name, path, purpose in places:
        if path is not None:
            try:
                files[name], found = read_rows(path, purpose, category_field, train_on_what)
            except DataError as error:
                unread.append(str(error))
            else:
                faults += found
    if unread:
        raise_faults(faults, "".join(f"\n{reason}" for reason in unread))
        raise DataError("\n".join(unread))
    refuse_same_file(files, allow_overlap=allow_overlap)
    train, pool = files["training"], files.get("pool")
    for row, other in shared_ids(train.rows, pool.rows) if pool else ():
        reason = f"the id {quote(other.id)} is also that of {row.where}; a pool needs ids of its own"
        faults.append(Fault(other.source, other.line, reason))
    supply = RowSupply(train.rows, *([pool.rows] if pool else []))
    evaluation = _compare(supply, files.get("evaluation"))
    # Test rows are kept out without an exception.
    test = _compare(supply, files.get("test"), by_system_turns=False)
    refused = () if allow_overlap else evaluation.overlap
    faults += [_overlap_fault(row, item, "test") for row, item in test.overlap]
    faults += [_overlap_fault(row, item, "evaluation") for row, item in refused]
    nearest = max((found.nearest for found in (evaluation, test) if found.nearest), key=lambda n: n[2], default=None)
    raise_faults(faults, _overlap_hint(nearest, refused=bool(refused), tested=bool(test.overlap)))
    near = {match.position: match for match in (*evaluation.near, *test.near)}
    dropped = {match.position for match in (*test.near, *(() if allow_overlap else evaluation.near))}
    warnings = [warning for loaded in files.values() for warning in loaded.warnings]
    warnings += _told_differing(evaluation.differing)
    if pool is not None:
        copies, told = _pool_copies(supply, train.rows, pool)
        dropped |= copies
        warnings += told
    n_train = len(train.rows)
    train = _without(train, {position for position in dropped if position < n_train})
    pool = pool and _without(pool, {position - n_train for position in dropped if position >= n_train})
    matches = tuple(replace(near[position], kept=position not in dropped) for position in sorted(near))
    if not len(train.rows):
        raise DataError(
            f"{train.path}: every row is nearly an evaluation item, so none is left to train on:\n"
            + "\n".join(f"  {line}" for line in first_ten(matches))
        )
    return RunData(
        train=train,
        pool=pool,
        evaluation=files.get("evaluation"),
        overlap=evaluation.overlap,
        nearest=nearest,
        warnings=tuple(warnings),
        near=matches,
        test=files.get("test"),
    )


def _compare(supply: RowSupply, held_out: LoadedRows | None, *, by_system_turns: bool = True) -> Comparison[Row, Row]:
    items = held_out.rows if held_out else ()
    asking = supply.asking({prompt_key(item) for item in items}).tolist()
    return compare(supply, items, asking, by_system_turns=by_system_turns)


def _told_differing(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """What to tell of rows with the user turn of an item that are trained on."""
    if not pairs:
        return []
    count = "1 row has" if len(pairs) == 1 else f"{len(pairs)} rows have"
    listed = ", ".join(first_ten(f"{row.where} ({item.where})" for row, item in pairs))
    told = "the user turn of an evaluation or test item, under another system turn and with another answer"
    return [f"{count} {told}, and so count as other questions: {listed}"]


def _pool_copies(supply: RowSupply, train: Sequence[Row], pool: LoadedRows) -> tuple[set[int], list[str]]:
    """Positions in `supply` of the pool rows whose question and answer are those of a training row but for case and
    spaces, and what to tell of them and of those with another answer to a training row's question."""
    (asks, answer), (pool_asks, pool_answer) = _asked_and_answered(train), _asked_and_answered(pool.rows)
    asks, answer = np.concatenate([asks, pool_asks]), np.concatenate([answer, pool_answer])
    first_asked, first_answered = first_with_same(asks), first_with_same(answer_keys(asks, answer))
    in_pool = np.arange(len(train), len(asks))
    copy = first_answered[in_pool] < len(train)
    copies, others = in_pool[copy], in_pool[~copy & (first_asked[in_pool] < len(train))]
    warnings = []
    if len(copies):
        pairs = RowPairs(supply, first_answered[copies], copies)
        listed = ", ".join(f"{row.where} ({first.where})" for first, row in pairs[:10])
        more = f", ... and {len(copies) - 10} more" if len(copies) > 10 else ""
        count = "1 row has" if len(copies) == 1 else f"{len(copies)} rows have"
        told = f"{pool.path}: {count} the question and answer of a training row, left out of the pool"
        warnings.append(f"{told}: {listed}{more}")
    conflicts = RowPairs(supply, first_asked[others], others)
    warnings += pair_warnings(conflicts, "the same question with two different answers")
    return set(copies.tolist()), warnings


def _asked_and_answered(rows: Sequence[Row]) -> tuple[Array, Array]:
    if isinstance(rows, RowTable):
        return rows.columns.asks, rows.columns.answer
    return asked_and_answered(rows)


def _without(loaded: LoadedRows, positions: Collection[int]) -> LoadedRows:
    """The rows of a file but for those at `positions`."""
    if not positions:
        return loaded
    kept = [position for position in range(len(loaded.rows)) if position not in positions]
    if isinstance(loaded.rows, RowTable):
        table = loaded.rows.take(kept)
        return replace(loaded, rows=table, shapes=count_shapes(table.columns))
    rows = tuple(loaded.rows[position] for position in kept)
    return replace(loaded, rows=rows, shapes=dict(Counter(row.shape for row in rows).most_common()))


def refuse_same_file(files: Mapping[str, LoadedRows], *, allow_overlap: bool) -> None:
    """Raise `DataError` where two files of a run are one, by path, by a link, or by content.

    `files` has the keys "training", "pool", "evaluation" and "test", or some of them, in this order. `allow_overlap`
    permits the evaluation file to be trained on, never the test file.
    """
    told = []
    for (first, one), (second, other) in itertools.combinations(files.items(), 2):
        if allow_overlap and second == "evaluation":
            continue
        if one.path.samefile(other.path):
            told.append(f"the {first} file and the {second} file are one file: {one.path} and {other.path}")
        elif one.digest == other.digest:
            told.append(f"the {first} file {one.path} and the {second} file {other.path} have the same content")
    if told:
        remedy = "Name different files"
        if "test" not in files and "evaluation" in files:
            remedy += ", or set allow_overlap=true to measure on training data on purpose"
        raise DataError("\n".join([*told, f"{remedy}."]))


def _overlap_fault(row: Row, item: Row, kind: str) -> Fault:
    same = any(turn["content"] == item.question for turn in row.messages) or row.text == item.question
    how = "exactly" if same else "up to case, spaces and punctuation"
    return Fault(row.source, row.line, f"asks {how} what {kind} item {quote(item.id)} ({item.where}) asks")


def _overlap_hint(nearest: tuple[Row, Row, float] | None, *, refused: bool, tested: bool) -> str:
    """What to do about rows that ask the same, and the pair that may be a paraphrase besides."""
    hint = "\nRemove the rows on one side: what is in the test file is never trained on." if tested else ""
    if refused:
        if nearest:
            row, item, score = nearest
            hint += f"\nNearest pair apart from these (similarity {score:.2f}): {row.where} {quote(row.question)}"
            hint += f" and {item.where} {quote(item.question)}"
        hint += "\nRemove the rows on one side, or set allow_overlap=true to measure on training data on purpose."
    return hint
