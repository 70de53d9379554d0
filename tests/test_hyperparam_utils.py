import math

import pytest

from error_handling import ConfigurationError
from hyperparam_utils import decayed_lr, get_lr_with_warmup, get_recommended_lr


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-8B", 4.7298e-4),  # 5e-4 * (2000/4096)^.0775 = 5e-4 * exp(-.7168 * .0775)
        ("meta-llama/Llama-3.2-1B", 4.9083e-4),  # 5e-4 * (2000/2048)^.781
        ("Qwen/Qwen3-30B-A3B", 4.9908e-4),  # hidden size 2048, not that of a dense 30B model
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", 4.7298e-4),
    ],
)
def test_recommended_rate_follows_the_formula_with_the_true_hidden_size(model, expected):
    assert get_recommended_lr(model) == pytest.approx(expected, rel=2e-5)


def test_recommended_rate_agrees_with_the_cookbook_for_every_model_both_know():
    from tinker_cookbook import hyperparam_utils as cookbook
    from tinker_cookbook import model_info

    names = [f"Qwen/{name}" for name in model_info.get_qwen_info()]
    names += [f"meta-llama/{name}" for name in model_info.get_llama_info()]
    assert len(names) > 20
    for name in names:
        assert get_recommended_lr(name) == pytest.approx(cookbook.get_lr(name), rel=1e-12), name


def test_a_variant_suffix_does_not_count():
    assert get_recommended_lr("Qwen/Qwen3-8B:peft:262144") == get_recommended_lr("Qwen/Qwen3-8B")


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "HuggingFaceTB/SmolLM2-135M-Instruct", "nonsense"])
def test_an_uncalibrated_family_is_said_so(model):
    with pytest.raises(ConfigurationError, match=f"not for {model}.*write learning_rate"):
        get_recommended_lr(model)


def test_an_unknown_size_is_said_so_with_near_names_and_can_be_given():
    with pytest.raises(ConfigurationError, match=r"hidden size of Qwen/Qwen3-9B is not known.*Qwen/Qwen3-8B"):
        get_recommended_lr("Qwen/Qwen3-9B")
    assert get_recommended_lr("Qwen/Qwen3-9B", hidden_size=2000) == pytest.approx(5e-4)
    with pytest.raises(ConfigurationError, match="hidden size of 0"):
        get_recommended_lr("Qwen/Qwen3-9B", hidden_size=0)


def test_warmup_is_linear_and_reaches_the_base_rate_on_its_last_step():
    rates = [get_lr_with_warmup(step, 1e-3, 4, 100, 0.0) for step in range(4)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])


def test_cosine_is_halfway_in_the_middle_and_at_its_ends():
    def rate(step):
        return get_lr_with_warmup(step, 1e-3, 10, 110, 1e-4)

    assert rate(10) == pytest.approx(1e-3)
    assert rate(60) == pytest.approx((1e-3 + 1e-4) / 2)
    assert rate(35) == pytest.approx(1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2)  # cos(pi/4)
    assert rate(110) == 1e-4


def test_past_the_end_the_rate_stays_at_its_lowest_and_is_never_negative():
    assert [get_lr_with_warmup(step, 1e-3, 0, 10, 0.0) for step in (10, 11, 19, 10**9)] == [0.0] * 4
    assert all(1e-6 <= get_lr_with_warmup(step, 1e-3, 3, 50, 1e-6) <= 1e-3 for step in range(200))


def test_a_warmup_past_the_horizon_is_followed_by_the_lowest_rate():
    assert get_lr_with_warmup(7, 1e-3, 8, 4, 1e-5) == pytest.approx(1e-3)
    assert get_lr_with_warmup(8, 1e-3, 8, 4, 1e-5) == 1e-5


@pytest.mark.parametrize(
    ("step", "base", "warmup", "horizon", "low"),
    [
        (0, 0.0, 0, 10, 0.0),
        (0, -1e-3, 0, 10, 0.0),
        (0, math.nan, 0, 10, 0.0),
        (0, math.inf, 0, 10, 0.0),
        (0, 1e-3, 0, 10, 1e-2),
        (0, 1e-3, 0, 10, math.nan),
        (-1, 1e-3, 0, 10, 0.0),
        (0, 1e-3, -1, 10, 0.0),
        (0, 1e-3, 0, 0, 0.0),
    ],
)
def test_impossible_schedules_are_refused(step, base, warmup, horizon, low):
    with pytest.raises(ConfigurationError):
        get_lr_with_warmup(step, base, warmup, horizon, low)


def test_decay_is_a_factor_per_missed_round_with_a_floor():
    assert decayed_lr(1e-3, 0.8, 0, 1e-6) == 1e-3
    assert decayed_lr(1e-3, 0.8, 2, 1e-6) == pytest.approx(6.4e-4)
    assert decayed_lr(1e-3, 0.5, 30, 1e-6) == 1e-6
    for decay, missed in ((0.0, 1), (1.5, 1), (0.8, -1)):
        with pytest.raises(ConfigurationError):
            decayed_lr(1e-3, decay, missed, 0.0)
