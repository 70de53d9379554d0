"""Training rows whose label is probably wrong, and by which evidence.

A row is set aside when its label's loss is above 1.5 nats **and** most of its 10 nearest rows are labelled otherwise,
and only if the model already knows the class: in the evaluation it finds at least half of the class's samples (recall),
and at least half of what it puts there belongs there (precision), in every task that has the label. A class it does not
know yet has high losses everywhere, and the rule would throw away nearly half of its good rows; a class it gives nearly
every sample has a full recall and is not known either. Recall and precision may rest on a few samples: so the losses
must agree, and a class of which half of the measured rows or more have a high one is not known. Rows are listed for a
person, never deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evaluation import SampleResult, closed_label_set, normalise
from overlap import question_text
from row_record import Row
from row_supply import RowSupply
from text_index import Neighbours

if TYPE_CHECKING:
    import numpy as np

MIN_RECALL = 0.5
MIN_PRECISION = 0.5
MIN_LOSS = 1.5  # nats per trained token
NEIGHBOURS = 10
MIN_NEIGHBOURS = 5  # fewer are no evidence


@dataclass(frozen=True)
class SetAside:
    """A row the label guard keeps out. `loss` is in nats per trained token; `disagreeing` of its `neighbours` have
    another label."""

    row: Row
    loss: float
    disagreeing: int
    neighbours: int

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.row.id,
            "where": self.row.where,
            "label": self.row.target,
            "loss": self.loss,
            "disagreeing": self.disagreeing,
            "neighbours": self.neighbours,
        }


def suspect_labels(
    supply: RowSupply,
    allowed: np.ndarray,
    index: Neighbours,
    samples: Sequence[SampleResult],
    row_losses: Mapping[str, float],
) -> tuple[SetAside, ...]:
    """The suspects among the rows at which `allowed` is true; `index` holds the questions of all rows in order.

    A row's label is its target, where that is one of the evaluation's labels; other rows are neither judged nor
    asked. A row without a measured loss is not judged.
    """
    import numpy as np

    labels = sorted(set().union(*labels_by_task(samples).values()))
    known = known_labels(samples)
    label_of = np.full(len(supply), -1, dtype=np.int64)
    for number, label in enumerate(labels):
        label_of[supply.answering(label)] = number
    label_of[~allowed] = -1
    measured = {at: loss for name, loss in row_losses.items() if (at := supply.find(name)) is not None}
    high = {at: loss for at, loss in measured.items() if loss > MIN_LOSS}
    n_measured, n_high = (Counter(int(label_of[at]) for at in rows) for rows in (measured, high))
    known_here = {
        label for label in n_high if label >= 0 and labels[label] in known and 2 * n_high[label] < n_measured[label]
    }
    judged = [at for at in sorted(high) if int(label_of[at]) in known_here]
    rows = [supply[at] for at in judged]
    suspects = []
    nearest = index.nearest([question_text(row) for row in rows], limit=NEIGHBOURS + 1, among=label_of >= 0)
    for at, row, near in zip(judged, rows, nearest, strict=True):
        others = [position for position, _ in near if position != at][:NEIGHBOURS]
        disagreeing = sum(bool(label_of[position] != label_of[at]) for position in others)
        if len(others) >= MIN_NEIGHBOURS and 2 * disagreeing > len(others):
            suspects.append(SetAside(row, high[at], disagreeing, len(others)))
    return tuple(suspects)


def labels_by_task(samples: Sequence[SampleResult]) -> dict[str, set[str]]:
    """Normalised labels of each task whose targets form a closed set."""
    targets: dict[str, dict[str, str]] = {}
    for sample in samples:
        targets.setdefault(sample.task, {})[sample.id] = sample.target
    closed = {task: closed_label_set(list(by_id.values())) for task, by_id in targets.items()}
    return {task: {normalise(label) for label in labels} for task, labels in closed.items() if labels}


def known_labels(samples: Sequence[SampleResult]) -> set[str]:
    """Normalised labels whose recall and precision are at least a half in every task that has them."""
    known: set[str] = set()
    unknown: set[str] = set()
    for task, labels in labels_by_task(samples).items():
        of_task = [sample for sample in samples if sample.task == task]
        recall, precision = recall_by_label(of_task), precision_by_label(of_task)
        for label in labels:
            enough = recall.get(label, 0.0) >= MIN_RECALL and precision.get(label, 0.0) >= MIN_PRECISION
            (known if enough else unknown).add(label)
    return known - unknown


def replies_are_labels(samples: Sequence[SampleResult]) -> bool:
    """Whether any reply is one of its task's labels and nothing else; else no class's precision can be told."""
    labels = labels_by_task(samples)
    return any(normalise(sample.output) in labels.get(sample.task, ()) for sample in samples)


def recall_by_label(samples: Sequence[SampleResult]) -> dict[str, float]:
    """Mean score by normalised target, over samples that did not fail and have a grade."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        if sample.error is None and not sample.grade_missing:
            scores.setdefault(normalise(sample.target), []).append(sample.score)
    return {label: sum(values) / len(values) for label, values in scores.items()}


def precision_by_label(samples: Sequence[SampleResult]) -> dict[str, float]:
    """Share of the replies with a label that are right, by normalised label; labels never replied are absent."""
    right: dict[str, list[bool]] = {}
    for sample in samples:
        if sample.error is None and not sample.grade_missing:
            right.setdefault(normalise(sample.output), []).append(normalise(sample.target) == normalise(sample.output))
    return {label: sum(values) / len(values) for label, values in right.items()}
