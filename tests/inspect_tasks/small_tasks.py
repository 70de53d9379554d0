"""Inspect tasks for the tests: what people write, and the ways in which a task or a grade can be unusable."""

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, exact, includes, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.tool import Tool, tool


def numbered(count: int) -> list[Sample]:
    return [Sample(input=f"question {n}", target=f"answer {n}", id=f"q{n:03d}") for n in range(count)]


@task
def numbers(count: int = 10) -> Task:
    return Task(dataset=MemoryDataset(numbered(count)), scorer=exact())


@task
def mentions(count: int = 4) -> Task:
    samples = [
        Sample(input=f"question {n}", target=f"answer {n}", metadata={"topic": "even" if n % 2 == 0 else "odd"})
        for n in range(count)
    ]
    return Task(dataset=MemoryDataset(samples), scorer=includes())


@task
def repeated(epochs: int = 3, reducer: str = "mean") -> Task:
    return Task(dataset=MemoryDataset(numbered(4)), scorer=exact(), epochs=Epochs(epochs, reducer))


@task
def brief() -> Task:
    """Its solver asks for less than the run's settings, its configuration for more."""
    return Task(
        dataset=MemoryDataset(numbered(2)),
        solver=generate(max_tokens=3),
        scorer=exact(),
        config=GenerateConfig(temperature=0.9, stop_seqs=["\n\n"]),
    )


@task
def nothing() -> Task:
    return Task(dataset=MemoryDataset([]), scorer=exact())


@task
def ungraded() -> Task:
    return Task(dataset=MemoryDataset(numbered(2)))


@task
def doubled() -> Task:
    return Task(dataset=MemoryDataset([*numbered(2), *numbered(1)]), scorer=exact())


@task
def other_model() -> Task:
    return Task(dataset=MemoryDataset(numbered(1)), scorer=exact(), model=get_model("mockllm/model"))


@task
def needs_argument(level: str) -> Task:
    return Task(dataset=MemoryDataset(numbered(1)), scorer=exact(), metadata={"level": level})


@task
def broken() -> Task:
    raise FileNotFoundError("questions.csv is gone")


@scorer(metrics=[mean()])
def by_question(values: dict[str, float | str | None]) -> Scorer:
    """The value written down for a question; None gives no score at all."""

    async def score(state: TaskState, target: Target) -> Score | None:
        value = values[str(state.sample_id)]
        return None if value is None else Score(value=value)

    return score


@task
def graded(values: dict[str, float | str | None]) -> Task:
    samples = [Sample(input=key, target="x", id=key) for key in values]
    return Task(dataset=MemoryDataset(samples), scorer=by_question(values))


@scorer(metrics=[accuracy()])
def always(value: float) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=value)

    return score


@task
def two_scorers() -> Task:
    return Task(dataset=MemoryDataset(numbered(2)), scorer=[always(1.0), exact()])


@scorer(metrics=[accuracy()])
def failing() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        if state.sample_id == "q001":
            raise RuntimeError("the grader is away")
        return Score(value="C")

    return score


@task
def grader_away() -> Task:
    return Task(dataset=MemoryDataset(numbered(3)), scorer=failing())


@tool
def lookup() -> Tool:
    async def execute(word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word

    return execute


@solver
def with_tool() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.tools = [lookup()]
        return await generate(state)

    return solve


@task
def uses_tools() -> Task:
    return Task(dataset=MemoryDataset(numbered(3)), solver=with_tool(), scorer=exact())
