"""The target's own files, read for what an export states about it: architecture, depth, embedding and head.

Nothing of the model is run: tensors are found by name and read a slice at a time, independently of the way by which extract
stored them, so that each proves the other. V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import fields_of, read_json
from drafter.own_head import first_difference
from drafter.speculators_json import Verifier
from target.head import TargetHead

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
REMEDY = "name the target's folder, or a hub id that was fetched"


@dataclass(frozen=True)
class TargetFacts:
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool | None
    """Whether the head is the embedding; None if config.json leaves it to the family."""


def read_target_facts(folder: Path) -> TargetFacts:
    """From config.json; a model with parts has them in text_config. Raises ValueError or FileNotFoundError in one line."""
    path = folder / "config.json"
    values: dict[str, Any] = read_json(path, REMEDY)
    with fields_of(path, REMEDY):
        text = values.get("text_config", values)
        return TargetFacts(
            tuple(values.get("architectures") or ()),
            int(text["num_hidden_layers"]),
            int(text["hidden_size"]),
            int(text["vocab_size"]),
            values.get("tie_word_embeddings", text.get("tie_word_embeddings")),
        )


def verifier_of(name: str, folder: Path) -> Verifier:
    """The target as speculators' format names it; `name` is where servers find it."""
    return Verifier(name, read_target_facts(folder).architectures)


def own_head(folder: Path) -> TargetHead:
    """Embedding and head as the target's safetensors hold them. Raises ValueError if the names are not known here."""
    facts = read_target_facts(folder)
    embedding = _find(folder, EMBEDDINGS, facts)
    head = embedding if facts.tied else _find(folder, HEADS, facts)
    if head is None and facts.tied is None:
        head = embedding
    for what, tensor in (("embedding", embedding), ("head", head)):
        if tensor is None:
            raise ValueError(
                f"{folder} has no {what} under a name that is known here; its {what} cannot be told from other tensors"
            )
    assert embedding is not None
    assert head is not None
    return TargetHead(embedding, head)


def require_same_head(stored: TargetHead, target: Path) -> None:
    """Raises ValueError unless `stored`, what extract saw, is bit for bit the target's own embedding and head."""
    own = own_head(target)
    for what, found, wanted in (
        ("embedding", own.embedding, stored.embedding),
        ("head", own.head, stored.head),
    ):
        row = first_difference(found, wanted)
        if row is not None:
            raise ValueError(
                f"the features' {what} is not that of {target}: they differ at token {row}; the target changed since "
                "extract, or its embedding and head are tied otherwise: extract again"
            )


def _find(folder: Path, names: tuple[str, ...], facts: TargetFacts) -> Tensor | None:
    """The (V, H) tensor with the shortest name that is one of `names`, under any prefix."""
    found = [
        (name, file)
        for name, file in _tensor_files(folder).items()
        if any(name == known or name.endswith(f".{known}") for known in names)
    ]
    for name, file in sorted(found, key=lambda pair: (len(pair[0]), pair[0])):
        try:
            with safe_open(file, "pt") as tensors:
                if tuple(tensors.get_slice(name).get_shape()) == (
                    facts.vocab_size,
                    facts.hidden_size,
                ):
                    return tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}); fetch it again") from error
    return None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """By tensor name: the index's map if the folder is sharded, else what each file holds."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        value = read_json(index, REMEDY)
        with fields_of(index, REMEDY):
            found = {name: folder / Path(file).name for name, file in value["weight_map"].items()}
        for file in sorted(set(found.values())):
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing, a shard of {index.name}; {REMEDY}")
        return found
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short ({error}); fetch it again") from error
    return names
