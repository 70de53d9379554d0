"""What a chat format gives: token sequences with a loss mask, prompts, and the text of a reply.

`rendering.get_chat_format` makes a `ChatFormat`; this module holds the types and the parts that every format shares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from error_handling import ConfigurationError

# Which turns of a conversation carry loss: names of tinker-cookbook's TrainOnWhat, and one alias of ours.
TRAIN_ON_WHAT = (
    "last_assistant_turn",
    "last_assistant_message",
    "all_assistant_messages",
    "all_messages",
    "all_tokens",
    "all_user_and_system_messages",
)
_ALIASES = {"all_assistant_turns": "all_assistant_messages"}
# Tokens that end a document in the common families, tried in this order before the tokenizer's own end token, which in
# chat models ends a turn.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
_THINK_BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and, for each, whether it is trained (1.0) or only read (0.0). Same length, not shifted."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.weights)} weights")


class ChatFormat(Protocol):
    """How conversations become tokens for one model. Messages are mappings with `role` and `content`, both strings.

    `name` is the renderer's name; `stop` is what sampling parameters take, token ids or strings; `fallback_note` is a
    sentence to show when the format is not the recommended one because a package is absent, else None.
    """

    name: str
    tokenizer: Any
    stop: list[int] | list[str]
    fallback_note: str | None

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids that sampling the next assistant turn starts from."""
        ...

    def reply_text(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """(text to score, whether the reply ended by itself): stop token and `<think>` blocks taken out."""
        ...

    def training_examples(self, messages: Sequence[Mapping[str, Any]], train_on_what: str) -> list[TokenSequence]:
        """The conversation as training sequences, the stop token trained; those without a trained token left out."""
        ...

    def text_example(self, text: str) -> TokenSequence:
        """Plain text with every token trained, and an end-of-text token where the tokenizer has one."""
        ...


def strip_thinking(text: str) -> str:
    """The answer in a reply that may contain reasoning; surrounding white space removed.

    Paired `<think>` blocks go first, then everything up to a `</think>` that is left (its opening stood in the prompt),
    then everything from a `<think>` that was never closed.
    """
    text = _THINK_BLOCK.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()


def text_sequence(tokenizer: Any, text: str) -> TokenSequence:
    """`text` as one sequence of trained tokens; a start token is put before it where the tokenizer puts one.

    Markers written out in the text are read as text. The end-of-text token is added, so that the model learns where a
    document ends; a tokenizer without one adds nothing.
    """
    tokens = list(tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True))
    end = end_of_text_token(tokenizer)
    if end is not None and (not tokens or tokens[-1] != end):
        tokens.append(end)
    return TokenSequence(tuple(tokens), (1.0,) * len(tokens))


def end_of_text_token(tokenizer: Any) -> int | None:
    """The id of the token that ends a document, or None."""
    vocabulary = tokenizer.get_vocab()
    for token in _END_OF_TEXT:
        if token in vocabulary:
            return int(vocabulary[token])
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def train_on_what_name(asked: str) -> str:
    """The cookbook's name for a `train_on_what` setting; `ConfigurationError` for one that is unknown."""
    name = _ALIASES.get(asked, asked)
    if name == "customized":
        raise ConfigurationError(
            "train_on_what: customized needs a flag on every message, which the data formats here do not carry. "
            f"Choose one of {', '.join(TRAIN_ON_WHAT)}."
        )
    if name not in TRAIN_ON_WHAT:
        raise ConfigurationError(f"train_on_what: {asked!r} is unknown. Choose one of {', '.join(TRAIN_ON_WHAT)}.")
    return name


def check_prefix(chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]]) -> None:
    """Check on one conversation that a model is trained on what it will be asked.

    The training sequence must start with the generation prompt's tokens, none of them trained, and must end with a
    trained stop. Raises `ConfigurationError` otherwise, or when the conversation has no assistant turn.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise ConfigurationError("The conversation to check the renderer with has no assistant turn.")
    prompt = chat_format.prompt_tokens(messages[:last])
    examples = chat_format.training_examples(messages[: last + 1], "last_assistant_message")
    where = f"Renderer {chat_format.name}"
    advice = "Name another one with renderer_name."
    if not examples:
        raise ConfigurationError(f"{where} trains no token of an assistant turn. {advice}")
    example = examples[-1]
    if list(example.tokens[: len(prompt)]) != list(prompt):
        differs = next((i for i, (a, b) in enumerate(zip(example.tokens, prompt, strict=False)) if a != b), len(prompt))
        text = chat_format.tokenizer.decode(list(prompt[differs:]))
        raise ConfigurationError(
            f"{where} trains on another text than it samples from: the generation prompt's token {differs} and what "
            f"follows, {text!r}, is not in the training example. {advice}"
        )
    if any(example.weights[: len(prompt)]):
        raise ConfigurationError(f"{where} puts loss on tokens of the prompt. {advice}")
    if not example.weights[-1] or not _ends_with_stop(chat_format, example.tokens):
        raise ConfigurationError(f"{where} does not train its stop {chat_format.stop}: replies would not end. {advice}")


def _ends_with_stop(chat_format: ChatFormat, tokens: Sequence[int]) -> bool:
    if tokens[-1] in chat_format.stop:
        return True
    tail = chat_format.tokenizer.decode(list(tokens[-32:]))
    return any(isinstance(stop, str) and tail.endswith(stop) for stop in chat_format.stop)
