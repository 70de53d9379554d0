"""The named rule that turns each shape of record into turns, or into plain text.

A record is converted by the first rule whose keys it has (`convert_record`):

| shape | keys | conversion |
|---|---|---|
| messages | messages | turns with `role` and `content`, as they are |
| conversations | conversations | ShareGPT: `from` human/gpt/system and `value` |
| prompt/completion | prompt, completion | one user and one assistant turn (or lists of turns, joined) |
| instruction/input/output | instruction, output, input? | user turn: instruction, blank line, input when it has any |
| question/answer | question, answer | one user and one assistant turn |
| input/target | input, target | evaluation and test files only |
| text | text | training only: continued pretraining, every token trained |

A top-level `system` text becomes the system turn. Text is never changed, trimmed or re-encoded. A record that fits no
rule raises `RowFault` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from evaluation import normalise
from record_files import RowFault, first_ten, kind_of, quote

Purpose = Literal["train", "eval"]
Message = dict[str, str]

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TRAINS_EVERY_ASSISTANT = frozenset({"all_assistant_turns", "all_assistant_messages", "all_messages", "all_tokens"})
TRAINS_OTHER_ROLES = frozenset({"all_messages", "all_tokens", "all_user_and_system_messages"})


# White space, control characters, and what Unicode calls ignorable (zero-width spaces and joiners, byte-order marks).
_IGNORABLE = ((0x00, 0x20), (0x180B, 0x1810), (0x200B, 0x2010), (0x202A, 0x202F), (0x2060, 0x2070), (0xFE00, 0xFE10))
_UNSEEN = "".join(
    [char for char in map(chr, range(0x3001)) if char.isspace()]
    + [chr(code) for first, end in _IGNORABLE for code in range(first, end)]
    + list("\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u3164\ufeff\uffa0")
)


def is_blank(text: str) -> bool:
    """Whether a person sees nothing of `text`."""
    return text[:1] in _UNSEEN and not text.strip(_UNSEEN)


class RowContent(NamedTuple):
    """What a record holds once converted: turns, or `text`; `notes` say what was left out or added on the way."""

    shape: str
    messages: tuple[Message, ...]
    text: str | None
    used_keys: frozenset[str]
    notes: tuple[str, ...]


def convert_record(record: Mapping[str, Any], *, purpose: Purpose, train_on_what: str) -> RowContent:
    """The content of one record by the first rule that fits; `RowFault` says why none does.

    For training, the turns that `train_on_what` trains must hold text. Turns after the last assistant turn cannot
    be learnt from (nothing answers them) and are left out with a note, unless their own tokens are trained.
    """
    plain = _plain_conversation(record) if purpose == "train" else None
    if plain is not None:
        return plain
    fitting = [shape for shape in _SHAPES if shape.keys <= record.keys()]
    usable = [shape for shape in fitting if purpose in shape.purposes]
    if not usable:
        raise RowFault(fitting[0].refusal if fitting else _no_shape(record, purpose))
    shape = usable[0]
    notes: list[str] = []
    if len(usable) > 1:
        notes.append(f"fits {' and '.join(s.name for s in usable)}; read as {shape.name}")
    used = shape.keys | shape.optional
    if shape.name == "text":
        text = _text(record, "text")
        if is_blank(text):
            raise RowFault("'text' is empty, there is nothing to learn")
        return RowContent(shape.name, (), text, used, tuple(notes))
    if record.get("history"):
        raise RowFault("'history' is not supported; write the whole conversation as 'messages'")
    messages = shape.convert(record, notes)
    system = record.get("system")
    if system is not None:
        if not isinstance(system, str):
            raise RowFault(f"'system' is {kind_of(system)}, expected text")
        if system.strip():
            if messages and messages[0]["role"] == "system":
                raise RowFault("has both a 'system' field and a system turn; keep one")
            messages = [{"role": "system", "content": system}, *messages]
            notes.append("the 'system' field became the system turn")
        used = used | {"system"}
    messages = _check_turns(messages, purpose, train_on_what, notes)
    return RowContent(shape.name, tuple(messages), None, used, tuple(notes))


def _plain_conversation(record: Mapping[str, Any]) -> RowContent | None:
    """What the rules below give for the two commonest shapes where nothing needs to be said, many times faster.

    None where a rule has to look closer. Every turn holds text and the last one is the assistant's, so that the row is
    good whatever is trained.
    """
    if "messages" in record:
        turns = record["messages"]
        if type(turns) is not list or not turns or not _NOT_BESIDE_MESSAGES.isdisjoint(record):
            return None
        for turn in turns:
            if type(turn) is not dict or len(turn) != 2:
                return None
            content = turn.get("content")
            if turn.get("role") not in ROLES or type(content) is not str or is_blank(content):
                return None
        if turns[-1]["role"] != "assistant":
            return None
        return RowContent("messages", tuple(turns), None, _MESSAGES_KEYS, ())
    asked, answered = record.get("prompt"), record.get("completion")
    if type(asked) is not str or type(answered) is not str or not _NOT_BESIDE_COMPLETION.isdisjoint(record):
        return None
    if is_blank(asked) or is_blank(answered):
        return None
    pair = ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
    return RowContent("prompt/completion", pair, None, _COMPLETION_KEYS, ())


class PlainPair(NamedTuple):
    """The texts of a row that is one question and one answer, perhaps after a system turn; `shape` is a position in
    `SHAPE_NAMES`, `used` the number of the record's keys that hold them."""

    system: str | None
    asked: str
    answered: str
    shape: int
    used: int


def plain_pair(record: Mapping[str, Any]) -> PlainPair | None:
    """A training record that is one question and one answer, and of which `convert_record` has nothing to say; None
    for every other record."""
    turns = record.get("messages")
    system = None
    if turns is None:
        asked, answered = record.get("prompt"), record.get("completion")
        shape, used, elsewhere = 2, 2, _NOT_BESIDE_COMPLETION
    elif type(turns) is list and 2 <= len(turns) <= 3:
        for turn in turns:
            if type(turn) is not dict or len(turn) != 2:
                return None
        if len(turns) == 3:
            system = turns[0].get("content")
            if turns[0].get("role") != "system" or type(system) is not str or not system:
                return None
        first, second = turns[-2:]
        if first.get("role") != "user" or second.get("role") != "assistant":
            return None
        asked, answered = first.get("content"), second.get("content")
        shape, used, elsewhere = 0, 1, _NOT_BESIDE_MESSAGES
    else:
        return None
    if type(asked) is not str or type(answered) is not str:
        return None
    if is_blank(asked) or is_blank(answered) or (len(record) > used and not elsewhere.isdisjoint(record)):
        return None
    return PlainPair(system, asked, answered, shape, used)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise RowFault(f"{key!r} is {kind_of(value)}, expected text")
    return value


def _turns(value: Any, key: str, notes: list[str], *, sharegpt: bool = False) -> list[Message]:
    if not isinstance(value, list):
        raise RowFault(f"{key!r} is {kind_of(value)}, expected a list of turns")
    if not value:
        raise RowFault(f"{key!r} is an empty list")
    turns = []
    for number, turn in enumerate(value, start=1):
        where = f"turn {number} of {key!r}"
        if not isinstance(turn, dict):
            raise RowFault(f"{where} is {kind_of(turn)}, expected an object")
        from_value = sharegpt and "from" in turn
        role_key, text_key = ("from", "value") if from_value else ("role", "content")
        roles = SHAREGPT_ROLES if from_value else {role: role for role in ROLES}
        if role_key not in turn:
            raise RowFault(f"{where} has no {role_key!r}")
        role = turn[role_key]
        if not isinstance(role, str) or role not in roles:
            raise RowFault(f"{where} has the role {quote(role)}; allowed are {', '.join(roles)}")
        if turn.get("tool_calls") or turn.get("function_call"):
            raise RowFault(f"{where} calls tools, which is not supported")
        if any(key in turn and turn[key] is not None and not turn[key] for key in ("weight", "train")):
            raise RowFault(f"{where} is marked as not to be trained, which is not supported; use train_on_what")
        if text_key not in turn:
            raise RowFault(f"{where} ({role}) has no {text_key!r}")
        content = turn[text_key]
        if not isinstance(content, str):
            raise RowFault(f"{where} ({role}): {text_key!r} is {kind_of(content)}, expected text")
        ignored = sorted(turn.keys() - {role_key, text_key, "weight", "train", "tool_calls", "function_call"})
        if ignored:
            notes.append(f"keys of a turn left unused: {', '.join(map(quote, ignored))}")
        turns.append({"role": roles[role], "content": content})
    return turns


def _pair(record: Mapping[str, Any], asked: str, answered: str) -> list[Message]:
    return [
        {"role": "user", "content": _text(record, asked)},
        {"role": "assistant", "content": _text(record, answered)},
    ]


def _from_messages(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    return _turns(record["messages"], "messages", notes)


def _from_conversations(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    return _turns(record["conversations"], "conversations", notes, sharegpt=True)


def _from_prompt_completion(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    if isinstance(record["prompt"], list) or isinstance(record["completion"], list):
        return [turn for key in ("prompt", "completion") for turn in _side(record, key, notes)]
    return _pair(record, "prompt", "completion")


def _side(record: Mapping[str, Any], key: str, notes: list[str]) -> list[Message]:
    if isinstance(record[key], list):
        return _turns(record[key], key, notes)
    return [{"role": "user" if key in {"prompt", "input"} else "assistant", "content": _text(record, key)}]


def _from_instruction(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    asked = _text(record, "instruction")
    if record.get("input") is not None:
        given = _text(record, "input")
        if given.strip():  # an empty input would leave a stray blank line after the instruction
            asked = f"{asked}\n\n{given}" if asked.strip() else given
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(record, "output")}]


def _from_question(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    return _pair(record, "question", "answer")


def _from_input_target(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    return [*_side(record, "input", notes), {"role": "assistant", "content": _text(record, "target")}]


def _no_messages(record: Mapping[str, Any], notes: list[str]) -> list[Message]:
    return []


@dataclass(frozen=True)
class _Shape:
    name: str
    keys: frozenset[str]
    convert: Callable[[Mapping[str, Any], list[str]], list[Message]]
    optional: frozenset[str] = frozenset()
    purposes: tuple[Purpose, ...] = ("train", "eval")
    refusal: str = ""


_SHAPES = (
    _Shape("messages", frozenset({"messages"}), _from_messages),
    _Shape("conversations", frozenset({"conversations"}), _from_conversations),
    _Shape("prompt/completion", frozenset({"prompt", "completion"}), _from_prompt_completion),
    _Shape("instruction/input/output", frozenset({"instruction", "output"}), _from_instruction, frozenset({"input"})),
    _Shape("question/answer", frozenset({"question", "answer"}), _from_question),
    _Shape(
        "input/target",
        frozenset({"input", "target"}),
        _from_input_target,
        purposes=("eval",),
        refusal="input/target is the shape of evaluation files; for training name the keys 'question' and 'answer'",
    ),
    _Shape(
        "text",
        frozenset({"text"}),
        _no_messages,
        purposes=("train",),
        refusal="a 'text' row has no target, so it cannot be scored; evaluation rows need a question and its answer",
    ),
)


SHAPE_NAMES = tuple(shape.name for shape in _SHAPES)
_MESSAGES_KEYS, _COMPLETION_KEYS = _SHAPES[0].keys, _SHAPES[2].keys
_KEYS_WITH_A_RULE = frozenset({"system", "history"}).union(*(shape.keys for shape in _SHAPES))
_NOT_BESIDE_MESSAGES = _KEYS_WITH_A_RULE - _MESSAGES_KEYS
_NOT_BESIDE_COMPLETION = _KEYS_WITH_A_RULE - _COMPLETION_KEYS


def _no_shape(record: Mapping[str, Any], purpose: Purpose) -> str:
    if not record:
        return "the object is empty"
    known = [shape for shape in _SHAPES if purpose in shape.purposes]
    for shape in known:
        if len(shape.keys) > 1 and shape.keys & record.keys():
            has, lacks = sorted(shape.keys & record.keys()), sorted(shape.keys - record.keys())
            return f"has {', '.join(map(repr, has))} but not {', '.join(map(repr, lacks))} ({shape.name})"
    keys = ", ".join(first_ten(quote(key) for key in record))
    return f"fits no known shape: its keys are {keys}; known are {', '.join(shape.name for shape in known)}"


def _check_turns(messages: list[Message], purpose: Purpose, train_on_what: str, notes: list[str]) -> list[Message]:
    replies = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    if not replies:
        raise RowFault("no assistant turn, there is nothing to " + ("learn" if purpose == "train" else "score"))
    last = replies[-1]
    if last + 1 < len(messages) and (purpose == "eval" or train_on_what not in TRAINS_OTHER_ROLES):
        notes.append("turns after the last assistant turn were left out, nothing answers them")
        messages = messages[: last + 1]
    final_run = last
    while final_run > 0 and messages[final_run - 1]["role"] == "assistant":
        final_run -= 1
    every = purpose == "train" and train_on_what in TRAINS_EVERY_ASSISTANT
    for index, turn in enumerate(messages):
        if not is_blank(turn["content"]):
            continue
        if turn["role"] == "user":
            raise RowFault(f"turn {index + 1} (user) is empty")
        if turn["role"] == "assistant" and (every or index >= final_run):
            raise RowFault(f"turn {index + 1} (assistant) is empty, there is nothing to learn from it")
    if purpose == "eval":
        if not any(turn["role"] == "user" for turn in messages[:last]):
            raise RowFault("no user turn before the target, there is no question to ask")
        if not normalise(messages[last]["content"]):
            raise RowFault(f"the target {quote(messages[last]['content'])} holds punctuation only and cannot be scored")
    return messages
