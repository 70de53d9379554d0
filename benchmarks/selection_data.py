"""Data for the selection benchmark, made from parts by seed: requests at home, and requests at a library's desk.

    rows = draw_requests(random.Random(7), HOME, per_label={"light": 30, "alarm": 30}, fillers="train", name="r")

Each request is a core of its label with a thing in it; some have an opener and a tail, which all labels share.
Things are split into two halves: rows for training use one, rows for evaluation and test the other, so that a
request is never in both and a label is not told by its things.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal

_OPENERS = (
    "Please",
    "Hey,",
    "Could you",
    "I would like you to",
    "When you have a moment,",
    "Quick one:",
    "My hands are full, so",
    "For once,",
    "Be so kind and",
    "As always,",
    "It is late already,",
    "Before I forget it,",
)
_TAILS = (
    "before the guests arrive.",
    "as soon as we are back from the lake.",
    "but only if nobody is asleep.",
    "and tell me when that is done.",
    "like you did last Sunday.",
    "while I am on the phone with my brother.",
    "because the children asked for it.",
    "for the rest of the evening.",
    "once the kettle has boiled.",
    "without waking the dog.",
    "and do not ask twice.",
    "until my sister leaves for the station.",
)
# The thing stands in the middle, so that requests with the same core and another thing are no near copies.
HOME: Mapping[str, tuple[str, ...]] = {
    "light": (
        "dim the {room} lamp a little",
        "make the {room} brighter for reading",
        "turn every {room} bulb off now",
    ),
    "heating": (
        "warm the {room} up by two degrees",
        "stop the {room} radiator from hissing",
        "keep the {room} cool but not freezing",
    ),
    "music": (
        "play some {room} tunes that are slow",
        "skip this {thing} song right away",
        "turn the {room} volume down please",
    ),
    "alarm": (
        "wake the {room} sleepers at six",
        "set a {thing} timer of ten minutes",
        "ring the {thing} bell in an hour",
    ),
    "shopping": (
        "add a {thing} to the list",
        "order two {thing} covers from the shop",
        "take the {thing} off what we buy",
    ),
    "weather": (
        "say whether {room} windows will see rain",
        "tell how windy {thing} days may get",
        "check if the {thing} stands in snow",
    ),
    "door": (
        "lock the {room} entrance behind me",
        "let the {thing} courier in at the gate",
        "show me the {thing} man at the gate",
    ),
    "cleaning": (
        "send the {room} robot to vacuum",
        "mop below the {thing} with soap",
        "empty the {room} dust box again",
    ),
}
DESK: Mapping[str, tuple[str, ...]] = {
    "borrow": (
        "may I have the {thing} book for a week",
        "is the {room} atlas free to take along",
        "I need a {thing} manual until Friday",
    ),
    "return": (
        "here comes the {thing} novel back",
        "where do I drop the {room} guide off",
        "I am done with the {thing} comic",
    ),
    "renew": (
        "can I keep the {thing} diary longer",
        "please extend the {room} loan again",
        "give me more days for the {thing} volume",
    ),
    "fine": (
        "what do I owe for the {thing} tape",
        "why was the {room} reader charged twice",
        "I paid for that {thing} stain already",
    ),
}
_ROOMS = {
    "train": ("kitchen", "cellar", "hallway", "study", "nursery", "workshop", "pantry", "hall"),
    "held": ("bathroom", "attic", "garage", "bedroom", "lounge", "laundry", "veranda", "library"),
}
_THINGS = {
    "train": ("piano", "bicycle", "cake", "ladder", "aquarium", "tent", "armchair", "drum", "vase", "suitcase"),
    "held": ("guitar", "sofa", "roast", "parasol", "mirror", "kite", "cupboard", "clock", "statue", "basket"),
}


def draw_requests(
    chance: random.Random,
    cores: Mapping[str, tuple[str, ...]],
    *,
    per_label: Mapping[str, int],
    fillers: Literal["train", "held"],
    name: str,
) -> list[dict[str, Any]]:
    """`per_label[label]` different requests of each label, shuffled; ids are `name-0001` and so on."""
    rows = []
    texts: set[str] = set()
    for label, wanted in per_label.items():
        made = 0
        while made < wanted:
            core = chance.choice(cores[label]).format(
                room=chance.choice(_ROOMS[fillers]), thing=chance.choice(_THINGS[fillers])
            )
            # One in four has an opener, one in four a tail.
            opener = [chance.choice(_OPENERS)] if chance.random() < 0.25 else []
            tail = [chance.choice(_TAILS)] if chance.random() < 0.25 else []
            text = " ".join([*opener, core, *tail])
            if text in texts:
                continue
            texts.add(text)
            made += 1
            rows.append((text, label))
    chance.shuffle(rows)
    return [
        {
            "id": f"{name}-{number:04d}",
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": label},
            ],
            "category": label,
        }
        for number, (text, label) in enumerate(rows, start=1)
    ]
