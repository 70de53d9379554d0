"""What the local engine trains and samples: one copy of a base model, and LoRA adapters over it.

    model = LocalModel(folder, max_context=2048)
    adapter = model.create_adapter(AdapterSpec("Qwen/Qwen3-8B", rank=16, seed=42))
    logprobs, metrics = model.forward_backward(adapter, batch)     # gradients add up until the step
    metrics = model.optim_step(adapter, {"learning_rate": 1e-4})

LoRA by peft over a transformers model in float32: alpha is 32 whatever the rank (the API has no parameter for it),
dropout 0. Layers trained: every linear layer of attention (`train_attn`) and of the rest of the blocks (`train_mlp`);
the output layer (`train_unembed`) only where it is a matrix of its own: tied to the input embedding it stays frozen.
Losses are sums over tokens. The same seed and requests give the same bits, the number of threads being equal.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from adapter_files import Adapter, fingerprint, new_optimizer, read_adapter, write_adapter
from adapter_store import AdapterSpec, Checkpoint
from batch_decoding import SampleSource, cache_bytes_per_token, check_sample, generate, serve
from decode_attention import ATTENTION
from error_handling import CheckpointError
from sample_format import SampleRequest, SampleResult
from torch_device import choose_device
from training_pass import DatumResult, check_datum, pack, run_pass, split_into_passes
from wire_format import RequestError, TrainingBatch

LORA_ALPHA = 32
# Memory that one training pass may take for activations, and the cache of one sampling batch for keys and values.
ACTIVATION_BYTES = 1_500_000_000
CACHE_BYTES = 2_000_000_000
SAMPLERS_KEPT = 6
ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


class LocalModel:
    """A base model and the adapters over it. Not thread-safe: one thread does all the work.

    `max_context` is in tokens. `should_stop` is asked between passes; when it turns true they raise `RuntimeError`.
    """

    def __init__(self, folder: Path | str, *, max_context: int, device: str | None = None) -> None:
        self.folder = Path(folder)
        self.device = torch.device(choose_device(device))
        self.should_stop: Callable[[], bool] = lambda: False
        model = _load(self.folder)
        model.requires_grad_(False)
        model.eval().to(self.device)
        config = model.config
        self.fingerprint = fingerprint(self.folder)
        self.vocabulary = config.vocab_size
        self.max_context = max_context
        self.eos_tokens = _eos_tokens(model)
        self.is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.cache_bytes_per_token = cache_bytes_per_token(config)
        self.cache_budget_bytes = CACHE_BYTES
        self.prefill_tokens = self._tokens_that_fit(config)
        self._attn_modules, self._mlp_modules = _find_linear_layers(model)
        self._counter = 0
        self._adapters: dict[str, tuple[Adapter, bool]] = {}
        self._samplers: OrderedDict[str, Adapter] = OrderedDict()
        self._tokenizer: Any = None
        # PeftModel needs an adapter to exist. This one sits on a single layer, is zero, and is never switched on.
        first = (self._attn_modules + self._mlp_modules)[0]
        self._peft = PeftModel(model, LoraConfig(r=1, target_modules=[first]), adapter_name="none")
        self._causal = model
        self._decoder = model.base_model
        self._active: str | None = None
        self._lora_layers: list[Any] = []
        self._after_change()
        self._check_head()
        self.packs_sequences = self._can_pack()

    def _tokens_that_fit(self, config: Any) -> int:
        # Per token and layer: a dozen states of the model's width and five of the feed-forward's are kept for backward.
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        per_token = 4 * config.num_hidden_layers * (12 * config.hidden_size + 5 * inner)
        return int(min(16384, max(512, ACTIVATION_BYTES // per_token)))

    def _check_head(self) -> None:
        """Make sure that decoder, output layer and soft cap give this architecture's logits: some do more than that."""
        with torch.inference_mode():
            tokens = torch.arange(8, device=self.device)[None] % self.vocabulary
            ours = self.logits(self.hidden_states(tokens))
            theirs = self._causal(input_ids=tokens, use_cache=False).logits
        if not torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4):
            raise RequestError(
                f"{self.folder}: models of type {self._causal.config.model_type!r} compute their logits in a way that "
                "this engine does not know; choose a model of another family (Llama, Qwen, Mistral, SmolLM)"
            )

    def _can_pack(self) -> bool:
        """Whether sequences laid side by side in one row give what each gives alone: not every architecture takes a
        mask and positions from outside."""
        generator = np.random.default_rng(0)
        alone = [generator.integers(0, self.vocabulary, length) for length in (5, 9)]
        with torch.inference_mode():
            try:
                packed = pack(self, alone)
            except (ValueError, TypeError, RuntimeError, NotImplementedError):
                return False
            apart = torch.cat(
                [self.hidden_states(torch.from_numpy(tokens)[None].to(self.device))[0] for tokens in alone]
            )
        return packed.shape == apart.shape and torch.allclose(packed, apart, atol=1e-4, rtol=1e-4)

    def hidden_states(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """Last hidden states (rows, tokens, width) of int64 `tokens` (rows, tokens) under the active adapter."""
        return self._decoder(input_ids=tokens.to(self.device), use_cache="past_key_values" in options, **options)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocabulary) of hidden states (..., width)."""
        logits = self._causal.get_output_embeddings()(hidden)
        cap = getattr(self._causal.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def text(self, tokens: Sequence[int]) -> str:
        """`tokens` as text, special tokens included."""
        if self._tokenizer is None:
            from base_models import load_tokenizer

            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def create_adapter(self, spec: AdapterSpec) -> Adapter:
        """A new adapter whose product is zero, its first matrices drawn from `spec.seed`. Raises `RequestError`."""
        adapter = self._add_adapter(spec)
        generator = torch.Generator().manual_seed(spec.seed % 2**63)
        with torch.no_grad():
            for key, parameter in adapter.parameters.items():
                if ".lora_B." in key:
                    parameter.zero_()
                else:
                    # What kaiming_uniform_(a=sqrt(5)) draws, from a generator of our own.
                    bound = 1 / math.sqrt(parameter.shape[1])
                    values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                    parameter.copy_(values)
        return adapter

    def _add_adapter(self, spec: AdapterSpec, *, trainable: bool = True) -> Adapter:
        largest = self._causal.config.hidden_size
        if not 1 <= spec.rank <= largest:
            raise RequestError(f"the LoRA rank is {spec.rank}; for this model it must be between 1 and {largest}")
        self._counter += 1
        name = f"adapter{self._counter}"
        self._peft.add_adapter(name, self._lora_config(spec))
        parameters = {
            key.replace(f".{name}.", "."): parameter
            for key, parameter in self._peft.named_parameters()
            if f".{name}." in key
        }
        adapter = Adapter(name, spec, parameters, new_optimizer(parameters))
        self._adapters[name] = (adapter, trainable)
        self._after_change()
        return adapter

    def _after_change(self) -> None:
        """Adding and deleting make peft switch adapters on and freeze others: put both right again."""
        self._lora_layers = [module for module in self._peft.modules() if hasattr(module, "lora_A")]
        self._active = "unknown"
        self._activate(None)
        for adapter, trainable in self._adapters.values():
            for parameter in adapter.parameters.values():
                parameter.requires_grad_(trainable)

    def _lora_config(self, spec: AdapterSpec) -> LoraConfig:
        targets = [*(self._attn_modules if spec.train_attn else ()), *(self._mlp_modules if spec.train_mlp else ())]
        everything = [*self._attn_modules, *self._mlp_modules]
        if spec.train_unembed and not self.is_tied:
            targets.append(_module_name(self._causal, self._causal.get_output_embeddings()))
        if not targets:
            raise RequestError(
                "nothing to train: train_attn and train_mlp are off, and this model's output layer is its input "
                "embedding, which stays frozen"
            )
        # The usual short form (q_proj, ...) where it names the same layers.
        short = {target.rsplit(".", 1)[-1] for target in targets}
        named = {layer for layer in everything if layer.rsplit(".", 1)[-1] in short}
        return LoraConfig(
            r=spec.rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules=sorted(short) if named <= set(targets) else targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=spec.base_model,
        )

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter's memory."""
        with warnings.catch_warnings():
            # peft speaks of its own active adapter, which this engine sets layer by layer.
            warnings.filterwarnings("ignore", message=r"Adapter \S+ was active which is now deleted")
            self._peft.delete_adapter(adapter.name)
        del self._adapters[adapter.name]
        self._after_change()

    def _activate(self, adapter: Adapter | None) -> None:
        name = adapter.name if adapter else None
        if name == self._active:
            return
        for layer in self._lora_layers:
            # The setter of peft also moves requires_grad between adapters, which are trained side by side here.
            layer._active_adapter = [name] if name else []
        self._active = name

    def forward_backward(self, adapter: Adapter, batch: TrainingBatch) -> tuple[list[np.ndarray], dict[str, float]]:
        """Loss and target logprobs of `batch`; adds to the adapter's gradients unless `batch.forward_only`.

        Returns per datum its logprobs, shape (T,) or (T, K) as sent, and `loss:sum` beside the metrics of a custom
        loss. Raises `RequestError`, and then the gradients are as they were.
        """
        for index, datum in enumerate(batch.data):
            check_datum(datum, f"datum {index}", max_context=self.max_context, vocabulary=self.vocabulary)
        self._activate(adapter)
        results: dict[int, DatumResult] = {}
        # Only a client's own loss can fail when gradients of other sequences have been added already.
        before = _gradients(adapter) if batch.custom is not None and not batch.forward_only else None
        try:
            for part in split_into_passes(self, batch):
                if self.should_stop():
                    raise RuntimeError("the engine is stopping")
                results.update(zip(part, run_pass(self, [batch.data[index] for index in part], batch), strict=True))
        except RequestError:
            for name, gradient in (before or {}).items():
                adapter.parameters[name].grad = gradient
            raise
        return _combine([results[index] for index in range(len(batch.data))])

    def optim_step(self, adapter: Adapter, params: Mapping[str, Any]) -> dict[str, float]:
        """One AdamW step with the gradients added up since the last one (none counts as zero), which are then cleared.

        `params` are Tinker's AdamParams. Returns the gradient's norm before clipping. Raises `RequestError`.
        """
        values = _check_adam(params)
        parameters = list(adapter.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        clip = values["grad_clip_norm"] if values["grad_clip_norm"] > 0 else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
        if not math.isfinite(norm):
            adapter.optimizer.zero_grad()
            raise RequestError(
                f"the gradient is not finite (norm {norm}): the step was not taken and the gradient was dropped. "
                "Lower the learning rate, or look for wrong weights in the data"
            )
        group = adapter.optimizer.param_groups[0]
        group["lr"] = values["learning_rate"]
        group["betas"] = (values["beta1"], values["beta2"])
        group["eps"] = values["eps"]
        group["weight_decay"] = values["weight_decay"]
        adapter.optimizer.step()
        adapter.optimizer.zero_grad()
        adapter.step += 1
        adapter.optimizer_steps += 1
        return {"unclipped_grad_l2_norm:mean": norm}

    def save_adapter(self, adapter: Adapter, folder: Path, *, optimizer: bool) -> None:
        """Write PEFT's two files into `folder`, and with `optimizer` Adam's moments beside them (no pickle)."""
        write_adapter(adapter, self._lora_config(adapter.spec), folder, optimizer=optimizer)

    def load_adapter(self, adapter: Adapter, checkpoint: Checkpoint, *, optimizer: bool) -> None:
        """Put a checkpoint's weights, and with `optimizer` its Adam state, into `adapter`; gradients are dropped.

        Raises `CheckpointError` when the checkpoint does not fit; the adapter is then as it was.
        """
        self._check_origin(checkpoint)
        read_adapter(adapter, checkpoint, optimizer=optimizer)

    def _check_origin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.info.fingerprint != self.fingerprint:
            raise CheckpointError(
                f"{checkpoint.info.path} was trained over other base weights than {self.folder} holds now; adapters "
                "only fit the weights that they were trained over"
            )

    def sample(self, checkpoint: Checkpoint | None, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample `requests` (checked by `check_sample`) as one batch, from a checkpoint or from the base model."""
        self._activate(self._sampler(checkpoint) if checkpoint else None)
        return generate(self, requests, self.should_stop)

    def serve(self, checkpoint: Checkpoint | None, source: SampleSource) -> None:
        """Sample what `source` gives, as one batch that requests join as they come, and give it the results."""
        self._activate(self._sampler(checkpoint) if checkpoint else None)
        serve(self, source, self.should_stop)

    def check_sample(self, request: SampleRequest) -> None:
        """Raise `RequestError` when this model cannot serve `request`."""
        check_sample(self, request)

    def drop_sampler(self, checkpoint: Checkpoint) -> None:
        """Free the memory of weights that were sampled from, if they are in memory."""
        adapter = self._samplers.pop(checkpoint.key, None)
        if adapter is not None:
            self.drop_adapter(adapter)

    def _sampler(self, checkpoint: Checkpoint) -> Adapter:
        key = checkpoint.key
        if key not in self._samplers:
            checkpoint.check()
            adapter = self._add_adapter(checkpoint.info.spec, trainable=False)
            try:
                self.load_adapter(adapter, checkpoint, optimizer=False)
            except BaseException:
                self.drop_adapter(adapter)
                raise
            self._samplers[key] = adapter
            if len(self._samplers) > SAMPLERS_KEPT:
                self.drop_adapter(self._samplers.popitem(last=False)[1])
        self._samplers.move_to_end(key)
        return self._samplers[key]


def _gradients(adapter: Adapter) -> dict[str, torch.Tensor | None]:
    return {
        name: parameter.grad.clone() if parameter.grad is not None else None
        for name, parameter in adapter.parameters.items()
    }


def _combine(results: Sequence[DatumResult]) -> tuple[list[np.ndarray], dict[str, float]]:
    """Logprobs per datum and the metrics over all: sums, or means over the data where a metric's name says so."""
    metrics: dict[str, float] = {"loss:sum": sum(result.loss for result in results)}
    for result in results:
        for name, value in result.metrics.items():
            share = len(results) if name.endswith(":mean") else 1
            metrics[name] = metrics.get(name, 0.0) + value / share
    return [result.logprobs for result in results], metrics


def _load(folder: Path) -> Any:
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            # Weights are data: neither a pickle nor a program that lies beside them is run.
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as err:
        raise RequestError(f"{folder}: this model cannot be loaded ({type(err).__name__}: {err})") from err
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


def _check_adam(params: Mapping[str, Any]) -> dict[str, float]:
    if params.get("type") not in (None, "adamw", "adam"):
        raise RequestError(f"the optimizer {params['type']!r} is not supported; this engine has adamw")
    values = dict(ADAM_DEFAULTS)
    for name, default in ADAM_DEFAULTS.items():
        value = params.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
            raise RequestError(f"adam_params.{name} is {value!r}; it must be a finite number, 0 or more")
        values[name] = float(value)
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise RequestError(f"adam_params.{name} is {values[name]}; it must be below 1")
    return values


def _find_linear_layers(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Full names of the blocks' linear layers: those of attention, and all others."""
    from transformers.pytorch_utils import Conv1D

    attn: list[str] = []
    rest: list[str] = []
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            (attn if "attn" in name or "attention" in name else rest).append(name)
    return attn, rest


def _module_name(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    # Once an adapter covers the output layer, the layer itself stands under ".base_layer".
    return next(name for name, module in model.named_modules() if module is wanted).removesuffix(".base_layer")


def _eos_tokens(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = model.config.eos_token_id if eos is None else eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
