"""Pretrain the small base model in `data/base_model/` from freely licensed text.

    python data/make_base_model.py --wordnet wordnet-base_3.0-37_all.deb --out data/base_model

Text: the glosses and example sentences of WordNet 3.0 (Debian's `wordnet-base`; a .deb, a folder that holds `data.noun`
and its siblings, or nothing: then `apt-get download wordnet-base` fetches it), the docstrings of Python's standard
library, and question-answer conversations that this script derives from WordNet in the chat formats of the common
model families, so that the markers of those formats are trained tokens. One thread, about a quarter of an hour. The
same seed on the same machine and versions gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from base_model_text import chat_documents, gloss_text, read_synsets, stdlib_docstrings, wordnet_folder

END_OF_TEXT = "<|endoftext|>"
# Markers that chat renderers look up; each must be one token. `special` ones are left out of decoded text.
SPECIAL_TOKENS = (
    *(END_OF_TEXT, "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
)
TEXT_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 4096
CONTEXT = 512
# Share of the batches per window length: mostly short ones, which train more distinct text per second.
WINDOW_PLAN = (128, 128, 256, 128, 512, 128, 256, 128, 128, 512)
TOKENS_PER_BATCH = 2048

# Qwen3's conventions: the last assistant turn holds a think block, empty when it does not reason, and the generation
# prompt closes an empty one when thinking is switched off.
CHAT_TEMPLATE = """\
{%- set ns = namespace(asked=false) %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'user' %}{%- set ns.asked = true %}{%- endif %}
{%- if message.role == 'assistant' and loop.last and ns.asked %}
{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[1:] | join('</think>') %}
{%- endif %}
{%- set content = '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content.lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def train_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE of `VOCABULARY_SIZE` entries, chat markers included, as a `tokenizers.Tokenizer`.

    A newline is always a token of its own: text then tokenises the same whether a chat format is tokenised whole or
    piece by piece, because all formats join their pieces at newlines and markers.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(TEXT_MARKERS),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TEXT_MARKERS])
    return tokenizer


class WindowStream:
    """Cuts tokenised documents into training windows; every window starts where a document or its rest starts."""

    def __init__(self, documents: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._documents = documents
        self._rng = rng
        self._queue: list[Sequence[int]] = []
        self.epochs = 0

    def window(self, length: int) -> list[int]:
        """`length` + 1 token ids: inputs and, shifted by one, targets."""
        tokens: list[int] = []
        while len(tokens) < length + 1:
            if not self._queue:
                self._queue = [
                    self._documents[i] for i in self._rng.sample(range(len(self._documents)), len(self._documents))
                ]
                self.epochs += 1
            document = self._queue.pop()
            room = length + 1 - len(tokens)
            tokens.extend(document[:room])
            if len(document) > room + 16:  # a shorter rest would only teach how to continue nothing
                self._queue.insert(self._rng.randrange(len(self._queue) + 1), document[room:])
        return tokens


def build_model(seed: int) -> Any:
    """A randomly initialised Llama of 2.6 M parameters with tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.set_attn_implementation("eager")  # a fifth faster than the fused kernel for windows this short
    return model


def pretrain(
    model: Any,
    documents: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    *,
    tokens: int,
    seed: int,
    snapshot: Callable[[int], None],
) -> dict[str, float]:
    """Train on about `tokens` tokens; returns the final training and held-out loss (nats per token) and seconds."""
    import torch

    steps = max(1, tokens // TOKENS_PER_BATCH)
    stream = WindowStream(documents, random.Random(seed + 1))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    peak, warmup = 4e-3, min(100, max(1, steps // 10))
    started, smoothed = time.monotonic(), math.nan
    model.train()
    for step in range(steps):
        progress = max(0.0, (step - warmup) / max(1, steps - warmup))
        rate = peak * min(1.0, (step + 1) / warmup) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = WINDOW_PLAN[step % len(WINDOW_PLAN)]
        batch = torch.tensor([stream.window(length) for _ in range(TOKENS_PER_BATCH // length)])
        loss = _loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        smoothed = value if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * value
        if step % 50 == 49 or step == steps - 1:
            rate_per_s = (step + 1) * TOKENS_PER_BATCH / (time.monotonic() - started)
            print(f"step {step + 1}/{steps}  loss {smoothed:.3f}  {rate_per_s:.0f} tokens/s", flush=True)
            snapshot(step + 1)
    seconds = time.monotonic() - started
    return {
        "loss": smoothed,
        "held_out_loss": held_out_loss(model, held_out),
        "seconds": seconds,
        "steps": steps,
        "tokens": steps * TOKENS_PER_BATCH,
        "epochs": stream.epochs,
    }


def _loss(model: Any, batch: Any) -> Any:
    import torch

    # bf16 products halve the time; the weights, the optimizer and the softmax of the loss stay in fp32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(model: Any, documents: Sequence[Sequence[int]], windows: int = 64) -> float:
    """Mean loss (nats per token) over windows of 256 tokens of documents never trained on."""
    import torch

    model.eval()
    stream = WindowStream(documents, random.Random(0))
    count = min(windows, len(documents))
    with torch.no_grad():
        losses = [_loss(model, torch.tensor([stream.window(256)])).item() for _ in range(count)]
    model.train()
    return sum(losses) / len(losses)


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights (fp16 safetensors), config and tokenizer in Hugging Face's format."""
    import copy

    import torch

    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.float16)
    half.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


README = """# The small base model

A Llama of {parameters:.2f} million parameters (4 layers, width 192, context {context}) with a byte-level BPE of
{vocabulary} entries, pretrained by `data/make_base_model.py`. The tests train it, and the local engine serves it in
place of a hosted model's name. It is far too small to be useful for anything else.

| | |
|---|---|
| tokens trained | {tokens:,} in {steps} steps ({epochs} passes over the documents begun) |
| final training loss | {loss:.3f} nats per token (smoothed) |
| loss on held-out documents | {held_out_loss:.3f} nats per token |
| time | {minutes:.1f} minutes on {threads} thread(s) |
| seed | {seed} |
| made with | Python {python}, torch {torch}, transformers {transformers}, tokenizers {tokenizers} |

## Sources and licences

- **WordNet 3.0**, glosses and example sentences, from Debian's package `wordnet-base`; also the questions and
  answers that the script derives from it. The notice below applies to them.
- **Docstrings of Python {python}'s standard library**, Copyright Python Software Foundation, under the PSF License
  Agreement (<https://docs.python.org/3/license.html>), which allows derived works and redistribution.

No other text was used, and none under the GPL.

> WordNet Release 3.0. This software and database is being provided to you, the LICENSEE, by Princeton University
> under the following license. By obtaining, using and/or copying this software and database, you agree that you
> have read, understood, and will comply with these terms and conditions.:
>
> Permission to use, copy, modify and distribute this software and database and its documentation for any purpose
> and without fee or royalty is hereby granted, provided that you agree to comply with the following copyright
> notice and statements, including the disclaimer, and that the same appear on ALL copies of the software, database
> and documentation, including modifications that you make for internal use or for distribution.
>
> WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved.
>
> THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES,
> EXPRESS OR IMPLIED. BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR
> WARRANTIES OF MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED SOFTWARE,
> DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS.
>
> The name of Princeton University or Princeton may not be used in advertising or publicity pertaining to
> distribution of the software and/or database. Title to copyright in this software, database and any associated
> documentation shall at all times remain with Princeton University and LICENSEE agrees to preserve same.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Collect the text, train tokenizer and model, write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wordnet", help="wordnet-base .deb, or a folder that holds data.noun (default: download it)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base_model", help="folder to write")
    parser.add_argument("--tokens", type=int, default=4_600_000, help="tokens to train on")
    parser.add_argument("--conversations", type=int, default=60_000, help="conversations to derive from WordNet")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; the weights depend on it in the last bits")
    parser.add_argument("--seed", type=int, default=42, help="seed of text order, conversations and weights")
    parser.add_argument("--snapshot", type=Path, help="also write the unfinished model here now and then")
    parser.add_argument("--no-docstrings", action="store_true", help="leave out Python's docstrings")
    args = parser.parse_args(argv)

    import platform

    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        synsets = read_synsets(wordnet_folder(args.wordnet, Path(scratch)))
    docstrings = [] if args.no_docstrings else stdlib_docstrings()
    texts = [gloss_text(s) for s in synsets] + docstrings + list(chat_documents(synsets, args.conversations, rng))
    rng.shuffle(texts)
    tokenizer = train_tokenizer(texts)
    encodings = tokenizer.encode_batch([t + END_OF_TEXT for t in texts])
    documents = [e.ids for e in encodings]
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} tokens", flush=True)
    model = build_model(args.seed)

    def snapshot(step: int) -> None:
        if args.snapshot and (step in (50, 200) or step % 500 == 0):
            write_model(model, tokenizer, args.snapshot)

    held_out = documents[: max(1, len(documents) // 100)]
    facts = pretrain(model, documents[len(held_out) :], held_out, tokens=args.tokens, seed=args.seed, snapshot=snapshot)
    write_model(model, tokenizer, args.out)
    readme = README.format(
        **facts,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        context=CONTEXT,
        vocabulary=tokenizer.get_vocab_size(),
        minutes=facts["seconds"] / 60,
        threads=args.threads,
        seed=args.seed,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
    )
    (args.out / "README.md").write_text(readme, encoding="utf-8")
    print(f"wrote {args.out}: held-out loss {facts['held_out_loss']:.3f}, {facts['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
