"""Turns a Llama-architecture GGUF file into a folder in Hugging Face's format.

    convert(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), cache_dir() / "SmolLM2-135M-Instruct-v1")

The weights are the dequantised ones, exactly, in fp32: fp16 and bf16 cannot hold every scale * step + offset of a Q4_1
block. The tokenizer is built from the file's own token and merge lists, because the conversion that `transformers`
offers takes this kind of file for a SentencePiece one and then encodes the prompt wrongly.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from error_handling import ConfigurationError, DependencyError

_STALE_SECONDS = 3600.0
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Token types of the GGUF format that are matched whole before any merging.
_CONTROL_TOKEN, _USER_TOKEN = 3, 4


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the model in `gguf_path` to `folder`, which appears complete or not at all.

    Two processes may do this at once: the second finds the folder in place and drops its own copy. Raises
    `DependencyError` without the `gguf` package and `ConfigurationError` for a file that this cannot convert.
    """
    try:
        import gguf
    except ImportError as err:
        raise DependencyError(
            "Converting a GGUF file needs the package gguf. Install it with: python -m pip install gguf"
        ) from err
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (OSError, ValueError) as err:
        raise ConfigurationError(f"{gguf_path}: not a readable GGUF file: {err}") from err
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if (facts.get("general.architecture"), facts.get("tokenizer.ggml.model")) != ("llama", "gpt2"):
        raise ConfigurationError(f"{gguf_path}: only Llama models with a byte-level BPE tokenizer can be converted.")
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        tied = _write_weights(reader, facts, unfinished)
        _write_json(unfinished / "config.json", _config(facts, tied))
        _write_tokenizer(facts, unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not the other process, but a real failure
                raise


def unpermute(weights: Any, heads: int) -> Any:
    """Undo GGUF's order of rotary dimensions in a query or key matrix of shape (heads * head_dim, width).

    GGUF keeps the two halves of each head interleaved; Hugging Face's Llama keeps them one after the other.
    """
    rows, width = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def build_tokenizer(facts: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` of a GGUF file's metadata: byte-level BPE, single digits split, nothing added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL_TOKEN, _USER_TOKEN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write_weights(reader: Any, facts: Mapping[str, Any], folder: Path) -> bool:
    """Write model.safetensors; True when the output matrix is the embedding."""
    import numpy
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk" and len(parts) == 3 and parts[2] in _LAYER_PARTS:
            name = f"model.layers.{parts[1]}.{_LAYER_PARTS[parts[2]]}.weight"
        elif parts[0] in _WHOLE_PARTS and len(parts) == 1:
            name = _WHOLE_PARTS[parts[0]] + ".weight"
        elif parts[0] == "rope_freqs":
            raise ConfigurationError("This GGUF file scales its rotary frequencies, which is not supported.")
        else:
            raise ConfigurationError(f"This GGUF file holds an unknown weight, {tensor.name}.")
        array = numpy.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        if parts[-1] == "attn_q":
            array = unpermute(array, heads)
        elif parts[-1] == "attn_k":
            array = unpermute(array, kv_heads)
        weights[name] = numpy.ascontiguousarray(array)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return "lm_head.weight" not in weights


def _config(facts: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // facts["llama.attention.head_count"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(facts: Mapping[str, Any], folder: Path) -> None:
    build_tokenizer(facts).save(str(folder / "tokenizer.json"))
    tokens = facts["tokenizer.ggml.tokens"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
    }
    if "tokenizer.chat_template" in facts:
        settings["chat_template"] = facts["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _remove_stale(parent: Path) -> None:
    """Remove what a conversion that was killed left behind."""
    for leftover in parent.glob(".converting-*"):
        # Gone meanwhile is as good: its own process has finished.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
