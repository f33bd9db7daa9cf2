"""An exported folder to the Hugging Face hub: only when asked, only when logged in, private unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of whichever HTTP library the hub uses
)

from drafter.folder import CONFIG_FILE
from drafter.weights import WEIGHTS_FILE

CARD_FILE = "README.md"


def push_folder(folder: Path, repo: str, public: bool = False) -> str:
    """Upload an export to the model repository `repo` (owner/name), which is made if it is not there. Returns its address.

    Every file of the folder is named in the call; nothing else goes. An existing repository keeps its visibility. Raises
    ValueError if nobody is logged in, the card names a local folder as target, or the hub refuses.
    """
    require_publishable(folder)
    if get_token() is None:
        raise ValueError(
            "--push: nobody is logged in to the hub; run `hf auth login` or set HF_TOKEN"
        )
    api = HfApi()
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    try:
        address = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=files,
            commit_message="Upload drafter",
        )
    except (HTTPError, HFValidationError) as error:  # a refusal, or no way there
        raise ValueError(
            f"--push {repo}: the hub refused or is out of reach; the export in {folder} is whole: {' '.join(str(error).split())}"
        ) from error
    return str(address)


def require_publishable(folder: Path) -> None:
    """Raises ValueError unless the folder is a whole export whose card names its target as others can find it."""
    for name in (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"--push: {folder / name} is missing; export first")
    base_model = card_metadata(folder)["base_model"]
    if Path(base_model).is_absolute() or base_model.count("/") != 1 or Path(base_model).exists():
        raise ValueError(
            f"--push: the card names {base_model} as target, which is a folder here; set export.base_model to its hub id "
            "(owner/name) and export again"
        )


def card_metadata(folder: Path) -> dict[str, str]:
    """The card's front matter."""
    text = (folder / CARD_FILE).read_text(encoding="utf-8")
    return yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
