"""The text that `make_base_model.py` trains on: WordNet, Python's docstrings, conversations derived from WordNet."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Synset:
    """One WordNet sense: its words, its lexicographer category ("animal"), gloss, examples, first more general word."""

    words: tuple[str, ...]
    part: str
    category: str
    gloss: str
    examples: tuple[str, ...]
    parent: str | None


# Lexicographer files of WordNet 3.0 in the order of their numbers (manual page lexnames(5WN)).
LEXNAMES = (
    *("adjective", "relation", "adverb", "top", "act", "animal", "artifact", "attribute", "body", "cognition"),
    *("communication", "event", "feeling", "food", "group", "location", "motive", "object", "person", "phenomenon"),
    *("plant", "possession", "process", "quantity", "relation", "shape", "state", "substance", "time", "body"),
    *("change", "cognition", "communication", "competition", "consumption", "contact", "creation", "emotion"),
    *("motion", "perception", "possession", "social", "stative", "weather", "participial"),
)
# Categories concrete enough to be asked for as labels.
TOPICS = (
    *("animal", "artifact", "body", "communication", "event", "feeling", "food", "group", "location", "person"),
    *("plant", "substance", "time"),
)


def wordnet_folder(source: str | None, scratch: Path) -> Path:
    """The folder that holds WordNet's `data.*` files, unpacked from a .deb (downloaded when `source` is None)."""
    if source and Path(source).is_dir():
        found = sorted(Path(source).rglob("data.noun"))
        if not found:
            raise SystemExit(f"{source}: no file data.noun below this folder")
        return found[0].parent
    if source is None:
        subprocess.run(["apt-get", "download", "wordnet-base"], cwd=scratch, check=True)
        packages = sorted(scratch.glob("wordnet-base*.deb"))
    else:
        packages = [Path(source)]
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(scratch / "unpacked")], check=True)
    return scratch / "unpacked" / "usr" / "share" / "wordnet"


def read_synsets(folder: Path) -> list[Synset]:
    """All senses in WordNet's data files (format: manual page wndb(5WN)), in file order."""
    raw: dict[tuple[str, str], tuple[tuple[str, ...], int, str, tuple[str, str] | None]] = {}
    for name, part in (("data.noun", "noun"), ("data.verb", "verb"), ("data.adj", "adjective"), ("data.adv", "adverb")):
        for line in (folder / name).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("  "):  # the licence text at the head of each file
                continue
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            count = int(fields[3], 16)
            words = tuple(re.sub(r"\((a|p|ip)\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2])
            pointers = fields[4 + 2 * count + 1 :]
            parent = next(
                ((part, pointers[i + 1]) for i in range(0, len(pointers) - 3, 4) if pointers[i] in ("@", "@i")), None
            )
            raw[part, fields[0]] = (words, int(fields[1]), gloss.strip(), parent)
    synsets = []
    for (part, _), (words, lexfile, gloss, parent_key) in raw.items():
        examples = tuple(re.findall(r'"([^"]+)"', gloss))
        definition = re.split(r';\s*"|^"', gloss)[0].strip(" ;")
        parent_word = raw[parent_key][0][0] if parent_key and parent_key in raw else None
        if definition:
            synsets.append(Synset(words, part, LEXNAMES[lexfile], definition, examples, parent_word))
    return synsets


def stdlib_docstrings() -> list[str]:
    """Docstrings of 40 characters or more in Python's standard library, tests left out, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if left_out.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # templates that only look like Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 40:
                    texts.append(text)
    return sorted(set(texts))


def gloss_text(synset: Synset) -> str:
    """A sense as a line of running text."""
    text = f"{', '.join(synset.words)} ({synset.part}): {synset.gloss}."
    return " ".join([text, *(e[0].upper() + e[1:] + ("" if e[-1] in ".!?" else ".") for e in synset.examples)])


def question_and_answer(synset: Synset, rng: random.Random) -> tuple[str, str]:
    """One question about a sense and its answer; the kind of question is drawn from `rng`."""
    word = rng.choice(synset.words)
    kinds: list[Callable[[], tuple[str, str]]] = [
        lambda: (rng.choice(["What does {} mean?", "Define {}.", "What is {}?"]).format(word), synset.gloss),
        lambda: (rng.choice(["Which word means: {}?", "Name it: {}", "{}\nWord:"]).format(synset.gloss), word),
        lambda: (rng.choice(["Repeat: {}", "Say {}", "Copy this text.\n\n{}"]).format(word), word),
    ]
    if synset.parent:
        kinds.append(
            lambda: (
                rng.choice(["What kind of thing is {}?", "{} is a kind of what?"]).format(word),
                str(synset.parent),
            )
        )
    if synset.examples:
        kinds.append(lambda: (f"Use {word} in a sentence.", rng.choice(synset.examples)))
    if len(synset.words) > 1:
        other = rng.choice([w for w in synset.words if w != word] or [word])
        kinds.append(lambda: (rng.choice(["Another word for {}?", "Give a synonym of {}."]).format(word), other))
    if synset.category in TOPICS:
        # Naming a label for a text is what the model is mostly fine-tuned to do, so it is the commonest question.
        kinds.extend([lambda: _classification(synset, rng)] * 4)
    return rng.choice(kinds)()


def _classification(synset: Synset, rng: random.Random) -> tuple[str, str]:
    labels = [*rng.sample([t for t in TOPICS if t != synset.category], rng.randint(1, 5)), synset.category]
    rng.shuffle(labels)
    text = rng.choice([synset.gloss, synset.gloss, *synset.examples])
    form = rng.choice(
        [
            "Classify the text as one of: {labels}.\n\n{text}",
            "Which label fits? {labels}\n{text}",
            "{text}\n\nAnswer with one of {labels}.",
            "Text: {text}\nLabels: {labels}\nLabel:",
        ]
    )
    return form.format(labels=", ".join(labels), text=text), synset.category


SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Reply with the label only.",
    "You are a dictionary.",
    "You sort texts into categories.",
)


def render_chat(style: str, turns: Sequence[tuple[str, str]]) -> str:
    """A conversation of (role, content) turns as text in the chat format `style`."""
    if style in ("chatml", "chatml_no_thinking"):
        parts = []
        for index, (role, content) in enumerate(turns):
            block = style == "chatml_no_thinking" and index == len(turns) - 1
            opening = "<think>\n\n</think>\n\n" if block else ""
            parts.append(f"<|im_start|>{role}\n{opening}{content}<|im_end|>")
        return "\n".join(parts)
    if style == "llama3":
        turns_text = "".join(f"<|start_header_id|>{r}<|end_header_id|>\n\n{c}<|eot_id|>" for r, c in turns)
        return "<|begin_of_text|>" + turns_text
    if style == "role_colon":
        return "\n\n".join(f"{role.capitalize()}: {content}" for role, content in turns) + "\n\nUser:"
    if style == "deepseek":
        marks = {
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"),
        }
        return "<｜begin▁of▁sentence｜>" + "".join(marks[r][0] + c + marks[r][1] for r, c in turns)
    if style == "kimi":
        names = {"system": "system", "user": "user", "assistant": "assistant"}
        return "".join(f"<|im_{names[r]}|>{r}<|im_middle|>{_empty_think(r)}{c}<|im_end|>" for r, c in turns)
    if style == "glm":
        return "[gMASK]<sop>" + "".join(f"<|{r}|>{_empty_think(r)}{c}" for r, c in turns) + "<|user|>"
    if style == "harmony":
        parts = []
        for index, (role, content) in enumerate(turns):
            channel = "<|channel|>final" if role == "assistant" else ""
            end = "<|return|>" if index == len(turns) - 1 else "<|end|>"
            parts.append(f"<|start|>{role}{channel}<|message|>{content}{end}")
        return "".join(parts)
    raise ValueError(f"unknown chat format {style!r}")


def _empty_think(role: str) -> str:
    return "<think></think>" if role == "assistant" else ""


# Formats and how often each is drawn: the Qwen family is what the configurations of this project name first.
CHAT_STYLES = {
    **{"chatml_no_thinking": 36, "chatml": 34, "llama3": 8, "role_colon": 8},
    **{"deepseek": 4, "kimi": 4, "glm": 3, "harmony": 3},
}


def chat_documents(synsets: Sequence[Synset], count: int, rng: random.Random) -> Iterator[str]:
    """`count` conversations of one or two questions, about a third of them with a system turn."""
    styles, weights = list(CHAT_STYLES), list(CHAT_STYLES.values())
    for _ in range(count):
        turns: list[tuple[str, str]] = []
        if rng.random() < 0.35:
            turns.append(("system", rng.choice(SYSTEM_TEXTS)))
        for _ in range(2 if rng.random() < 0.15 else 1):
            question, answer = question_and_answer(rng.choice(synsets), rng)
            turns += [("user", question), ("assistant", answer)]
        yield render_chat(rng.choices(styles, weights)[0], turns)
