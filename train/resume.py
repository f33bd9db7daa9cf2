"""Where a run starts: at the newest whole checkpoint made with the same settings, or at the beginning."""

from __future__ import annotations

from typing import Any

from common.files import parse_json
from common.fingerprint import fingerprint, require_equal
from common.storage import open_storage
from configs.schema import Config, TrainSection
from data.feature_manifest import MANIFEST_FILE
from data.feature_manifest import REMEDY as FEATURES_REMEDY
from train.checkpoint import Checkpoints, IndexEntry, TrainState
from train.schedule import is_settled, most_steps

FREE = frozenset(
    {
        "steps",  # compared apart: a wsd run may be continued
        "micro_batch_samples",
        "pack_tokens",
        "pack_blocks",
        "head_chunk_rows",
        "activation_checkpointing",
        "zero_stage",
        "offload",
        "checkpoint_every",
        "keep_checkpoints",
        "eval_every",
        "eval_samples",
        "log_every",
        "peak_tflops",
        "wandb_project",
        "source",  # the batches are the same
        "stream_bytes",
    }
)
"""Settings of `train` that leave the mathematics of a step alone: they may change between two halves of a run."""
YOUNGER = frozenset({"optimizer", "muon_momentum", "freeze", "shuffle_window"})
"""Not recorded at their default, so that a run from before them reads as it did."""
WALK_POWER = "train.walk_power"
"""Recorded as what it means for each loss, where that is not 0: runs from before it had none, whatever their loss."""
DEFAULTS: dict[str, Any] = {
    f"train.{key}": value
    for key, value in TrainSection(steps=1).model_dump(mode="json").items()
    if key != "steps" and key not in FREE
}
"""What a checkpoint that is older than a setting was made with."""
DEFAULTS[WALK_POWER] = {}
OF_LOSSES = {
    "train.tree_temperature_nats": {"tree"},
    "train.surrogate_budgets": {"tree_surrogate"},
    "train.surrogate_temperatures_nats": {"tree_surrogate"},
    "train.dpace_alpha": {"dpace"},
    "train.lk_eta": {"lk"},
}
"""Settings that only these losses read: a run without them does not depend on such a setting."""
OF_WALKS = frozenset({"train.walk_share", "train.walk_refresh_steps"})
"""Settings that only train.anchors=walk reads."""
REMEDY = (
    "set it back, or give run.output_dir another folder (or delete its checkpoints) for a new run"
)


def run_settings(config: Config, features: str) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that continues it, flat, JSON values. features: their location."""
    train = config.train.model_dump(mode="json")
    storage = open_storage(features)
    path = storage.location(MANIFEST_FILE)
    manifest = parse_json(storage.read(MANIFEST_FILE), path, FEATURES_REMEDY)
    return {
        **{
            f"drafter.{key}": value for key, value in config.drafter.model_dump(mode="json").items()
        },
        **{
            f"train.{key}": value
            for key, value in train.items()
            if key not in FREE and not (key in YOUNGER and value == DEFAULTS[f"train.{key}"])
        },
        WALK_POWER: {name: power for name, power in config.train.walk_powers.items() if power},
        "run.seed": config.run.seed,
        "features": fingerprint(manifest),
        "train.steps": config.train.steps,
    }


def same_run(found: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a checkpoint with the settings `found` is of the run with `settings`."""
    wanted = _that_matter(settings)
    return all((DEFAULTS | found).get(key) == value for key, value in wanted.items())


def _that_matter(settings: dict[str, Any]) -> dict[str, Any]:
    """Older settings at their defaults with them; without those of losses or anchors that the run does not have."""
    losses = settings["train.loss"]
    names = {losses} if isinstance(losses, str) else set(losses)
    unread = {key for key, readers in OF_LOSSES.items() if not readers & names}
    if settings["train.anchors"] == "uniform":
        unread |= OF_WALKS
    return {key: value for key, value in (DEFAULTS | settings).items() if key not in unread}


def find_start(
    checkpoints: Checkpoints, settings: dict[str, Any], train: TrainSection
) -> tuple[IndexEntry, TrainState] | None:
    """The checkpoint to continue from; None for a new run.

    `train.steps` may change for a wsd run, from a checkpoint at which both schedules are at their stable part. Raises
    ValueError naming the first other setting that differs, with both values.
    """
    listed, num_whole = checkpoints.entries(), 0
    for entry in checkpoints.whole_entries():
        num_whole += 1
        state, found = checkpoints.read_state(entry)
        fixed = {k: value for k, value in _that_matter(settings).items() if k != "train.steps"}
        what = f"checkpoint {checkpoints.folder / entry.folder}"
        require_equal(what, DEFAULTS | found, fixed, REMEDY)
        old = train.model_copy(update={"steps": found["train.steps"]})
        if old.steps == train.steps or (
            is_settled(entry.step, old) and is_settled(entry.step, train)
        ):
            return entry, state
    if listed and num_whole == 0:
        raise ValueError(
            f"no checkpoint in {checkpoints.folder} is whole (see above); bring them back from a copy, or delete the folder "
            "to start again"
        )
    if listed:
        _, found = checkpoints.read_state(listed[-1])
        raise ValueError(
            f"{checkpoints.folder} was made with train.steps={found['train.steps']}, this run has {train.steps}, and no "
            f"checkpoint lies in the stable part of both schedules (wsd, after the warm-ups of rate and loss, before the decay"
            f"{_most_said(listed, train, found['train.steps'])}); {REMEDY}"
        )
    return None


def _most_said(listed: list[IndexEntry], train: TrainSection, steps: int) -> str:
    """The warm-ups are shares of train.steps: of too many they would not be over at the checkpoints there are."""
    old = train.model_copy(update={"steps": steps})
    most = max((most_steps(e.step, train) for e in listed if is_settled(e.step, old)), default=0)
    return f"; at most train.steps={most} from here" if most > steps else ""
