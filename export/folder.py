"""Writing a drafter in the format that its reader wants: z-lab's (vLLM, SGLang, z-lab's code) or speculators' (vLLM, speculators).

Tensors are the same in both, under the same names; only config.json differs. A self-contained folder also carries the
target's embedding and head.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.files import write_json
from drafter.config import DrafterConfig
from drafter.config_json import config_json
from drafter.folder import CONFIG_FILE, Format
from drafter.speculators_json import Verifier, speculators_json
from drafter.weights import EMBEDDING, HEAD, write_weights
from target.head import TargetHead

FORMATS: tuple[Format, ...] = ("zlab", "speculators")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Output:
    """What is written."""

    format: Format
    verifier: Verifier | None
    """The target; speculators' format cannot do without."""
    target_head: TargetHead | None = None
    """For a self-contained folder."""

    @property
    def folder_name(self) -> str:
        return self.format if self.target_head is None else f"{self.format}-self-contained"


def write_folder(
    path: Path,
    config: DrafterConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    output: Output,
) -> None:
    """config.json and model.safetensors into `path`; `read` gives each parameter by name. Equal input, equal bytes."""
    if output.format == "speculators":
        if output.verifier is None:
            raise ValueError("speculators' format names the drafter's target; give it: --target")
        values = speculators_json(config, dtype, output.verifier)
    else:
        values = config_json(config, dtype)
    write_weights(path, config, read, dtype, _own_tensors(output.target_head))
    write_json(path / CONFIG_FILE, values)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the target's tokenizer files as they are. Raises FileNotFoundError if it has no tokenizer."""
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not {file.name for file in files} & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise FileNotFoundError(f"{source} has no tokenizer.json; complete the target's folder")
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _own_tensors(head: TargetHead | None) -> dict[str, Tensor]:
    """A tied head is written too: readers look for both. safetensors wants storage of its own for each."""
    if head is None:
        return {}
    embedding, own = head.embedding.cpu().contiguous(), head.head.cpu().contiguous()
    if own.data_ptr() == embedding.data_ptr():
        own = own.clone()
    return {EMBEDDING: embedding, HEAD: own}
