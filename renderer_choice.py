"""Which of tinker-cookbook's renderers fits a model: names and families only, no tokens.

default_renderer("Qwen/Qwen3-8B", recommended, enable_thinking=False)   # "qwen3_disable_thinking"
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from base_models import SMOLLM2_NAME
from error_handling import ConfigurationError

SMOLLM2_RENDERER = "HuggingFaceTB/smollm2"


@dataclass(frozen=True)
class RendererFamily:
    """Renderers that write the same chat format.

    `plain` is the form that reasons not at all or, where that cannot be had, least; `thinking` the form that reasons,
    None where the format has no such form.
    """

    names: tuple[str, ...]
    plain: str
    thinking: str | None = None


FAMILIES = (
    RendererFamily(("qwen3", "qwen3_disable_thinking", "qwen3_instruct"), "qwen3_disable_thinking", "qwen3"),
    RendererFamily(
        ("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"), "qwen3_5_disable_thinking", "qwen3_5"
    ),
    RendererFamily(
        (
            "qwen3_8_xhigh_reasoning",
            "qwen3_8_medium_reasoning",
            "qwen3_8_low_reasoning",
            "qwen3_8_disable_thinking",
        ),
        "qwen3_8_disable_thinking",
        "qwen3_8_xhigh_reasoning",
    ),
    RendererFamily(("llama3",), "llama3"),
    RendererFamily(("role_colon",), "role_colon"),
    RendererFamily(
        ("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking"), "deepseekv3", "deepseekv3_thinking"
    ),
    RendererFamily(
        (
            "deepseekv4_1",
            "deepseekv4_1_low_reasoning",
            "deepseekv4_1_max_reasoning",
            "deepseekv4_1_disable_thinking",
            "deepseekv4_1_preserve_thinking",
        ),
        "deepseekv4_1_disable_thinking",
        "deepseekv4_1",
    ),
    RendererFamily(
        ("gpt_oss_no_sysprompt", "gpt_oss_low_reasoning", "gpt_oss_medium_reasoning", "gpt_oss_high_reasoning"),
        "gpt_oss_no_sysprompt",
        "gpt_oss_medium_reasoning",
    ),
    RendererFamily(("kimi_k2",), "kimi_k2", "kimi_k2"),
    RendererFamily(("kimi_k25", "kimi_k25_disable_thinking"), "kimi_k25_disable_thinking", "kimi_k25"),
    RendererFamily(
        ("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking"), "kimi_k26_disable_thinking", "kimi_k26"
    ),
    RendererFamily(
        ("glm5_3_max_reasoning", "glm5_3_low_reasoning", "glm5_3_high_reasoning"),
        "glm5_3_low_reasoning",
        "glm5_3_max_reasoning",
    ),
    RendererFamily(
        ("nemotron3", "nemotron3_disable_thinking", "nemotron3_low_thinking", "nemotron3_preserve_thinking"),
        "nemotron3_disable_thinking",
        "nemotron3",
    ),
    RendererFamily(
        (
            "nemotron3_ultra",
            "nemotron3_ultra_disable_thinking",
            "nemotron3_ultra_medium_thinking",
            "nemotron3_ultra_preserve_thinking",
        ),
        "nemotron3_ultra_disable_thinking",
        "nemotron3_ultra",
    ),
    RendererFamily(("tml_v0",), "tml_v0", "tml_v0"),
    RendererFamily((SMOLLM2_RENDERER,), SMOLLM2_RENDERER),
    # After the text renderers, whose tokens it shares, so that a search for a fitting one ends with those.
    RendererFamily(("qwen3_vl_instruct", "qwen3_vl"), "qwen3_vl_instruct", "qwen3_vl"),
)


def known_renderers() -> tuple[str, ...]:
    """Names of all renderers of all families."""
    return tuple(name for family in FAMILIES for name in family.names)


def family_of(renderer: str) -> RendererFamily | None:
    """The family of a renderer, or None for a name that is not one of tinker-cookbook's or ours."""
    return next((family for family in FAMILIES if renderer in family.names), None)


def recommended_renderers(base_model: str) -> tuple[str, ...] | None:
    """Renderers recommended for a model that is known by name, best first; None for any other model.

    Needs tinker-cookbook.
    """
    if base_model == SMOLLM2_NAME:
        return (SMOLLM2_RENDERER,)
    from tinker_cookbook import model_info

    try:
        return tuple(model_info.get_recommended_renderer_names(base_model))
    except (KeyError, ValueError):  # its answers to an unknown model, organisation, or a name that is a path
        return None


def default_renderer(base_model: str, recommended: Sequence[str], *, enable_thinking: bool) -> str:
    """The renderer for a model when none is asked for: the form that does not think, unless asked to.

    Raises `ConfigurationError` when thinking is asked of a model that has no such form.
    """
    family = family_of(recommended[0])
    if family is None:
        return recommended[0]
    wanted = family.thinking if enable_thinking else family.plain
    if wanted in recommended:
        return str(wanted)
    if enable_thinking:
        raise ConfigurationError(
            f"evaluation.enable_thinking: {base_model} has no thinking form (its renderer is {recommended[0]}). "
            "Set it to false."
        )
    return recommended[0]


def check_family(base_model: str, recommended: Sequence[str], asked: str) -> None:
    """Raise `ConfigurationError` when the renderer `asked` for writes another chat format than the model's.

    A model that was never trained on a chat format (its recommended renderer is role_colon) may take any. A name that
    no family knows is refused here; renderers that a user registered are to be let through by the caller.
    """
    family = family_of(asked)
    fitting = fitting_renderers(recommended)
    if family is None:
        near = difflib.get_close_matches(asked, known_renderers(), n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigurationError(
            f"renderer_name: {asked!r} is unknown.{hint} For {base_model} these fit: {', '.join(fitting)}."
        )
    if asked not in fitting and "role_colon" not in recommended:
        raise ConfigurationError(
            f"renderer_name: {asked} is of another family than {base_model}, which would be trained on a chat format "
            f"that it does not know. These fit: {', '.join(fitting)}."
        )


def fitting_renderers(recommended: Sequence[str]) -> tuple[str, ...]:
    """The recommended renderers and the others of their families, best first, each once."""
    names = dict.fromkeys(recommended)
    for name in recommended:
        family = family_of(name)
        names.update(dict.fromkeys(family.names if family else ()))
    return tuple(names)
