"""The torch device that the local engine computes on.

    choose_device("auto")    # "cuda" where torch sees a GPU, else "cpu"
    choose_device(None)      # what $MOCK_TINKER_DEVICE says, else "cpu"

The variable serves programs in which the engine is embedded, the tests among them:
`MOCK_TINKER_DEVICE=cuda python -m pytest` runs them on a GPU.
"""

from __future__ import annotations

import os

from error_handling import ConfigurationError

DEVICE_VARIABLE = "MOCK_TINKER_DEVICE"


def choose_device(name: str | None) -> str:
    """The device that `name` means; torch has computed there. Raises `ConfigurationError`."""
    name = name or os.environ.get(DEVICE_VARIABLE) or "cpu"
    if name == "cpu":
        return name  # without importing torch: a server for this one starts at once
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # float64 is what sampling computes its probabilities in.
        torch.ones(2, dtype=torch.float64, device=name).sum().item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as err:
        seen = torch.cuda.device_count()
        choices = ["auto", "cpu", *(["cuda"] if seen else []), *(f"cuda:{number}" for number in range(seen))]
        reason = str(err).strip().splitlines()[0].split(". ")[0][:200]
        raise ConfigurationError(
            f"the device {name!r} cannot be used: {reason}. Choose one of {', '.join(choices)} (--device, or "
            f"${DEVICE_VARIABLE})"
        ) from err
    if name.startswith("cuda"):
        # The same seed and requests must give the same bits. Attention's memory-saving kernels add up in any order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    return name
