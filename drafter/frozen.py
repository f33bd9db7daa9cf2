"""What training left alone: parameters that all checkpoints of a run share, in one file beside their folders.

checkpoints/frozen.safetensors            written once, as they were read from where the run started
checkpoints/step-00000400/frozen.json     its sha256 and names; the folder's own weights are the rest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from common.files import atomic_path, fields_of, read_json, sha256_file, write_json

FROZEN_WEIGHTS, FROZEN_FILE = "frozen.safetensors", "frozen.json"
REMEDY = "keep checkpoints in their run's folder, or ./launch.sh export makes a whole folder of one"


def write_frozen_weights(
    checkpoints: Path, tensors: Mapping[str, Tensor], wanted: Collection[str]
) -> str:
    """Write the file that folders in `checkpoints` refer to, float32; gives its sha256. Equal tensors give equal bytes.

    wanted: sums that folders refer to already. Raises ValueError if they want other bytes.
    """
    file = checkpoints / FROZEN_WEIGHTS
    with atomic_path(file) as aside:
        save_file({name: tensors[name].detach().contiguous() for name in sorted(tensors)}, aside)
        aside.chmod(0o644)
        sha256 = sha256_file(aside)
        if set(wanted) - {sha256}:
            raise ValueError(
                f"checkpoints in {checkpoints} were made beside other values than train.init_from has now for what "
                "train.freeze names; bring the source back, or give run.output_dir another folder for a new run"
            )
    return sha256


def write_frozen_reference(folder: Path, sha256: str, names: list[str]) -> None:
    write_json(folder / FROZEN_FILE, {"sha256": sha256, "names": sorted(names)})


def frozen_sum(folder: Path) -> str | None:
    """Of the file with the parameters that `folder` lacks; None for a folder that is whole."""
    reference = folder / FROZEN_FILE
    if not reference.is_file():
        return None
    value = read_json(reference, REMEDY)
    with fields_of(reference, REMEDY):
        return str(value["sha256"])


def frozen_weights(folder: Path) -> Path | None:
    """The file with the parameters that `folder` lacks, its sum checked; None for a folder that is whole.

    Raises FileNotFoundError or ValueError in one line.
    """
    wanted = frozen_sum(folder)
    if wanted is None:
        return None
    # never a path that the folder names: whoever wrote it may not choose what is read
    file = folder.absolute().parent / FROZEN_WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, with the frozen part of {folder}; {REMEDY}")
    if sha256_file(file) != wanted:
        raise ValueError(f"{file} is not the frozen part of {folder}: its sha256 differs; {REMEDY}")
    return file
