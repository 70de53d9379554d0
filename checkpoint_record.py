"""A row of `checkpoints.jsonl`, in the shape of `tinker_cookbook.checkpoint_utils`, plus round, step and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from error_handling import CheckpointError

KINDS = ("both", "state", "sampler")
GONE = ("deleted", "lost", "superseded")


@dataclass(frozen=True)
class Checkpoint:
    """A row of `checkpoints.jsonl`: a checkpoint that the service confirmed.

    `batch` is the number of the next batch to do, `step` the count of optimizer steps the weights contain. `kind`:
    "both" (the checkpoint of a round), "state" (kept within a round, for resume only) or "sampler". `gone` says why
    nothing goes on from it any more: "deleted" (by us), "lost" (by the service) or "superseded" (its round is done
    again). Rows of other tools may lack round, step and kind.
    """

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None
    round: int | None = None
    step: int | None = None
    kind: str | None = None
    gone: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The row as tinker_cookbook writes it: fields that are None left out, `extra` at the top level."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"}
        return {**{name: value for name, value in known.items() if value is not None}, **self.extra}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Checkpoint:
        """The inverse of `to_row`; keys this version does not know are kept in `extra`."""
        known = {name: row[name] for name in cls.__dataclass_fields__ if name != "extra" and name in row}
        return cls(**{"name": "", **known}, extra={key: value for key, value in row.items() if key not in known})


def check_training_path(path: str) -> str:
    """`path` when training can load it (a `tinker://` state); else `CheckpointError` with the reason."""
    if not path.startswith("tinker://"):
        raise CheckpointError(f"{path!r} is no saved state: a path as tinker://<run>/weights/<name> is needed")
    if "/sampler_weights/" in path:
        raise CheckpointError(
            f"{path} holds sampler weights, which have no optimizer and cannot be trained on; "
            "give the path of a saved state (tinker://<run>/weights/<name>)"
        )
    return path
