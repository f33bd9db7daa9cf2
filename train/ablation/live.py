"""Some of the judged prompts decoded for real, chain and tree at the headline budget: what replay says must be what happens.

In a file of its own beside the judgement, which stays as it is. Drafter temperatures are the judgement's, fitted on other
prompts; the target samples at the temperature of the records, and at 0 its output must be the record, token for token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from common.distributed import Ranks
from common.files import fields_of, read_json, write_json
from common.fingerprint import fingerprint
from common.progress import Progress
from configs.schema import Config
from data.features import FeatureRow, RowEntry, open_features
from drafter.folder import load_drafter, resolve_checkpoint
from evaluation.acceptance import PromptPasses
from evaluation.acceptors import CHAIN, Acceptor, tree_acceptor
from evaluation.decoded import Decoded
from evaluation.live import LiveSetup, choose_prompts, decode_by, make_setup, prompt_of
from evaluation.tuning import Tuning
from target.load import load_target
from train.ablation.judge import Judgement, PromptSets, divide_prompts, is_judged, read_judgement
from train.ablation.runs import AblationRun
from train.ablation.settings import Ablation
from train.engine import DTYPES

REMEDY = "delete it; the ablation decodes the run again"


@dataclass(frozen=True)
class LiveJudgement:
    """Passes by prompt id, then by acceptor key: emitted tokens a verify pass of the row's first response."""

    identity: str
    """Of the judgement, the prompts and the budget."""
    temperature: float
    """Of the target's samples."""
    tasks: dict[str, str]
    passes: dict[str, dict[str, list[int]]]
    is_record: dict[str, dict[str, bool]]
    """Whether the decoded tokens are the recorded ones, as far as decoding went."""

    def of(self, key: str) -> list[PromptPasses]:
        """One acceptor's, a prompt each."""
        return [
            PromptPasses(prompt, self.tasks[prompt], tuple(by_key[key]))
            for prompt, by_key in self.passes.items()
        ]


def live_acceptors(ablation: Ablation) -> list[Acceptor]:
    return [CHAIN, tree_acceptor(ablation.headline_budget)]


def live_path(run: AblationRun) -> Path:
    return run.folder / "live.json"


def read_live(run: AblationRun) -> LiveJudgement:
    path = live_path(run)
    value = read_json(path, REMEDY)
    with fields_of(path, REMEDY):
        return LiveJudgement(**value)


def is_decoded(run: AblationRun, sets: PromptSets) -> bool:
    """Whether nothing is left to decode: none is asked for, or it was decoded under the judgement as it is now."""
    if not run.ablation.live_prompts:
        return True
    if not is_judged(run, "judge", sets) or not live_path(run).is_file():
        return False
    return read_live(run).identity == live_identity(run, sets)


def decode_run(run: AblationRun, ranks: Ranks) -> None:
    """Write live.json of a judged run, if it is not there; the target is loaded for it."""
    features = open_features(run.config().features_location)
    sets = divide_prompts(features, run.ablation)
    if is_decoded(run, sets):
        return
    judgement = read_judgement(run, "judge")
    temperature = record_temperature(run.config())
    setup = _setup(run, judgement, ranks)
    rows = [features.read(entry) for entry in _chosen(run, sets)]
    found = LiveJudgement(live_identity(run, sets), temperature, {}, {}, {})
    progress = Progress(f"live {run.folder.name}", len(rows), "prompts")
    for row in rows:
        _decode_row(setup, row, run.ablation, found)
        progress.advance()
    progress.finish()
    write_json(live_path(run), asdict(found))


def live_identity(run: AblationRun, sets: PromptSets) -> str:
    """Of the run's judgement and what is decoded."""
    config = run.config()
    section = config.evaluation
    prompts = [entry.sample_id for entry in _chosen(run, sets)]
    keys = [acceptor.key for acceptor in live_acceptors(run.ablation)]
    sampling = [record_temperature(config), section.top_p, section.top_k]
    return fingerprint([read_judgement(run, "judge").identity, prompts, keys, sampling])


def record_temperature(config: Config) -> float:
    """That the records were sampled at; greedy where the target did not write them."""
    responses = config.data.responses
    return responses.temperature if responses.generate else 0.0


def is_same_as_record(row: FeatureRow, decoded: Decoded) -> bool:
    """Whether the decoded tokens are the first ones of the row's first response."""
    first = int(row.loss_mask.int().argmax())
    return row.input_ids[first : first + len(decoded.tokens)].tolist() == decoded.tokens


def _decode_row(
    setup: LiveSetup, row: FeatureRow, ablation: Ablation, found: LiveJudgement
) -> None:
    """Add one prompt to `found`."""
    prompt = row.sample_id
    found.tasks[prompt], found.passes[prompt], found.is_record[prompt] = row.task, {}, {}
    for acceptor in live_acceptors(ablation):
        [decoded] = decode_by(setup, [prompt_of(row)], acceptor, found.temperature)
        found.passes[prompt][acceptor.key] = decoded.passes
        found.is_record[prompt][acceptor.key] = is_same_as_record(row, decoded)


def _setup(run: AblationRun, judgement: Judgement, ranks: Ranks) -> LiveSetup:
    config = run.config()
    dtype = config.evaluation.dtype
    folder = resolve_checkpoint(run.folder / "checkpoints", "last")
    drafter = load_drafter(folder, ranks.device, DTYPES[dtype]).eval().requires_grad_(False)
    target = load_target(config.target, ranks.device, dtype=dtype, attention="sdpa")
    section = config.evaluation.model_copy(update={"live_batch_size": 1})
    return make_setup(target, drafter, section, config.run.seed, Tuning(judgement.temperatures))


def _chosen(run: AblationRun, sets: PromptSets) -> list[RowEntry]:
    """The same prompts for every run, tasks in turn."""
    return choose_prompts(sets.judge, run.ablation.live_prompts, seed=0)
