"""The learning rate: a recommendation by formula, the schedule within a run, the decay between rounds.

Pure functions of numbers; nothing asks a hub for a model's size::

    peak = get_recommended_lr("Qwen/Qwen3-8B")  # 4.73e-4
    lr = get_lr_with_warmup(step, peak, warmup_steps=100, max_steps=1000, min_lr=1e-6)
"""

from __future__ import annotations

import difflib
import math

from error_handling import ConfigurationError

_FULL_FINE_TUNING_LR = 5e-5
_LORA_FACTOR = 10.0

# The exponent of the hidden size was calibrated for these families only.
_FAMILY_EXPONENT = {"llama": 0.781, "qwen": 0.0775}

# `hidden_size` of each model's published config (`text_config.hidden_size` for the multimodal ones).
_HIDDEN_SIZE = {
    "Qwen/Qwen3-0.6B": 1024,
    "Qwen/Qwen3-1.7B": 2048,
    "Qwen/Qwen3-4B": 2560,
    "Qwen/Qwen3-4B-Instruct-2507": 2560,
    "Qwen/Qwen3-8B": 4096,
    "Qwen/Qwen3-8B-Base": 4096,
    "Qwen/Qwen3-14B": 5120,
    "Qwen/Qwen3-32B": 5120,
    "Qwen/Qwen3-30B-A3B": 2048,
    "Qwen/Qwen3-30B-A3B-Base": 2048,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 2048,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 4096,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 2048,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 4096,
    "Qwen/Qwen3.5-4B": 2560,
    "Qwen/Qwen3.5-9B": 4096,
    "Qwen/Qwen3.5-9B-Base": 4096,
    "Qwen/Qwen3.5-27B": 5120,
    "Qwen/Qwen3.5-35B-A3B": 2048,
    "Qwen/Qwen3.5-35B-A3B-Base": 2048,
    "Qwen/Qwen3.5-397B-A17B": 4096,
    "Qwen/Qwen3.6-27B": 5120,
    "Qwen/Qwen3.6-35B-A3B": 2048,
    "Qwen/Qwen3.8-27B": 5120,
    "meta-llama/Llama-3.2-1B": 2048,
    "meta-llama/Llama-3.2-1B-Instruct": 2048,
    "meta-llama/Llama-3.2-3B": 3072,
    "meta-llama/Llama-3.2-3B-Instruct": 3072,
    "meta-llama/Llama-3.1-8B": 4096,
    "meta-llama/Llama-3.1-8B-Instruct": 4096,
    "meta-llama/Llama-3.1-70B": 8192,
    "meta-llama/Llama-3.3-70B-Instruct": 8192,
}


def get_recommended_lr(model_name: str, hidden_size: int | None = None) -> float:
    """The recommended peak learning rate for LoRA: 5e-5 * 10 * (2000 / H)^P.

    H is the model's hidden size, P 0.0775 for Qwen and 0.781 for Llama: the formula of tinker-cookbook's
    `hyperparam_utils.get_lr`, after "LoRA Without Regret" (https://thinkingmachines.ai/blog/lora/). A variant suffix
    of the name (`:peft:262144`) does not count. `hidden_size` serves models that the table here does not hold.

    Raises `ConfigurationError` when the family was never calibrated or the hidden size is not known, rather than guess.
    """
    name = model_name.partition(":")[0]
    exponent = next((value for family, value in _FAMILY_EXPONENT.items() if family in name.lower()), None)
    if exponent is None:
        raise ConfigurationError(
            f"no learning rate to recommend: the formula is calibrated for Qwen and Llama models only, not for "
            f"{model_name}; set use_recommended_lr to false and write learning_rate"
        )
    size = _HIDDEN_SIZE.get(name) if hidden_size is None else hidden_size
    if size is None:
        near = difflib.get_close_matches(name, list(_HIDDEN_SIZE), n=3, cutoff=0.6)
        hint = f" (known: {', '.join(near)}, ...)" if near else ""
        raise ConfigurationError(
            f"no learning rate to recommend: the hidden size of {model_name} is not known{hint}; set "
            "use_recommended_lr to false and write learning_rate"
        )
    if size < 1:
        raise ConfigurationError(f"a hidden size of {size} cannot be; it is 1 or more")
    return _FULL_FINE_TUNING_LR * _LORA_FACTOR * (2000 / size) ** exponent


def get_lr_with_warmup(step: int, base_lr: float, warmup_steps: int, max_steps: int, min_lr: float) -> float:
    """The learning rate of optimizer step `step` (0-based): linear warm-up, then a cosine from `base_lr` to `min_lr`.

    Below `warmup_steps` it is base_lr * (step + 1) / warmup_steps, afterwards
    min_lr + (base_lr - min_lr) * (1 + cos(pi * progress)) / 2 with progress the share of the way from `warmup_steps`
    to `max_steps`. Past `max_steps` it stays at `min_lr`.

    Raises `ConfigurationError` when `base_lr` is not finite and above 0, `min_lr` is not in 0..base_lr, a count is
    negative or `max_steps` is not positive.
    """
    _check_rates(base_lr, min_lr)
    if step < 0 or warmup_steps < 0 or max_steps < 1:
        raise ConfigurationError(
            "the schedule needs step >= 0, warmup_steps >= 0 and max_steps >= 1, "
            f"got {step}, {warmup_steps}, {max_steps}"
        )
    if step < warmup_steps:
        return base_lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    # A rounding error must not leave the range that the caller was promised.
    return min(base_lr, max(min_lr, min_lr + (base_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2))


def decayed_lr(base_lr: float, lr_decay: float, missed_rounds: int, min_lr: float) -> float:
    """The peak learning rate after `missed_rounds` rounds below the target: base_lr * lr_decay^missed, at least min_lr.

    Raises `ConfigurationError` as `get_lr_with_warmup` does, and when `lr_decay` is not above 0 and at most 1.
    """
    _check_rates(base_lr, min_lr)
    if not 0 < lr_decay <= 1:
        raise ConfigurationError(f"lr_decay must be above 0 and at most 1, got {lr_decay}")
    if missed_rounds < 0:
        raise ConfigurationError(f"the number of missed rounds cannot be negative, got {missed_rounds}")
    return max(min_lr, base_lr * lr_decay**missed_rounds)


def _check_rates(base_lr: float, min_lr: float) -> None:
    if not (math.isfinite(base_lr) and base_lr > 0):
        raise ConfigurationError(f"the learning rate must be a finite number above 0, got {base_lr}")
    if not 0 <= min_lr <= base_lr:
        raise ConfigurationError(f"min_lr must be from 0 to the learning rate {base_lr:g}, got {min_lr}")
