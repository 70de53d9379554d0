"""Tasks whose score is more than the mean of right and wrong: several values, own metrics, a judge."""

from collections.abc import Sequence

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import HeadlineMetric
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    choice,
    exact,
    grouped,
    mean,
    metric,
    model_graded_qa,
    scorer,
    stderr,
)
from inspect_ai.solver import TaskState

LABELS = ("bug", "billing", "refund")


@metric
def f1_macro() -> Metric:
    """Mean F1 over the labels, from the labels that the scorer read and wanted."""

    def compute(scores: list[SampleScore]) -> float:
        said = [one.score.answer for one in scores]
        wanted = [(one.sample_metadata or {})["label"] for one in scores]
        found = []
        for label in sorted(set(wanted)):
            hits = sum(a == b == label for a, b in zip(said, wanted, strict=True))
            found.append(2 * hits / (said.count(label) + wanted.count(label)))
        return sum(found) / len(found)

    return compute


@metric
def needs_label() -> Metric:
    """Cannot be computed where the scorer wrote nothing down."""

    def compute(scores: list[SampleScore]) -> float:
        return sum((one.score.metadata or {})["weight"] for one in scores)

    return compute


@scorer(metrics=[f1_macro(), accuracy(), stderr(), needs_label(), grouped(mean(), "label")])
def label_read() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        said = state.output.completion.strip()
        right = said == target.text
        return Score(value=CORRECT if right else INCORRECT, answer=said, metadata={"weight": 0.0})

    return score


def tickets(count: int = 12) -> list[Sample]:
    return [
        Sample(
            input=f"ticket {n}",
            target=LABELS[n % 3],
            id=f"t{n:02d}",
            metadata={"label": LABELS[n % 3], "author": f"a{n // 2}"},
        )
        for n in range(count)
    ]


@task
def labels(headline: str | None = None, epochs: int = 1) -> Task:
    return Task(
        dataset=MemoryDataset(tickets()),
        scorer=[label_read(), exact()],
        headline_metric=headline,
        epochs=Epochs(epochs, "max") if epochs > 1 else None,
    )


@scorer(metrics=[accuracy()])
def second_time_lucky() -> Scorer:
    """Every second sample is right in its second epoch, and nothing else ever is."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=CORRECT if state.epoch == 2 and int(state.sample_id) % 2 else INCORRECT)

    return score


@task
def without_targets() -> Task:
    samples = [Sample(input=f"say something about {n}", id=n) for n in range(6)]
    return Task(dataset=MemoryDataset(samples), scorer=second_time_lucky(), epochs=Epochs(2, "max"))


@task
def multiple_choice_letters() -> Task:
    samples = [Sample(input=f"which {n}", target="AB"[n % 2], choices=["one", "two"]) for n in range(8)]
    return Task(dataset=MemoryDataset(samples), scorer=choice())


@scorer(metrics={"style": [mean()], "facts": [mean(), stderr()]})
def two_values() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"style": 0.25, "facts": 0.75})

    return score


@task
def valued(metric: str | None = None) -> Task:
    headline = HeadlineMetric(scorer="two_values", score=metric) if metric else None
    return Task(dataset=MemoryDataset(tickets(4)), scorer=two_values(), headline_metric=headline)


@scorer(metrics=[stderr()])
def only_spread() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=1.0)

    return score


@task
def unsure() -> Task:
    return Task(dataset=MemoryDataset(tickets(4)), scorer=only_spread())


@task
def lost_headline() -> Task:
    return Task(dataset=MemoryDataset(tickets(4)), scorer=exact(), headline_metric="judge")


@task
def collected() -> Task:
    return Task(dataset=MemoryDataset(tickets(4)), scorer=exact(), epochs=Epochs(2, "collect"))


@task
def judged(verdicts: Sequence[str]) -> Task:
    """Its judge replies with the verdicts in the order in which it is asked."""
    outputs = [ModelOutput.from_content("judge", verdict) for verdict in verdicts]
    for output in outputs:
        output.usage = ModelUsage()
    judge = get_model("mockllm/judge", custom_outputs=outputs, memoize=False)
    samples = [Sample(input=f"question {n}", target="x", id=f"j{n}") for n in range(len(verdicts))]
    return Task(dataset=MemoryDataset(samples), scorer=model_graded_qa(model=judge))
