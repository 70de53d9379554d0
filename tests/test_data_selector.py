import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from data_selector import DataSelector
from error_handling import ConfigurationError, DataError, SelectionError
from evaluation import SampleResult
from label_guard import known_labels, suspect_labels
from row_files import Row
from row_supply import RowSupply


@dataclass(frozen=True)
class Settings:
    strategy: str = "balanced_failures"
    hard_fraction: float = 0.25
    max_repeats: int = 1
    label_guard: bool = False
    embedding_model: str | None = None


LABELS = ("billing", "login", "delivery", "refund")


def row(identity: str, question: str, target: str = "x", *, source: str = "train", category: str | None = None) -> Row:
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": target})
    return Row(identity, turns, None, "messages", source, int(identity.split(":")[1]), category)


def labelled(counts: dict[str, int], source: str = "train") -> list[Row]:
    """Rows of some labels, each question with a word of its own."""
    rows: list[Row] = []
    for label, count in counts.items():
        for number in range(count):
            at = len(rows)
            rows.append(row(f"{source}:{at}", f"{label} ticket {source}{label}{number}", label, source=source))
    return rows


def sample(identity: str, question: str, target: str, score: float = 0.0, **more) -> SampleResult:
    return SampleResult(
        task=more.pop("task", "eval_file"),
        id=identity,
        epoch=more.pop("epoch", 1),
        input=question,
        target=target,
        output=target if score == 1 else "?",
        score=score,
        **more,
    )


def evaluation(labels: tuple[str, ...] = LABELS, wrong: tuple[str, ...] = ("refund",)) -> list[SampleResult]:
    """Four samples a label; those of the labels `wrong` failed."""
    return [
        sample(f"{label}{number}", f"{label} question e{label}{number}", label, 0.0 if label in wrong else 1.0)
        for label in labels
        for number in range(4)
    ]


def select(train, pool=(), *, samples=(), count=8, round=2, seen=None, seed=1, losses=None, eval_rows=(), **settings):
    selector = DataSelector(train, pool, eval_rows, selection_config=Settings(**settings), seed=seed)
    return selector.select(round=round, count=count, seen=seen or {}, samples=samples, row_losses=losses)


def ids(selection) -> list[str]:
    return [chosen.row.id for chosen in selection.rows]


# The first round


def test_first_round_takes_random_rows_of_the_training_file_only():
    train, pool = labelled({"billing": 20}), labelled({"billing": 20}, "pool")
    chosen = select(train, pool, round=1, count=10, samples=evaluation())
    assert len(chosen.rows) == 10
    assert {c.row.source for c in chosen.rows} == {"train"}
    assert {c.why for c in chosen.rows} == {"first round: random order"}
    assert ids(chosen) != [r.id for r in train[:10]]


def test_selection_is_a_function_of_seed_and_round():
    train = labelled({"billing": 20, "refund": 20})
    first = select(train, samples=evaluation(), count=12)
    assert first == select(train, samples=list(reversed(evaluation())), count=12)
    assert ids(first) != ids(select(train, samples=evaluation(), count=12, seed=2))
    assert ids(first) != ids(select(train, samples=evaluation(), count=12, round=3))


def test_unseen_rows_come_first_then_the_least_seen():
    train = labelled({"billing": 6})
    seen = {"train:0": 2, "train:1": 1, "train:2": 1}
    chosen = select(train, round=1, count=6, seen=seen)
    assert set(ids(chosen)[:3]) == {"train:3", "train:4", "train:5"}
    assert set(ids(chosen)[3:5]) == {"train:1", "train:2"}
    assert ids(chosen)[5] == "train:0"


def test_json_of_a_selected_row():
    chosen = select(labelled({"billing": 1}), round=1, count=1)
    assert chosen.rows[0].to_json() == {"id": "train:0", "weight": 1.0, "why": "first round: random order"}


# Balanced and nearest to failures


def test_three_quarters_are_spread_equally_and_one_quarter_is_near_the_failures():
    train = labelled({"billing": 60, "login": 60, "delivery": 5, "refund": 20})
    chosen = select(train, samples=evaluation(), count=16)
    near = [c for c in chosen.rows if c.why.startswith("nearest to failed sample eval_file/refund")]
    spread = [c for c in chosen.rows if c.why.startswith("category")]
    assert (len(near), len(spread)) == (4, 12)
    assert Counter(c.row.target for c in spread) == dict.fromkeys(LABELS, 3)
    assert {c.row.target for c in near} == {"refund"}
    assert len(set(ids(chosen))) == 16
    assert "4 rows nearest to 4 of 4 failed samples" in chosen.notes
    assert "12 rows spread over 4 categories" in chosen.notes


def test_pool_and_training_file_are_drawn_on_alike():
    chosen = select(
        labelled({"billing": 4}), labelled({"refund": 4}, "pool"), samples=evaluation(), count=8, strategy="balanced"
    )
    assert Counter(c.row.source for c in chosen.rows) == {"train": 4, "pool": 4}


def test_a_small_category_gives_its_places_to_the_others():
    train = labelled({"billing": 20, "login": 20, "delivery": 20, "refund": 1})
    chosen = select(train, samples=evaluation(), count=13, strategy="balanced")
    assert Counter(c.row.target for c in chosen.rows) == {"billing": 4, "login": 4, "delivery": 4, "refund": 1}


def test_a_category_whose_rows_were_all_trained_on_keeps_its_share():
    train = labelled({"billing": 20, "login": 20, "refund": 4})
    seen = {f"train:{40 + n}": 1 for n in range(4)} | {f"train:{n}": 1 for n in range(10)}
    chosen = select(train, samples=evaluation(("billing", "login", "refund")), count=12, seen=seen, strategy="balanced")
    assert Counter(c.row.target for c in chosen.rows) == {"billing": 4, "login": 4, "refund": 4}
    # Within a category the unseen come first.
    assert Counter(c.why for c in chosen.rows) == {
        "category 'billing', unseen": 4,
        "category 'login', unseen": 4,
        "category 'refund', seen 1 time": 4,
    }
    billing = [c.row.id for c in chosen.rows if c.row.target == "billing"]
    assert not set(billing) & set(seen)


def test_places_are_spread_over_tasks_before_categories():
    samples = [sample(str(n), f"a{n}", "t", task="one", category="billing") for n in range(4)]
    samples += [
        sample(f"{c}{n}", f"b{n}", "t", task="two", category=c) for c in ("login", "delivery", "refund") for n in "12"
    ]
    train = [replace(r, category=r.target) for r in labelled(dict.fromkeys(LABELS, 20))]
    chosen = select(train, samples=samples, count=12, strategy="balanced")
    assert Counter(c.row.category for c in chosen.rows) == {"billing": 6, "login": 2, "delivery": 2, "refund": 2}
    assert chosen.rows[0].why.startswith("category 'billing' of task one") or "of task two" in chosen.rows[0].why


def test_row_category_comes_before_its_target():
    samples = [replace(s, category=s.target) for s in evaluation()]
    train = [row("train:1", "alpha", "billing", category="Refund"), row("train:2", "beta", "billing")]
    chosen = select(train, samples=samples, count=2, strategy="balanced")
    assert {c.row.id: c.why for c in chosen.rows} == {
        "train:1": "category 'refund', unseen",
        "train:2": "category 'billing', unseen",
    }


def test_each_failure_gets_one_neighbour_in_turn_without_repeats():
    train = [row(f"train:{n}", f"printer jams number{n}") for n in range(5)]
    train += [row(f"train:{n}", f"screen flickers number{n}") for n in range(5, 10)]
    samples = [sample("p", "my printer jams", "u1"), sample("s", "the screen flickers", "u2")]
    chosen = select(train, samples=samples, count=6, strategy="failures")
    assert [c.why.split(" (")[0].rsplit("/")[-1] for c in chosen.rows] in (["p", "s"] * 3, ["s", "p"] * 3)
    for c in chosen.rows:
        assert ("printer" in c.row.question) == ("/p (" in c.why)
    assert len(set(ids(chosen))) == 6


def test_neighbours_do_not_look_at_labels():
    train = [row("train:1", "refund of my parcel", "delivery"), row("train:2", "nothing alike", "refund")]
    samples = [sample("f", "a refund of the parcel", "refund")]
    assert ids(select(train, samples=samples, count=1, strategy="failures")) == ["train:1"]


def test_an_unseen_neighbour_comes_before_a_nearer_seen_one():
    train = [row("train:1", "printer jams again"), row("train:2", "printer is slow")]
    samples = [sample("f", "printer jams again today", "t")]
    assert ids(select(train, samples=samples, count=1, strategy="failures")) == ["train:1"]
    assert ids(select(train, samples=samples, count=1, strategy="failures", seen={"train:1": 1})) == ["train:2"]


def test_failed_and_ungraded_samples_are_never_mined():
    train = [row(f"train:{n}", f"printer jams number{n}") for n in range(3)]
    samples = [
        sample("error", "printer jams", "t", error="timeout"),
        sample("nograde", "printer jams", "t", grade_missing=True),
        sample("right", "printer jams", "t", 1.0),
    ]
    chosen = select(train, samples=samples, count=2)
    assert {c.why for c in chosen.rows} == {"random"}
    assert "no failed sample to learn from" in chosen.notes


def test_epochs_of_a_sample_are_one_failure_and_the_most_wrong_comes_first():
    train = [row("train:1", "printer jams"), row("train:2", "screen flickers"), row("train:3", "printer broken")]
    samples = [
        sample("half", "the printer", "t", 1.0, epoch=1),
        sample("half", "the printer", "t", 0.0, epoch=2),
        sample("never", "a screen", "t", 0.0, epoch=1),
    ]
    for seed in range(20):
        chosen = select(train, samples=samples, count=3, strategy="failures", seed=seed)
        assert ids(chosen)[0] == "train:2"
    assert "3 rows nearest to 2 of 2 failed samples" in chosen.notes


def test_without_categories_the_rest_is_random_and_the_note_says_what_to_expect():
    train = [row(f"train:{n}", f"question {n}", f"answer {n}") for n in range(20)]
    samples = [sample(str(n), f"asked {n} question", f"target {n}") for n in range(8)]
    chosen = select(train, samples=samples, count=8)
    assert Counter(c.why.split(" ")[0] for c in chosen.rows) == {"nearest": 2, "random": 6}
    assert any("expect 0 to 3 points" in note for note in chosen.notes)


def test_evaluation_categories_that_no_row_has_give_way_to_target_labels():
    samples = [replace(s, category="hard") for s in evaluation(("billing", "refund"))]
    chosen = select(labelled({"billing": 9, "refund": 3}), samples=samples, count=6, strategy="balanced")
    assert Counter(c.row.target for c in chosen.rows) == {"billing": 3, "refund": 3}


def test_a_category_without_rows_is_noted():
    chosen = select(labelled({"billing": 9}), samples=evaluation(("billing", "refund")), count=4, strategy="balanced")
    assert "categories of the evaluation without a row to train on: 'refund'" in chosen.notes


# Other strategies


def test_random_is_the_control_over_training_file_and_pool():
    train, pool = labelled({"billing": 30}), labelled({"refund": 30}, "pool")
    chosen = select(train, pool, samples=evaluation(), count=20, strategy="random")
    assert {c.why for c in chosen.rows} == {"random"}
    assert {c.row.source for c in chosen.rows} == {"train", "pool"}


def test_none_takes_the_training_file_in_order_and_goes_on_where_it_was():
    train, pool = labelled({"billing": 10}), labelled({"refund": 30}, "pool")
    chosen = select(train, pool, round=1, count=4, strategy="none")
    assert ids(chosen) == [f"train:{n}" for n in range(4)]
    chosen = select(train, pool, round=2, count=4, strategy="none", seen=dict.fromkeys(ids(chosen), 1))
    assert ids(chosen) == [f"train:{n}" for n in range(4, 8)]


def test_unknown_strategy_is_told_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="'hardest' is unknown; known are balanced_failures, balanced"):
        DataSelector([], [], [], selection_config=Settings("hardest"), seed=1)


# Repeats and supply


def test_no_row_is_listed_twice_and_a_short_supply_gives_a_short_list():
    for strategy in ("balanced_failures", "balanced", "failures", "random", "none"):
        chosen = select(labelled({"billing": 2, "refund": 3}), samples=evaluation(), count=20, strategy=strategy)
        assert sorted(ids(chosen)) == [f"train:{n}" for n in range(5)]
        assert "5 rows for 20 places: the list is cycled" in chosen.notes


def test_max_repeats_bounds_how_often_a_row_is_listed():
    for strategy in ("balanced_failures", "balanced", "failures", "random", "none"):
        train = labelled({"billing": 2, "refund": 3})
        chosen = select(train, samples=evaluation(), count=20, strategy=strategy, max_repeats=2)
        assert Counter(ids(chosen)) == {f"train:{n}": 2 for n in range(5)}
        if strategy in ("random", "none"):
            assert len(set(ids(chosen)[-5:])) == 5


def test_repeats_let_a_small_category_keep_its_share_within_a_round():
    train = labelled({"billing": 2, "refund": 10})
    chosen = select(train, samples=evaluation(("billing", "refund")), count=8, strategy="balanced", max_repeats=2)
    assert Counter(c.row.target for c in chosen.rows) == {"billing": 4, "refund": 4}
    assert Counter(ids(chosen))["train:0"] == Counter(ids(chosen))["train:1"] == 2


# Evaluation items


def test_evaluation_items_never_become_training_data():
    train = [row("train:1", "Where is my refund?"), row("train:2", "where  is my REFUND"), row("train:3", "Other")]
    item = row("eval:1", "Where is my refund?", source="eval")
    for strategy, round in (("balanced_failures", 1), ("balanced_failures", 2), ("none", 1), ("random", 3)):
        chosen = select(train, eval_rows=[item], samples=evaluation(), count=3, round=round, strategy=strategy)
        assert ids(chosen) == ["train:3"]
        assert any(note.startswith("2 rows ask what an evaluation item asks") for note in chosen.notes)
        assert any("train:1, train:2" in note for note in chosen.notes)


def test_items_of_a_task_without_a_file_are_kept_out_too():
    train = [row("train:1", "Where is my refund?"), row("train:2", "Other")]
    chosen = select(train, samples=[sample("s", "where is my refund", "t")], count=2)
    assert ids(chosen) == ["train:2"]


def dialogue(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def test_of_a_task_with_example_turns_the_asked_question_is_kept_out_and_mined():
    asked = "which lamp of the harbour wall is broken tonight"
    turns = dialogue("what is two and two", "four", asked)
    of_task = sample("s", asked, "t", task="arc", turns=turns)
    train = [
        row("train:1", asked.upper()),
        row("train:2", f"Tell me {asked}, please"),
        row("train:3", "a question about two and two"),
        row("train:4", "which wall has a lamp"),
    ]
    chosen = select(train, samples=[of_task], count=1, strategy="failures")
    assert ids(chosen) == ["train:4"]
    assert ids(select(train, samples=[of_task], count=4, round=1, seed=3)) in (
        ["train:3", "train:4"],
        ["train:4", "train:3"],
    )
    asks_all = Row("train:5", (*turns, {"role": "assistant", "content": "x"}), None, "messages", "train", 5)
    with pytest.raises(SelectionError, match="no row is left"):
        select([asks_all], samples=[of_task], count=1)


def test_turns_of_an_evaluation_dialogue_are_no_items_of_their_own():
    turns = dialogue("I need help", "With what?", "the lamp is broken")
    item = Row("eval:1", (*turns, {"role": "assistant", "content": "t"}), None, "messages", "eval", 1)
    train = [row("train:1", "I need help"), row("train:2", "the lamp is broken")]
    samples = [sample("eval:1", "the lamp is broken", "t", turns=turns)]
    assert sorted(ids(select(train, eval_rows=[item], samples=samples, count=2))) == ["train:1", "train:2"]
    assert samples[0].question == "I need help\nthe lamp is broken"
    assert SampleResult.from_row(samples[0].to_row()) == samples[0]


def test_overlap_on_purpose_keeps_every_row_and_no_row_left_is_an_error():
    rows = [row("train:1", "Where is my refund?")]
    with pytest.raises(SelectionError, match="no row is left to train on: 1 rows ask what an evaluation item asks"):
        select(rows, eval_rows=rows, round=1, count=1)
    selector = DataSelector(rows, [], rows, selection_config=Settings(), seed=1, allow_overlap=True)
    assert ids(selector.select(round=1, count=1, seen={}, samples=[])) == ["train:1"]


def test_an_id_that_names_two_rows_is_told():
    with pytest.raises(DataError, match="the id 'train:1' names both train:1 and pool:1"):
        select([row("train:1", "a")], [row("train:1", "b", source="pool")])


def test_rows_that_hold_most_of_a_sample_are_passed_over_and_told():
    asked = "which lamp of the harbour wall is broken tonight"
    train = [row("train:1", f"Tell me {asked}, please"), row("train:2", "a broken lamp"), row("train:3", "other words")]
    samples = [sample("s", asked, "t", task="arc")]
    chosen = select(train, samples=samples, count=2)
    assert sorted(ids(chosen)) == ["train:2", "train:3"]
    left_out = "1 rows hold most of an evaluation item and are left out: train:1 (100% of sample arc/s)"
    assert left_out in chosen.notes
    first = select(train, samples=samples, count=3, round=1)
    assert sorted(ids(first)) == ["train:2", "train:3"]
    assert left_out in first.notes


def test_chosen_rows_that_are_evaluation_items_are_counted_when_allowed():
    asked = "which lamp of the harbour wall is broken tonight"
    train = [row("train:1", f"Tell me {asked}, please"), row("train:2", "Is it late?"), row("train:3", "other words")]
    samples = [sample("s", asked, "t"), sample("late", "is it LATE", "t", 1.0)]
    selector = DataSelector(train, [], [], selection_config=Settings(), seed=1, allow_overlap=True)
    chosen = selector.select(round=2, count=3, seen={}, samples=samples)
    assert chosen.overlapping == 2
    assert "allow_overlap: 2 of the rows are evaluation items, or nearly" in chosen.notes
    assert select(train, samples=samples, count=3).overlapping == 0


# Neighbours by an embedding, and strategies of one's own


def test_neighbours_by_an_embedding_function(tmp_path):
    (tmp_path / "lengths.py").write_text("def embed(texts):\n    return [[1.0, len(text)] for text in texts]\n")
    train = [row("train:1", "aaaaaaaaaaaa"), row("train:2", "bbb"), row("train:3", "cccccc")]
    samples = [sample("f", "xxxxxx", "t")]
    chosen = select(
        train, samples=samples, count=1, strategy="failures", embedding_model=f"{tmp_path / 'lengths.py'}:embed"
    )
    assert [(c.row.id, c.why) for c in chosen.rows] == [
        ("train:3", "nearest to failed sample eval_file/f (similarity 1.00)")
    ]


STRATEGY = """
def by_id(request):
    assert request.n_train == 2 and request.seen == {"train:1": 1} and request.samples[0].id == "s"
    return (("pool:1" if request.round == 2 else request.rows[0], request.rng.choice(["why"])) for _ in range(1))

def unknown(request):
    return [("train:9", "w"), "train:1", ("train:1", "w"), ("train:1", "again"), ("train:2", 3)]

def too_many(request):
    return [(row, "all") for row in request.rows] + [("pool:2", "of the evaluation")]

def nothing(request):
    return []

def order(request):
    return [("train:1", " ".join(sample.id for sample in request.samples))]

def fails(request):
    return [request.missing]

def two(request, more):
    return []

async def later(request):
    return []
"""


def own(tmp_path, name: str, **more):
    (tmp_path / "mine_of_test.py").write_text(STRATEGY)
    train = [row("train:1", "alpha one"), row("train:2", "beta two")]
    pool = [row("pool:1", "gamma three", source="pool"), row("pool:2", "Where is it?", source="pool")]
    return select(
        train,
        pool,
        strategy=f"{tmp_path}/mine_of_test.py:{name}",
        seen={"train:1": 1},
        **{"count": 3, "samples": [sample("s", "where is it", "t")], **more},
    )


@pytest.fixture
def own_path(monkeypatch, tmp_path):
    """A folder for a module of one test's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    yield tmp_path
    sys.modules.pop("mine_of_test", None)


def test_a_strategy_of_one_s_own_chooses_rows_or_ids(own_path):
    chosen = own(own_path, "by_id", label_guard=True)
    assert [(c.row.id, c.why) for c in chosen.rows] == [("pool:1", "why")]
    assert "label guard not applied: the rows are chosen by a function of your own" in chosen.notes
    assert "1 rows for 3 places: the list is cycled" in chosen.notes
    assert ids(own(own_path, "by_id", round=1)) == ["train:1"]


def test_the_readme_s_strategy_is_one(own_path):
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    source = next(block for block in readme.split("```") if "def shortest_first" in block).removeprefix("python\n")
    (own_path / "shortest.py").write_text(source)
    train = [row("train:1", "a long question"), row("train:2", "mid size"), row("train:3", "short")]
    train.append(row("train:4", "Why?"))
    chosen = select(
        train,
        samples=[sample("s", "why", "t")],
        count=2,
        seen={"train:3": 1},
        strategy=f"{own_path}/shortest.py:shortest_first",
    )
    assert [(c.row.id, c.why) for c in chosen.rows] == [
        ("train:2", "short: 8 characters"),
        ("train:1", "short: 15 characters"),
    ]


def test_a_strategy_gets_samples_in_the_order_of_their_keys(own_path):
    samples = [sample(name, "else", "t") for name in ("b", "c", "a")]
    (chosen,) = own(own_path, "order", samples=samples).rows
    assert chosen.why == "a b c"


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        (
            "unknown",
            [
                "item 1: 'train:9' is the id of no training or pool row",
                "item 2 is 'train:1', expected (row or row id, why it was chosen)",
                "item 4: row 'train:1' is listed more than once (selection.max_repeats)",
                "item 5 is ('train:2', 3), expected",
            ],
        ),
        ("too_many", ["item 4: row 'pool:2' asks what an evaluation item asks", "5 rows for 3 places"]),
        ("nothing", ["no row was chosen"]),
        ("fails", ["round 2: AttributeError: 'SelectionRequest' object has no attribute 'missing'"]),
    ],
)
def test_what_a_strategy_returns_is_checked(own_path, name, faults):
    with pytest.raises(SelectionError) as error:
        own(own_path, name)
    assert f"selection.strategy {own_path}/mine_of_test.py:{name}, round 2" in str(error.value)
    for fault in faults:
        assert fault in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two", "two must take 1 argument by position"),
        ("later", "later is a coroutine function, expected a plain function"),
        ("absent", "the module has no absent; functions there: by_id, unknown"),
    ],
)
def test_a_strategy_is_checked_before_it_is_needed(own_path, name, message):
    with pytest.raises(ConfigurationError, match=message):
        own(own_path, name)


# The label guard


def guard_rows() -> list[Row]:
    """12 billing rows that look alike, among them one labelled refund; and 12 alike refund rows."""
    rows = [row(f"train:{n}", f"invoice charged twice n{n}", "billing") for n in range(12)]
    rows += [row(f"train:{n}", f"send my money back n{n}", "refund") for n in range(12, 24)]
    return [*rows, row("train:24", "invoice charged twice again", "refund")]


def guarded(losses: dict[str, float] | None, wrong: tuple[str, ...] = (), **more):
    samples = evaluation(("billing", "refund"), wrong)
    return select(guard_rows(), samples=samples, count=30, losses=losses, label_guard=True, **more)


def test_guard_sets_aside_a_high_loss_among_neighbours_of_another_label():
    losses = {f"train:{n}": 0.2 for n in range(24)} | {"train:24": 3.0}
    chosen = guarded(losses)
    assert [aside.row.id for aside in chosen.set_aside] == ["train:24"]
    assert "train:24" not in ids(chosen)
    assert len(ids(chosen)) == 24
    assert chosen.set_aside[0].to_json() == {
        "id": "train:24",
        "where": "train:24",
        "label": "refund",
        "loss": 3.0,
        "disagreeing": 10,
        "neighbours": 10,
    }
    assert "label guard: 1 of the 25 rows measured are set aside: train:24" in chosen.notes


@pytest.mark.parametrize("strategy", ["balanced_failures", "balanced", "failures", "random"])
def test_guard_serves_every_mining_strategy(strategy):
    losses = {f"train:{n}": 0.2 for n in range(24)} | {"train:24": 3.0}
    assert "train:24" not in ids(guarded(losses, strategy=strategy))


def test_guard_needs_both_the_loss_and_the_neighbours():
    low = {f"train:{n}": 1.5 for n in range(25)}
    assert guarded(low).set_aside == ()
    agreeing = {f"train:{n}": 0.2 for n in range(25)} | {"train:3": 9.0}
    assert guarded(agreeing).set_aside == ()


def test_guard_leaves_classes_alone_that_the_model_does_not_know():
    losses = {f"train:{n}": 0.2 for n in range(24)} | {"train:24": 3.0}
    chosen = guarded(losses, wrong=("refund",))
    assert chosen.set_aside == ()
    assert "train:24" in ids(chosen)


def replies(*counts, task="t"):
    """Samples: for each (count, target, reply) as many."""
    pairs = [(target, reply) for count, target, reply in counts for _ in range(count)]
    return [
        replace(sample(f"{task}{n}", f"q{n}", target, float(target == reply), task=task), output=reply)
        for n, (target, reply) in enumerate(pairs)
    ]


def test_guard_knows_a_class_from_half_of_its_samples_and_half_of_its_replies_on():
    def known(*counts):
        return "refund" in known_labels(replies(*counts))

    right = (2, "refund", "refund"), (4, "billing", "billing")
    assert known(*right, (2, "refund", "billing"))  # recall 2 of 4
    assert not known(*right, (3, "refund", "billing"))  # 2 of 5
    assert known(*right, (2, "billing", "refund"))  # precision 2 of 4
    assert not known(*right, (3, "billing", "refund"))  # 2 of 5


def test_guard_wants_a_label_known_in_every_task_that_has_it():
    known = replies((9, "yes", "yes"), (9, "no", "no"), task="one")
    assert known_labels(known) == {"yes", "no"}
    other = replies((3, "yes", "no"), (9, "no", "no"), task="two")
    assert known_labels([*known, *other]) == {"no"}


def test_guard_says_that_replies_which_are_no_labels_tell_nothing():
    wordy = [replace(one, output=f"ANSWER: {one.target}") for one in evaluation(("billing", "refund"), ())]
    chosen = select(guard_rows(), samples=wordy, count=30, losses={"train:24": 3.0}, label_guard=True)
    assert chosen.set_aside == ()
    assert any("no reply is a label alone" in note for note in chosen.notes)


@pytest.mark.parametrize(("others", "disagreeing", "set_aside"), [(10, 6, 1), (10, 5, 0), (5, 3, 1), (4, 4, 0)])
def test_guard_needs_more_than_half_of_at_least_five_neighbours(others, disagreeing, set_aside):
    rows = [row("train:0", "the row itself", "refund")]
    rows += [row(f"train:{n + 1}", f"other {n}", "billing" if n < disagreeing else "refund") for n in range(others)]

    class Nearest:
        """Stands for the index: every row is a neighbour, in order."""

        def nearest(self, queries, *, limit, among=None, levels=None):
            return [[(position, 0.5) for position in range(len(rows))][:limit] for _ in queries]

    samples = evaluation(("billing", "refund"), ())
    allowed = np.ones(len(rows), dtype=bool)
    losses = {each.id: 0.2 for each in rows} | {"train:0": 3.0}
    found = suspect_labels(RowSupply(rows), allowed, Nearest(), samples, losses)
    assert len(found) == set_aside


def test_guard_says_when_it_could_not_be_applied():
    assert "label guard not applied: the rows' losses were not measured" in guarded(None).notes
    assert not any("guard" in note for note in select(guard_rows(), samples=evaluation(), count=4).notes)
    chosen = guarded({"train:24": 3.0})
    assert any("of the 1 rows measured" in note for note in chosen.notes)


def test_guard_leaves_a_class_alone_whose_rows_mostly_have_high_losses():
    # A few samples may make a class look known: 6 of 13 high losses are fewer than half, 7 are not.
    losses = {f"train:{n}": 0.2 for n in range(24)} | {"train:24": 3.0}
    six = losses | {f"train:{n}": 2.0 for n in range(12, 17)}
    assert [aside.row.id for aside in guarded(six).set_aside] == ["train:24"]
    assert guarded(six | {"train:17": 2.0}).set_aside == ()


def test_guard_leaves_a_class_alone_that_gets_nearly_every_reply():
    """Calling everything a refund finds every refund, and knows nothing of refunds."""
    losses = {f"train:{n}": 0.2 for n in range(24)} | {"train:24": 3.0}
    honest = evaluation(("billing", "refund"), ())
    lumped = [replace(sample, output="refund", score=float(sample.target == "refund")) for sample in honest]
    third = [replace(sample, id=f"more-{sample.id}", target="billing", score=0.0) for sample in lumped]
    chosen = select(guard_rows(), samples=[*lumped, *third], count=30, losses=losses, label_guard=True)
    assert chosen.set_aside == ()


# Rows that turn out not to be trainable


@pytest.mark.parametrize("strategy", ["balanced_failures", "failures", "balanced", "random", "none"])
@pytest.mark.parametrize("round", [1, 2])
def test_a_row_that_cannot_be_trained_on_gives_its_place_to_the_next(strategy, round):
    rows = labelled({"billing": 20, "refund": 20})
    bad = {f"train:{number}" for number in range(0, 40, 2)}
    asked: set[str] = set()

    def can_train(row: Row) -> bool:
        asked.add(row.id)
        return row.id not in bad

    selector = DataSelector(
        rows, [], [], selection_config=Settings(strategy=strategy, label_guard=False), seed=1, can_train=can_train
    )
    chosen = selector.select(round=round, count=12, seen={}, samples=evaluation(("billing", "refund")))
    assert len(set(ids(chosen))) == 12
    assert bad.isdisjoint(ids(chosen))
    assert len(asked) < 40  # asked only when a row's turn has come
