"""A drafter on disk, as z-lab, vLLM and SGLang read it: `config.json` and `model.safetensors`. Strict both ways.

Servers ignore tensors they do not know and default keys they miss; here both are refused, in one line each.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.files import atomic_path, fields_of, read_json, sha256_file, write_json
from common.fingerprint import fingerprint
from drafter.config import DrafterConfig
from drafter.config_json import DTYPE_NAMES, config_json, parse_config_json
from drafter.model import Drafter

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
REMEDY = "give a drafter folder: config.json and model.safetensors, as z-lab releases them"


def write_drafter(
    path: Path, config: DrafterConfig, state: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Write the two files into the folder `path`, each whole or absent; equal input gives equal bytes.

    state: the parameters of `Drafter(config)` by name, stored as `dtype`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes == expected_shapes(config), "the state is not that of a drafter of this config"
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: state[name].detach().to("cpu", dtype).contiguous() for name in sorted(state)}
    with atomic_path(path / WEIGHTS_FILE) as aside:
        save_file(tensors, aside, metadata={"format": "pt"})
        aside.chmod(0o644)  # safetensors makes it 0600; a server may run as another user
    write_json(path / CONFIG_FILE, config_json(config, dtype))


def read_drafter_config(path: Path) -> DrafterConfig:
    """The config of a drafter folder. Raises ValueError or FileNotFoundError in one line naming file and key."""
    return _parse(path, _read_config(path))


def load_drafter(path: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """The drafter of a folder, its tensors converted to `dtype`. Raises as `read_drafter_config` does."""
    values = _read_config(path)
    config = _parse(path, values)
    state = _read_state(path / WEIGHTS_FILE, expected_shapes(config), values)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({n: t.to(device, dtype) for n, t in state.items()}, assign=True)
    return drafter.requires_grad_()


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Drafter(config).named_parameters()}


def drafter_fingerprint(path: Path) -> str:
    """Of the configuration and the weights' bytes of a drafter folder."""
    return fingerprint([asdict(read_drafter_config(path)), sha256_file(path / WEIGHTS_FILE)])


def resolve_checkpoint(checkpoints_dir: Path, which: Literal["best", "last"]) -> Path:
    """The folder that `index.json` lists as `best` or `last`, its two drafter files checked against their sums.

    A folder that is there but not listed was never finished. Raises ValueError or FileNotFoundError in one line.
    """
    path = checkpoints_dir / "index.json"
    remedy = "train first: ./launch.sh train CONFIG"
    index = read_json(path, remedy)
    with fields_of(path, remedy):
        name = index[which]
        sums = {entry["folder"]: entry["sha256"] for entry in index["checkpoints"]}
    if name is None:
        raise ValueError(
            f"{checkpoints_dir} has no {which!r} checkpoint yet; train until an evaluation "
            "(train.eval_every; it needs data.validation_fraction), or choose one: export.checkpoint=last, evaluate --drafter FOLDER"
        )
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        with fields_of(path, remedy):
            wanted = sums[name][file]
        _require_sum(checkpoints_dir / name / file, wanted)
    return checkpoints_dir / name


def _require_sum(file: Path, wanted: str) -> None:
    remedy = "delete this checkpoint and resume training, or choose export.checkpoint otherwise"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is listed in index.json but missing; {remedy}")
    if sha256_file(file) != wanted:
        raise ValueError(f"{file} differs from its sha256 in index.json; {remedy}")


def _read_config(path: Path) -> Any:
    if not path.is_dir():
        raise FileNotFoundError(f"drafter folder {path} does not exist; {REMEDY}")
    return read_json(path / CONFIG_FILE, REMEDY)


def _parse(path: Path, values: Any) -> DrafterConfig:
    try:
        return parse_config_json(values)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from error


def _read_state(
    file: Path, shapes: dict[str, tuple[int, ...]], values: dict[str, Any]
) -> dict[str, Tensor]:
    _require_safetensors(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            _require_names(file, set(tensors.keys()), set(shapes))
            state = {name: tensors.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); copy it again") from error
    dtype = _stated_dtype(file, values, state)
    for name, tensor in state.items():
        _require_tensor(file, name, tensor, shapes[name], dtype)
    return state


def _require_safetensors(file: Path) -> None:
    """Pickles are never opened: loading one can run code."""
    if file.is_file():
        return
    folder = file.parent
    if (folder / f"{WEIGHTS_FILE}.index.json").is_file():
        raise ValueError(f"{folder} has sharded weights; merge them into one {WEIGHTS_FILE}")
    pickles = sorted(p.name for end in ("*.bin", "*.pt", "*.pth") for p in folder.glob(end))
    if pickles:
        raise ValueError(f"{folder / pickles[0]} is a pickle and is not opened; {REMEDY}")
    raise FileNotFoundError(f"{file} is missing; {REMEDY}")


def _require_names(file: Path, found: set[str], wanted: set[str]) -> None:
    unknown, missing = sorted(found - wanted), sorted(wanted - found)
    if unknown:
        kind = (
            "DFlash2" if any("conv" in n or "selector" in n for n in unknown) else "another model"
        )
        raise ValueError(f"{file} has {unknown[0]}, a tensor of {kind}; only plain DFlash loads")
    if missing:
        raise ValueError(f"{file} lacks {missing[0]} ({len(missing)} missing); {REMEDY}")


def _stated_dtype(file: Path, values: dict[str, Any], state: dict[str, Tensor]) -> torch.dtype:
    """The file's one dtype, which config.json (dtype, or torch_dtype of older transformers) must not contradict."""
    dtype = state["fc.weight"].dtype
    stated = values.get("dtype", values.get("torch_dtype"))
    if dtype not in DTYPE_NAMES or stated not in (None, DTYPE_NAMES[dtype]):
        raise ValueError(
            f"{file} holds {str(dtype).removeprefix('torch.')}, config.json says dtype={stated!r}; "
            f"supported and equal they must be: {', '.join(DTYPE_NAMES.values())}"
        )
    return dtype


def _require_tensor(
    file: Path, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{file}: {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
        )
    if tensor.dtype != dtype:
        raise ValueError(f"{file}: {name} is {tensor.dtype}, fc.weight is {dtype}; use one dtype")
    if not tensor.isfinite().all():
        raise ValueError(f"{file}: {name} has NaN or infinite values; this drafter is broken")
