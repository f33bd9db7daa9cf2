"""The source and the order of a run's samples, as `train.source` and `train.shuffle_window` say."""

from __future__ import annotations

from dataclasses import dataclass

from common.distributed import Ranks
from common.fingerprint import require_equal
from common.storage import open_storage
from common.waiting import Waiting
from configs.schema import Config
from data.feature_manifest import MANIFEST_FILE
from data.features import FeatureSet, RowEntry, open_features
from extract.run import check_target
from extract.stream_plan import StreamPlan, block_entries, plan_stream
from extract.stream_ring import Ring
from extract.work import plan_work
from target.load import load_target
from train.order import FullOrder, Order, WindowOrder
from train.sources import ShardSource, Source, WindowedShards
from train.sources_online import OnlineSource
from train.sources_stream import StreamSource


@dataclass(frozen=True)
class Blocks:
    """The training rows as the corpus has them, in blocks."""

    plan: StreamPlan
    rows: list[list[RowEntry]]

    @property
    def entries(self) -> list[RowEntry]:
        return [entry for block in self.rows for entry in block]

    @property
    def order(self) -> WindowOrder:
        return WindowOrder(self.rows, self.plan.windows)


@dataclass(frozen=True)
class Supply:
    source: Source
    order: Order


def await_features(config: Config) -> None:
    """For a stream, whose sides start in any order: return once the held-out rows and the head are there."""
    storage, waiting = open_storage(config.features_location), Waiting()
    while config.train.source == "stream" and not storage.exists(MANIFEST_FILE):
        waiting.pause(
            lambda: (
                f"waiting for the held-out rows in {storage.url}: if it is not running, start `./launch.sh extract` with this "
                "recipe"
            )
        )


def require_rows_of(config: Config, features: FeatureSet) -> None:
    """Raises ValueError if the features are all rows where the source needs the held-out ones, or the other way round."""
    are_held_out = features.settings.get("rows") == "held-out"
    if are_held_out != (config.train.source != "shards"):
        held = "the held-out rows alone" if are_held_out else "all rows"
        raise ValueError(
            f"the features in {features.location} are {held}, which train.source={config.train.source} cannot use; set "
            "train.source to what they were made for, or extract into another folder (extract.folder, run.output_dir)"
        )


def read_blocks(config: Config, features: FeatureSet) -> Blocks | None:
    """None without a train.shuffle_window. Raises as plan_stream, and if a stream's ring is too small."""
    if config.train.shuffle_window is None:
        return None
    plan = plan_stream(config, features.settings)
    if config.train.source == "stream":
        plan.require_room()
    return Blocks(plan, block_entries(plan))


def open_supply(
    config: Config, features: FeatureSet, blocks: Blocks | None, ranks: Ranks
) -> Supply:
    """Loads the target if it is to run here. Raises ValueError if that is another one than the features are of."""
    own = open_features(features.location)  # read in another thread
    if blocks is None:
        return Supply(ShardSource(own), FullOrder(features.of_split("train"), config.run.seed))
    order = blocks.order
    if config.train.source == "shards":
        return Supply(WindowedShards(own), order)
    if config.train.source == "stream":
        source = StreamSource(blocks.plan, Ring(own.storage), order, ranks.is_main)
        source.require_free()
        return Supply(source, order)
    return Supply(_online(config, features, blocks.plan, order, ranks), order)


def release_stream(config: Config, blocks: Blocks | None, features: FeatureSet) -> None:
    """Main rank of a run that is trained already: tell the extracting side so, as the run would have."""
    if blocks is not None and config.train.source == "stream":
        source = StreamSource(blocks.plan, Ring(features.storage), blocks.order, is_main=True)
        source.require_free()
        source.trained(blocks.plan.total)


def _online(
    config: Config, features: FeatureSet, plan: StreamPlan, order: WindowOrder, ranks: Ranks
) -> OnlineSource:
    work = plan_work(config)
    require_equal(
        f"the held-out features in {features.location}",
        features.settings,
        work.settings,
        "set it back, or extract again into another folder",
    )
    target = load_target(config.target, ranks.device)
    return OnlineSource(plan, order, target, check_target(config, work, target).tap_rms)
