"""A drafter folder's tensors: read one by one from safetensors, each checked; nothing unexpected is passed over.

Servers ignore tensors that they do not know; here one is refused or, if it is a copy of the target's own, listed.
H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.files import atomic_path, fields_of, sha256_file
from drafter.config import DrafterConfig
from drafter.decoder_json import DTYPE_NAMES
from drafter.frozen import frozen_weights
from drafter.json_values import Values, shown
from drafter.kinds import kind_of_tensors
from drafter.shapes import expected_shapes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
OPTIMIZER_FILE = "optimizer.safetensors"
"""Of a checkpoint: belongs to training, no part of the drafter."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGETS = (EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight")
"""The target's own tensors, which self-contained folders repeat under these names."""
REMEDY = (
    "give a drafter folder: config.json and model.safetensors, as z-lab or speculators write them"
)


@dataclass(frozen=True)
class Weights:
    """Where a folder's tensors lie; nothing is in memory yet."""

    folder: Path
    file_of: Mapping[str, Path]
    """By tensor name."""

    @property
    def files(self) -> list[Path]:
        return sorted(set(self.file_of.values()))

    @property
    def others(self) -> list[str]:
        """Files beside these that look like weights, of which nothing is read."""
        own = {*self.files, self.folder / OPTIMIZER_FILE}
        ends = ("*.safetensors", "*.bin", "*.pt", "*.pth")
        return sorted(p.name for end in ends for p in self.folder.glob(end) if p not in own)

    @property
    def targets(self) -> list[str]:
        """Copies of the target's tensors."""
        return [name for name in TARGETS if name in self.file_of]

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, backed by the file. Raises ValueError if it is not whole."""
        file = self.file_of[name]
        with _opened(file) as tensors:
            return tensors.get_tensor(name)


def find_weights(folder: Path, config: DrafterConfig) -> Weights:
    """Locate every tensor. Raises ValueError or FileNotFoundError in one line if one is missing or one too many is there."""
    files, frozen = _files(folder), frozen_weights(folder)
    file_of: dict[str, Path] = {}
    for file in files if frozen is None else [*files, frozen]:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # a safe_open handle is no mapping
                if name in file_of:
                    raise ValueError(f"{file} repeats {shown(name)} of {file_of[name].name}")
                file_of[name] = file
    if files != [folder / WEIGHTS_FILE]:  # a checkpoint, so a frozen part too, has one file
        _require_indexed(folder / INDEX_FILE, file_of)
    _require_names(folder, set(file_of), set(expected_shapes(config)))
    return Weights(folder, file_of)


def checked_reader(
    weights: Weights, config: DrafterConfig, values: Values
) -> Callable[[str], Tensor]:
    """Gives each of the drafter's parameters by name, as stored. Raises ValueError naming the tensor that is not as it should."""
    shapes = expected_shapes(config)
    file = weights.file_of["fc.weight"]
    dtype = _stated_dtype(file, values, weights.read("fc.weight").dtype)
    for name in (EMBEDDING, HEAD):
        if name in weights.file_of:
            shape = (config.vocab_size, config.hidden_size)
            _require_shape(weights.file_of[name], name, weights.read(name), shape)

    def read(name: str) -> Tensor:
        tensor = weights.read(name)
        _require_tensor(weights.file_of[name], name, tensor, shapes[name], dtype)
        return tensor

    return read


def write_weights(
    path: Path,
    config: DrafterConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    targets: Mapping[str, Tensor] | None = None,
    without: Collection[str] = (),
) -> None:
    """Write model.safetensors into the folder `path`, whole or not at all; equal input gives equal bytes.

    without: names that drafter/frozen.py keeps elsewhere.
    read: gives each parameter by name, once; what is alive at a time is one of them beside all of them in `dtype`.
    targets: EMBEDDING and HEAD for a self-contained folder, written as they are.
    """
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(expected_shapes(config).items()):
        if name in without:
            continue
        tensors[name] = read(name).detach().to("cpu", dtype).contiguous()
        assert tensors[name].shape == shape, f"{name} is not that of a drafter of this config"
    assert set(targets or {}) <= {EMBEDDING, HEAD}
    tensors |= targets or {}
    path.mkdir(parents=True, exist_ok=True)
    with atomic_path(path / WEIGHTS_FILE) as aside:
        save_file(tensors, aside, metadata={"format": "pt"})
        aside.chmod(0o644)  # safetensors makes it 0600; a server may run as another user


def weights_sums(folder: Path) -> list[str]:
    """sha256 of each weights file, in the order of their names, a frozen part last."""
    frozen = frozen_weights(folder)
    return [sha256_file(file) for file in [*_files(folder), *([frozen] if frozen else [])]]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); copy it again") from error


def _files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names. Pickles are never opened: loading one can run code."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    pickles = sorted(p.name for end in ("*.bin", "*.pt", "*.pth") for p in folder.glob(end))
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{folder / 'mask_embedding.pt'} is a mask embedding of the drafter's own (MiMo's DFlash) and a pickle; "
            "neither is supported"
        )
    if single.is_file() and index.exists():
        raise ValueError(
            f"{folder} has both {single.name} and {index.name}; readers disagree about which counts: remove one"
        )
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if (folder / "latest").is_file() or list(folder.glob("zero_to_fp32.py")):
        raise ValueError(
            f"{folder} is a checkpoint of DeepSpeed's own, which are pickles; export the run that wrote it, or convert "
            "it to safetensors with its own tools first"
        )
    if pickles:
        raise ValueError(f"{folder / pickles[0]} is a pickle and is not opened; {REMEDY}")
    raise FileNotFoundError(f"{single} is missing; {REMEDY}")


def _shards(index: Path) -> list[Path]:
    """Raises ValueError unless the index names plain files beside it, and FileNotFoundError if one is not there."""
    remedy = "copy the folder again"
    try:
        value = json.loads(index.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{index} is not valid JSON; {remedy}") from error
    with fields_of(index, remedy):
        names = sorted(set(value["weight_map"].values()))
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ValueError(
                f"{index} names {shown(name)}; only .safetensors files beside it are read"
            )
        if not (index.parent / name).is_file():
            raise FileNotFoundError(
                f"{index.parent / name} is missing, a shard of {index.name}; {remedy}"
            )
    if not names:
        raise ValueError(f"{index} names no file; {remedy}")
    return [index.parent / name for name in names]


def _require_indexed(index: Path, file_of: Mapping[str, Path]) -> None:
    """Raises ValueError unless the shards hold what their index says, each tensor where it says."""
    stated: Values = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for name in sorted(stated.keys() | file_of.keys()):
        file = file_of[name].name if name in file_of else None
        if stated.get(name) != file:
            raise ValueError(
                f"{index} says {shown(name)} is in {shown(stated.get(name))}, it is in {shown(file)}; copy the folder again"
            )


def _require_names(folder: Path, found: set[str], wanted: set[str]) -> None:
    if found & {"d2t", "t2d"}:
        raise ValueError(
            f"{folder} has a map to part of the vocabulary (d2t); drafters here use the target's own head"
        )
    unknown, missing = sorted(found - wanted - set(TARGETS)), sorted(wanted - found)
    kind = kind_of_tensors(unknown)
    if kind is not None:
        raise ValueError(
            f"{folder} has {shown(kind[0])}, a tensor of {kind[1]}; only plain DFlash loads"
        )
    if unknown:
        raise ValueError(
            f"{folder} has {shown(unknown[0])}, a tensor of another model; only plain DFlash loads"
        )
    if missing:
        raise ValueError(
            f"{folder}: its weights lack {missing[0]} ({len(missing)} missing); {REMEDY}"
        )


def _stated_dtype(file: Path, values: Values, dtype: torch.dtype) -> torch.dtype:
    """The file's one dtype, which config.json (dtype, or torch_dtype of older transformers) must not contradict."""
    stated = values.get("dtype", values.get("torch_dtype"))
    if dtype not in DTYPE_NAMES or stated not in (None, DTYPE_NAMES[dtype]):
        raise ValueError(
            f"{file} holds {str(dtype).removeprefix('torch.')}, config.json says dtype={shown(stated)}; "
            f"supported and equal they must be: {', '.join(DTYPE_NAMES.values())}"
        )
    return dtype


def _require_tensor(
    file: Path, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    _require_shape(file, name, tensor, shape)
    if tensor.dtype != dtype:
        raise ValueError(f"{file}: {name} is {tensor.dtype}, fc.weight is {dtype}; use one dtype")
    if not tensor.any():
        raise ValueError(f"{file}: {name} is all zero, as after a broken copy; copy it again")
    if not tensor.isfinite().all():
        raise ValueError(f"{file}: {name} has NaN or infinite values; this drafter is broken")


def _require_shape(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{file}: {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
        )
