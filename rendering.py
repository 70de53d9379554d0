"""The one place that turns conversations into tokens and replies into text.

    chat_format = get_chat_format("Qwen/Qwen3-8B", tokenizer)
    ids = chat_format.prompt_tokens([{"role": "user", "content": "Hello"}])
    text, ended = chat_format.reply_text(sampled_ids)
    examples = chat_format.training_examples(messages, "last_assistant_turn")

Training, evaluation, prediction and judging all go through it, so that a model is asked exactly what it was trained on.
tinker-cookbook's renderers do the work; where that package is absent, the tokenizer's own chat template does, with the
same loss mask, and `fallback_note` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import renderer_choice
from chat_tokens import (
    TRAIN_ON_WHAT,
    ChatFormat,
    TokenSequence,
    check_prefix,
    strip_thinking,
    text_sequence,
    train_on_what_name,
)
from error_handling import ConfigurationError, DataError, DependencyError
from template_format import FALLBACK_NOTE, TemplateFormat

__all__ = [
    "FALLBACK_NOTE",
    "TRAIN_ON_WHAT",
    "ChatFormat",
    "TokenSequence",
    "check_prefix",
    "get_chat_format",
    "strip_thinking",
    "text_sequence",
]

_QUESTION = {"role": "user", "content": "What is the colour of the sky?"}
_ANSWER = {"role": "assistant", "content": "It is blue."}
_SYSTEM = {"role": "system", "content": "Answer briefly."}
_PROBES = (
    (_QUESTION,),
    (_SYSTEM, _QUESTION),
    (_QUESTION, _ANSWER, {"role": "user", "content": "And at night?"}),
    (_SYSTEM, _QUESTION, _ANSWER, {"role": "user", "content": "And\n\nat night? "}),
)
# What a renderer raises for a tokenizer or a conversation it was not made for.
_UNFIT = (AssertionError, ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError, ImportError)


def get_chat_format(
    base_model: str,
    tokenizer: Any,
    *,
    renderer_name: str | None = None,
    enable_thinking: bool = False,
    model_folder: Path | None = None,
) -> ChatFormat:
    """The chat format of `base_model`, over the tokenizer given; nothing is looked up elsewhere.

    Without `renderer_name` it is the one recommended for the model, in the form that does not think unless
    `enable_thinking`; for a model that tinker-cookbook does not know (a local folder; `model_folder` only names it in
    messages), the renderer whose prompts equal the tokenizer's chat template. Raises `ConfigurationError` when no
    renderer fits, when the one asked for is of another family, or when the tokenizer lacks a token that it needs.
    """
    if not _cookbook_installed():
        if renderer_name is not None:
            raise ConfigurationError(
                f"renderer_name: {renderer_name} needs tinker-cookbook. Install it with: python -m pip install "
                "tinker-cookbook==0.5.8 (or set renderer_name to null to use the tokenizer's own chat template)."
            )
        return TemplateFormat(tokenizer, enable_thinking=enable_thinking)
    from tinker_cookbook import renderers

    import smollm2_renderer

    smollm2_renderer.register()
    recommended = renderer_choice.recommended_renderers(base_model)
    ours = renderer_name == renderer_choice.SMOLLM2_RENDERER
    if renderer_name is not None and not ours and renderers.is_renderer_registered(renderer_name):
        return _make(renderer_name, tokenizer, base_model)  # registered by the user, who answers for it
    if recommended is None:
        where = str(model_folder or base_model)
        return _by_template(where, tokenizer, renderer_name, enable_thinking=enable_thinking)
    if renderer_name is not None:
        renderer_choice.check_family(base_model, recommended, renderer_name)
        return _make(renderer_name, tokenizer, base_model)
    name = renderer_choice.default_renderer(base_model, recommended, enable_thinking=enable_thinking)
    return _make(name, tokenizer, base_model)


class CookbookFormat:
    """A `ChatFormat` over one of tinker-cookbook's renderers."""

    fallback_note: str | None = None

    def __init__(self, name: str, renderer: Any, tokenizer: Any) -> None:
        """`ConfigurationError` when the renderer and the tokenizer do not go together."""
        self.name = name
        self.tokenizer = tokenizer
        self._renderer = renderer
        with _explained(name):
            self.stop: list[int] | list[str] = renderer.get_stop_sequences()
            prompt = self.prompt_tokens([_QUESTION])
        # A prompt that opens a think block leaves a reply that is all reasoning until it closes the block.
        self._opens_thinking = str(tokenizer.decode(prompt[-8:])).rstrip().endswith("<think>")

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The renderer's generation prompt as token ids."""
        with _data_errors(self.name):
            return list(self._renderer.build_generation_prompt([dict(message) for message in messages]).to_ints())

    def reply_text(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """(answer without reasoning and stop token, whether the reply ended by itself)."""
        ids = list(tokens)
        end = next((i for i, token in enumerate(ids) if token in self.stop), None)
        if end is not None:
            ids = ids[: end + 1]  # some renderers refuse to read a reply with more than one stop token
        message, termination = self._renderer.parse_response(ids)
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content if part["type"] == "text")
        elif self._opens_thinking and "</think>" not in str(self.tokenizer.decode(ids)):
            content = ""
        if not termination.is_clean and "<|channel|>" in content:  # gpt-oss cut short: only its last channel answers
            content = content.partition("<|channel|>final<|message|>")[2]
        return strip_thinking(content), bool(termination.is_clean)

    def training_examples(self, messages: Sequence[Mapping[str, Any]], train_on_what: str) -> list[TokenSequence]:
        """The renderer's supervised examples that train at least one token."""
        from tinker_cookbook.renderers import TrainOnWhat

        mode = TrainOnWhat(train_on_what_name(train_on_what))
        turns = [dict(message) for message in messages]
        try:
            with _data_errors(self.name):
                examples = self._renderer.build_supervised_examples(turns, train_on_what=mode)
        except NotImplementedError as err:
            raise ConfigurationError(
                f"train_on_what: {train_on_what} cannot be had with renderer {self.name}, which writes a turn "
                "differently once it is history. Use last_assistant_turn, last_assistant_message or "
                "all_assistant_messages."
            ) from err
        sequences = [TokenSequence(tuple(model_input.to_ints()), _mask(weights)) for model_input, weights in examples]
        return [sequence for sequence in sequences if any(sequence.weights)]

    def text_example(self, text: str) -> TokenSequence:
        """Every token trained; see `chat_tokens.text_sequence`."""
        return text_sequence(self.tokenizer, text)


def _cookbook_installed() -> bool:
    try:
        import tinker_cookbook.renderers  # noqa: F401
    except ImportError as err:
        if err.name is None or err.name.split(".")[0] == "tinker_cookbook":
            return False
        raise DependencyError(
            f"tinker-cookbook is installed but cannot be imported: {err}. Install what it needs with: "
            "python -m pip install -r requirements.txt"
        ) from err
    return True


def _make(name: str, tokenizer: Any, base_model: str) -> CookbookFormat:
    from tinker_cookbook import renderers

    with _explained(name):
        renderer = renderers.get_renderer(name, tokenizer, None, model_name=base_model)
    return CookbookFormat(name, renderer, tokenizer)


def _by_template(where: str, tokenizer: Any, asked: str | None, *, enable_thinking: bool) -> CookbookFormat:
    """The renderer of a model known only by its tokenizer, found by comparing prompts with its chat template."""
    fitting = _matching_formats(where, tokenizer, enable_thinking=enable_thinking)
    if asked is None:
        if fitting:
            return fitting[0]
        raise ConfigurationError(
            f"base_model: no renderer writes what the chat template of {where} writes, so the prompt to train and "
            "sample with is not known. Name one with renderer_name, out of: "
            f"{', '.join(renderer_choice.known_renderers())}."
        )
    for chat_format in fitting:
        if chat_format.name == asked:
            return chat_format
    # Without a match in its chat template a model has no family, so any known renderer may be asked for.
    recommended = [chat_format.name for chat_format in fitting] or ["role_colon"]
    renderer_choice.check_family(where, recommended, asked)
    return _make(asked, tokenizer, where)


def _matching_formats(where: str, tokenizer: Any, *, enable_thinking: bool) -> list[CookbookFormat]:
    prompts = _template_prompts(tokenizer, enable_thinking=enable_thinking)
    if not prompts:
        return []
    answered = _template_tokens(tokenizer, [_QUESTION, _ANSWER], generate=False, enable_thinking=enable_thinking)
    candidates = [
        name
        for family in renderer_choice.FAMILIES
        for name in dict.fromkeys([family.thinking if enable_thinking else family.plain, *family.names])
        if name is not None
    ]
    fitting = []
    for name in candidates:
        try:
            with _quiet_cookbook():
                chat_format = _make(name, tokenizer, where)
                matches = all(chat_format.prompt_tokens(probe) == ids for probe, ids in prompts)
                if matches:
                    check_prefix(chat_format, [_QUESTION, _ANSWER])
                    # Not the stop: some formats end a turn with the marker of the next one.
                    (example,) = chat_format.training_examples([_QUESTION, _ANSWER], "last_assistant_turn")
                    matches = list(example.tokens[:-1]) == answered[: len(example.tokens) - 1]
        except _UNFIT:
            continue
        if matches:
            fitting.append(chat_format)
    return fitting


def _template_prompts(tokenizer: Any, *, enable_thinking: bool) -> list[tuple[Sequence[Mapping[str, Any]], list[int]]]:
    """The chat template's generation prompts for the probe conversations that it accepts, with their token ids."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    import jinja2

    prompts: list[tuple[Sequence[Mapping[str, Any]], list[int]]] = []
    for probe in _PROBES:
        try:
            ids = _template_tokens(tokenizer, probe, generate=True, enable_thinking=enable_thinking)
        except jinja2.TemplateError:  # some templates refuse a system turn
            continue
        prompts.append((probe, ids))
    return prompts


def _template_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generate: bool, enable_thinking: bool
) -> list[int]:
    text = tokenizer.apply_chat_template(
        [dict(m) for m in messages],
        tokenize=False,
        add_generation_prompt=generate,
        enable_thinking=enable_thinking,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def _mask(weights: Any) -> tuple[float, ...]:
    return tuple(float(bool(weight)) for weight in weights.tolist())


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what a renderer raises over a tokenizer it was not made for into a `ConfigurationError`."""
    try:
        yield
    except ConfigurationError:
        raise
    except _UNFIT as err:
        detail = str(err) or type(err).__name__
        raise ConfigurationError(
            f"Renderer {name} cannot be used with this model's tokenizer: {detail}. Renderers need their markers as "
            "single tokens. Name another one with renderer_name, or another base_model."
        ) from err


@contextmanager
def _data_errors(name: str) -> Iterator[None]:
    """Turn a renderer's refusal of a conversation into a `DataError`; the caller knows which row it was."""
    from tinker_cookbook.exceptions import RendererError

    try:
        yield
    except RendererError as err:
        raise DataError(f"Renderer {name} refuses this conversation: {err}") from err


@contextmanager
def _quiet_cookbook() -> Iterator[None]:
    """Keep the cookbook's warnings about renderers that are only being tried off the terminal."""
    logger = logging.getLogger("tinker_cookbook")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
