"""Which target made this: a cheap identity of weights, tokenizer and chat template that every manifest carries."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.fingerprint import fingerprint
from configs.schema import TargetSection
from target.load import load_tokenizer, target_folder

_SAMPLE_BYTES = 4096


def target_identity(section: TargetSection) -> dict[str, Any]:
    """Model, revision, and hashes of weights, tokenizer and chat template. Loads no weights.

    The weights' hash covers every safetensors header and the first and last 4 KiB of every tensor: another checkpoint, dtype
    or fine-tune differs in it, and 54 GB take a second.
    """
    folder = target_folder(section)
    tokenizer = load_tokenizer(section)
    return {
        "model": section.model,
        "revision": section.revision,
        "weights": _weights_hash(section, folder),
        "tokenizer": _tokenizer_hash(section, tokenizer),
        "chat_template": fingerprint(tokenizer.chat_template),
        "chat_template_kwargs": dict(section.chat_template_kwargs),
    }


def _tokenizer_hash(section: TargetSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the content of tokenizer.json, whichever files the tokenizer came from."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"target.model={section.model}: its tokenizer {type(tokenizer).__name__} has no tokenizer.json form; save it "
            "as a fast tokenizer"
        )
    return fingerprint(json.loads(tokenizer.backend_tokenizer.to_str()))


def _weights_hash(section: TargetSection, folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"target.model={section.model} has no .safetensors file in {folder}; convert its weights"
        )
    digest = hashlib.sha256()
    for path in files:
        try:
            _add_file(digest, path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"target.model={section.model}: {path} is no safetensors file ({error}); fetch it again"
            ) from error
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    """Format: 8 bytes little-endian header length, JSON header with `data_offsets` of each tensor, data."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > path.stat().st_size:
            raise ValueError("it is cut short")
        header = file.read(header_bytes)
        digest.update(path.name.encode())
        digest.update(header)
        start = 8 + header_bytes
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            for offset in (first, max(first, end - _SAMPLE_BYTES)):
                file.seek(start + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
