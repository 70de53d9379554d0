"""SmolLM2-Instruct's chat format as a tinker-cookbook renderer.

    register()
    renderer = tinker_cookbook.renderers.get_renderer("HuggingFaceTB/smollm2", tokenizer)

It writes what the model's own chat template writes, token for token: ChatML without a think block, and a default
system turn where a conversation has none. Needs tinker-cookbook; `rendering` imports it only when that is installed.
"""

from __future__ import annotations

from typing import Any

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import base

from renderer_choice import SMOLLM2_RENDERER

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class SmolLM2Renderer(base.Renderer):
    """ChatML with SmolLM2's default system turn."""

    @property
    def has_extension_property(self) -> bool:
        """No turn is written differently once it is history."""
        return True

    def get_stop_sequences(self) -> list[int]:
        """The id of `<|im_end|>`."""
        return [self._marker("<|im_end|>")]

    def build_generation_prompt(
        self, messages: list[base.Message], role: base.Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """The prompt for the next turn, as the chat template writes it with `add_generation_prompt`."""
        return super().build_generation_prompt(_with_system(messages), role, prefill)

    def build_supervised_example(
        self,
        messages: list[base.Message],
        train_on_what: base.TrainOnWhat = base.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> tuple[tinker.ModelInput, Any]:
        """Tokens and weights; ends with the last turn's `<|im_end|>`, without the newline the template puts after."""
        return super().build_supervised_example(_with_system(messages), train_on_what)

    def render_message(self, message: base.Message, ctx: base.RenderContext) -> base.RenderedMessage:
        """One turn: `<|im_start|>role`, newline, content, `<|im_end|>`; a newline before all turns but the first."""
        if message.get("tool_calls"):
            raise RendererError("SmolLM2's chat template has no form for tool calls. Remove them from the messages.")
        opening = [*(self._encode("\n") if ctx.idx > 0 else ()), self._marker("<|im_start|>")]
        name = self._encode(f"{message['role']}\n")
        content = base.ensure_text(message["content"])
        if message["role"] == "assistant":
            # The generation prompt ends after the newline, so what the model writes is tokenised by itself.
            output = self._encode(content)
        else:
            # The template tokenises role and content as one text, where the newline can merge with what follows it.
            whole = self._encode(f"{message['role']}\n{content}")
            shared = next((i for i, (a, b) in enumerate(zip(name, whole, strict=False)) if a != b), len(name))
            name, output = whole[:shared], whole[shared:]
        return base.RenderedMessage(
            header=tinker.EncodedTextChunk(tokens=opening + name),
            output=[tinker.EncodedTextChunk(tokens=[*output, self._marker("<|im_end|>")])],
        )

    def parse_response(self, response: list[int]) -> tuple[base.Message, base.ParseTermination]:
        """The reply as a message, and whether it ended with `<|im_end|>`."""
        return base.parse_response_for_stop_token(response, self.tokenizer, self._marker("<|im_end|>"))

    def _encode(self, text: str) -> list[int]:
        # A marker written out by a user must not become the marker.
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _marker(self, token: str) -> int:
        ids = self.tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise RendererError(f"{token} is {len(ids)} tokens in this tokenizer, but SmolLM2's format needs one.")
        return int(ids[0])


def register() -> None:
    """Make the renderer known to tinker-cookbook under its name; doing it again changes nothing."""
    if not renderers.is_renderer_registered(SMOLLM2_RENDERER):
        renderers.register_renderer(SMOLLM2_RENDERER, _create)


def _create(tokenizer: Any, image_processor: Any = None) -> SmolLM2Renderer:
    return SmolLM2Renderer(tokenizer)


def _with_system(messages: list[base.Message]) -> list[base.Message]:
    if not messages or messages[0]["role"] == "system":
        return messages
    return [base.Message(role="system", content=DEFAULT_SYSTEM), *messages]
