"""Nearest texts by an embedding model in place of shared words.

    embed = load_embedder("data/base_model")          # a Hugging Face folder, or package.module:function
    index = EmbeddingIndex(texts, embed)
    [near] = index.nearest(["Where is my refund?"], limit=10)

A model's vector for a text is the mean of its last hidden states over the text's tokens. A function of the user's
takes a list of texts and returns an array of a row each. Either way vectors are scaled to unit length, and similarity
is their cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from error_handling import ConfigurationError, SelectionError
from import_paths import is_import_path, load_function
from text_index import Near, best_matches
from word_table import batches

if TYPE_CHECKING:
    import numpy as np

Embedder = Callable[[Sequence[str]], "np.ndarray"]

_KEY = "selection.embedding_model"
_BLOCK = 1024
_BATCH = 32
_QUERIES = 256
_LONGEST = 512  # tokens of a text that the model reads; the rest is cut
_PROBE = ("Where is my parcel?", "I cannot log in.")


@lru_cache(maxsize=2)
def load_embedder(name: str) -> Embedder:
    """The embedding function that the configuration names, tried on two texts.

    Raises `ConfigurationError` when it cannot be loaded, or gives no usable vectors. The function returned raises
    `SelectionError` for any texts on which it fails later.
    """
    embed = load_function(name, key=_KEY, n_arguments=1) if is_import_path(name) else _load_model(name)
    try:
        vectors = _checked(embed(list(_PROBE)), len(_PROBE))
    except SelectionError as err:
        raise ConfigurationError(str(err)) from err
    except Exception as err:
        raise ConfigurationError(f"{_KEY}: {name} failed on two texts: {type(err).__name__}: {err}") from err
    width = vectors.shape[1]

    def checked(texts: Sequence[str]) -> np.ndarray:
        try:
            return _checked(embed(list(texts)), len(texts), width)
        except SelectionError:
            raise
        except Exception as err:
            told = f"{_KEY}: {name} failed on {len(texts)} texts: {type(err).__name__}: {err}"
            raise SelectionError(told) from err

    return checked


def _checked(vectors: Any, n_texts: int, width: int | None = None) -> np.ndarray:
    """`vectors` as float32 rows of unit length (a vector of zeros stays one)."""
    import numpy as np

    array = np.asarray(vectors)
    if array.ndim != 2 or array.shape[0] != n_texts or not array.shape[1] or width not in (None, array.shape[1]):
        wanted = f"({n_texts}, {width or 'width'})"
        raise SelectionError(f"{_KEY}: {n_texts} texts gave an array of shape {array.shape}, expected {wanted}")
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise SelectionError(f"{_KEY}: the vectors of {n_texts} texts are not all finite numbers")
    array = array.astype(np.float32)
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    return array / np.where(norms > 0, norms, 1)


def _load_model(name: str) -> Embedder:
    """Mean-pooled hidden states of a model in Hugging Face's format; only safetensors files are read as weights."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    place = f"the folder {name}" if Path(name).is_dir() else f"{name}, which is no folder here, from the model hub"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True, dtype=torch.float32)
    except Exception as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ConfigurationError(f"{_KEY}: cannot load {place}: {reason}") from err
    model.eval()
    longest = min(_LONGEST, getattr(model.config, "max_position_embeddings", _LONGEST))

    def embed(texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        tokens = [tokenizer.encode(text, truncation=True, max_length=longest) or [0] for text in texts]
        order = sorted(range(len(texts)), key=lambda at: len(tokens[at]))  # little padding
        pooled = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
        with torch.inference_mode():
            for part in batches(order, _BATCH):
                width = len(tokens[part[-1]])
                ids = torch.zeros((len(part), width), dtype=torch.long)
                mask = torch.zeros((len(part), width), dtype=torch.long)
                for row, at in enumerate(part):
                    ids[row, : len(tokens[at])] = torch.tensor(tokens[at])
                    mask[row, : len(tokens[at])] = 1
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask.unsqueeze(-1)
                pooled[part] = ((states * weights).sum(1) / weights.sum(1)).float().numpy()
        return pooled

    return embed


class EmbeddingIndex:
    """`text_index.Neighbours` by cosine of embeddings, 4 bytes a dimension and text."""

    def __init__(self, texts: Iterable[str], embed: Embedder) -> None:
        self._embed = embed
        self._blocks = [embed(block) for block in batches(texts, _BLOCK)]
        self.size = sum(len(block) for block in self._blocks)

    def nearest(
        self,
        queries: Sequence[str],
        *,
        limit: int,
        among: np.ndarray | None = None,
        levels: np.ndarray | None = None,
    ) -> list[Near]:
        """See `text_index.Neighbours.nearest`."""
        found: list[Near] = []
        for part in batches(queries, _QUERIES):
            vectors = self._embed(part)
            blocks: Iterator[np.ndarray] = (vectors @ block.T for block in self._blocks)
            found += best_matches(blocks, len(part), limit=limit, among=among, levels=levels)
        return found
