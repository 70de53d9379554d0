"""Chat format taken from the tokenizer's own chat template: what is used where tinker-cookbook is not installed.

The loss mask is the cookbook's: a trained turn is everything the template writes after the generation prompt, up to and
including the token that ends the turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from chat_tokens import TokenSequence, strip_thinking, text_sequence, train_on_what_name
from error_handling import ConfigurationError, DataError

FALLBACK_NOTE = (
    "tinker-cookbook is not installed: prompts and training examples come from the tokenizer's own chat template, with "
    "the same loss mask. Install it with: python -m pip install tinker-cookbook==0.5.8"
)
_PROBE = "probe"
# First of the private-use characters that stand for markers while a template is filled in.
_PRIVATE_USE = 0xF0000


class TemplateFormat:
    """A `chat_tokens.ChatFormat` over `tokenizer.apply_chat_template`."""

    def __init__(self, tokenizer: Any, *, enable_thinking: bool, fallback_note: str | None = FALLBACK_NOTE) -> None:
        """Raises `ConfigurationError` for a tokenizer without a template, or whose template ends no turn."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                "This model's tokenizer has no chat template, so a renderer is needed. Install tinker-cookbook "
                "(python -m pip install tinker-cookbook==0.5.8) and name one with renderer_name."
            )
        self.name = "chat_template"
        self.tokenizer = tokenizer
        self.fallback_note = fallback_note
        self._enable_thinking = enable_thinking
        added = tokenizer.added_tokens_decoder
        self._special = {str(token.content): int(i) for i, token in added.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        question = {"role": "user", "content": _PROBE}
        ending = self._after_prompt([question, {"role": "assistant", "content": _PROBE}])
        stop = next((i for i in self._encode(ending.rpartition(_PROBE)[2]) if i in self._special.values()), None)
        if stop is None:
            raise ConfigurationError(
                "This model's chat template ends an assistant turn with no special token, so sampling could not stop "
                "there. Install tinker-cookbook and name a renderer with renderer_name."
            )
        self._stop = stop
        self.stop: list[int] | list[str] = [stop]
        # A template that opens a think block leaves a reply that is all reasoning until it closes the block.
        self._opens_thinking = self._text([question], generate=True).rstrip().endswith("<think>")

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The template's output with the generation prompt, as token ids."""
        return self._tokens(messages, lambda safe: self._text(safe, generate=True))

    def reply_text(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """(answer without reasoning and stop token, whether the stop token was there)."""
        ids = list(tokens)
        clean = self._stop in ids
        text = str(self.tokenizer.decode(ids[: ids.index(self._stop)] if clean else ids))
        if self._opens_thinking and "</think>" not in text:
            return "", clean
        return strip_thinking(text), clean

    def training_examples(self, messages: Sequence[Mapping[str, Any]], train_on_what: str) -> list[TokenSequence]:
        """One sequence per trained turn; turns whose sequences continue one another share one."""
        trained = self._trained_turns(messages, train_on_what_name(train_on_what))
        examples: list[TokenSequence] = []
        for index in trained:
            prompt = self.prompt_tokens(messages[:index])
            turn = self._tokens(messages[: index + 1], self._after_prompt)
            if self._stop not in turn:
                raise DataError("The chat template does not end this conversation's last assistant turn with its stop.")
            turn = turn[: turn.index(self._stop) + 1]
            tokens = (*prompt, *turn)
            weights = (0.0,) * len(prompt) + (1.0,) * len(turn)
            if examples and tokens[: len(examples[-1].tokens)] == examples[-1].tokens:
                earlier = examples.pop().weights
                weights = earlier + weights[len(earlier) :]
            examples.append(TokenSequence(tokens, weights))
        return examples

    def text_example(self, text: str) -> TokenSequence:
        """Every token trained; see `chat_tokens.text_sequence`."""
        return text_sequence(self.tokenizer, text)

    def _trained_turns(self, messages: Sequence[Mapping[str, Any]], train_on_what: str) -> list[int]:
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        first = {
            "last_assistant_message": len(messages) - 1,
            "last_assistant_turn": last_user + 1,
            "all_assistant_messages": 0,
        }
        if train_on_what not in first:
            raise ConfigurationError(
                f"train_on_what: {train_on_what} needs tinker-cookbook (python -m pip install tinker-cookbook==0.5.8). "
                f"Without it these work: {', '.join(first)}."
            )
        start = max(0, first[train_on_what])
        return [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]

    def _text(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=generate,
                    enable_thinking=self._enable_thinking,
                )
            )
        except (jinja2.TemplateError, TypeError) as err:
            raise DataError(f"The model's chat template refuses this conversation: {err}") from err

    def _after_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes for the last turn after the prompt that asks for it."""
        prompt, whole = self._text(messages[:-1], generate=True), self._text(messages, generate=False)
        if not whole.startswith(prompt):
            raise DataError(
                "The model's chat template does not write the last assistant turn after its own generation prompt "
                f"(which ends with {prompt[-60:]!r}), so the model would be trained on another text than it is asked. "
                "If the turn contains reasoning, set evaluation.enable_thinking to true or remove the reasoning."
            )
        return whole[len(prompt) :]

    def _tokens(self, messages: Sequence[Mapping[str, Any]], write: Any) -> list[int]:
        """Token ids of `write(messages)`, in which markers spelled out in the messages stay plain text."""
        contents = [str(message["content"]) for message in messages]
        spelled = [token for token in self._special if any(token in content for content in contents)]
        free = (chr(code) for code in range(_PRIVATE_USE, _PRIVATE_USE + 0xFFFE))
        unused = (char for char in free if not any(char in content for content in contents))
        stand_ins = dict(zip(sorted(spelled, key=len, reverse=True), unused, strict=False))
        safe = []
        for message, content in zip(messages, contents, strict=True):
            for token, char in stand_ins.items():
                content = content.replace(token, char)  # noqa: PLW2901
            safe.append({**message, "content": content})
        return self._encode(write(safe), stand_ins)

    def _encode(self, text: str, stand_ins: Mapping[str, str] | None = None) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            ids += self._encode_plain(text[position : match.start()], stand_ins)
            ids.append(self._special[match.group()])
            position = match.end()
        return ids + self._encode_plain(text[position:], stand_ins)

    def _encode_plain(self, text: str, stand_ins: Mapping[str, str] | None) -> list[int]:
        for token, char in (stand_ins or {}).items():
            text = text.replace(char, token)
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) if text else []
