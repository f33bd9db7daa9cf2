"""What a GPU computes is what the CPU computes in float32: drafter, decoding, features, training steps.

Every test runs on the CPU too, against another path or in another process, so that its own logic is known to be right
before a GPU is at hand. `pytest -m gpu` runs the CUDA half; it fails, and never skips, where there is no CUDA.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import HYBRID
from drafter_cases import CONFIGS, tiny_drafter
from evaluation_cases import Case, make_case
from torch import Tensor
from train_runs import losses_and_norms, make_recipe

from common.distributed import Ranks
from configs.schema import Config
from data.build import build_corpus
from data.features import open_features
from ddtree.verify import TreeVerifier
from drafter.model import BlockLayout
from evaluation.acceptors import CHAIN, PLAIN, Acceptor, spine_acceptor, tree_acceptor
from evaluation.decode import decode_batch, make_proposer
from extract.run import run_extract
from target.generate import Sampling, generate_batch
from target.head import TargetHead
from target.load import Target, load_target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# a trainer in a process of its own takes seconds to import
on_devices_slowly = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
on_families = pytest.mark.parametrize("family", ["qwen3_sliding", HYBRID])
PROMPTS = [[7, 8, 9], list(range(20, 90)), [5]]


@on_devices
@pytest.mark.parametrize("name", CONFIGS)
def test_the_drafter_and_its_gradients_are_those_of_the_dense_mask(name: str, device: str) -> None:
    """The device's own choice (flex on CUDA, structured on the CPU) against the dense mask on the CPU."""
    drafter = tiny_drafter(replace(CONFIGS[name], head_dim=16))
    layout = random_layout(150, 20)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 150, 3, 32, generator=generator)
    embeddings = torch.randn(2, 20, 4, 32, generator=generator)
    results: list[list[Tensor]] = []
    for place, attention in (("cpu", "dense"), (device, "auto")):
        moved = BlockLayout(**{name: t.to(place) for name, t in vars(layout).items()})
        hidden = drafter.to(place)(features.to(place), embeddings.to(place), moved, attention)
        gradients = torch.autograd.grad(hidden.square().mean(), list(drafter.parameters()))
        results.append([t.detach().cpu() for t in (hidden, *gradients)])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert (got - wanted).norm() <= 1e-4 * wanted.norm()


def random_layout(length: int, num_anchors: int) -> BlockLayout:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(length, (2, num_anchors), generator=generator)
    places = torch.arange(length).expand(2, -1)
    return BlockLayout(places, torch.zeros_like(places), anchors, torch.zeros_like(anchors))


@on_devices
@on_families
def test_batched_greedy_text_is_the_cpus_one_by_one(
    tiny_config: MakeConfig, tiny_target: MakeTarget, family: str, device: str
) -> None:
    target = load_target(tiny_config(family).target, device)
    one_by_one = [
        generate_batch(tiny_target(family), [prompt], 24, Sampling())[0] for prompt in PROMPTS
    ]
    assert generate_batch(target, PROMPTS, 24, Sampling()) == one_by_one


@pytest.fixture(scope="module", params=["qwen3_sliding", HYBRID])
def case(
    request: pytest.FixtureRequest, tiny_config: MakeConfig, tiny_target: MakeTarget
) -> tuple[Config, Case]:
    """On the CPU: a drafter that is right now and then, and greedy records."""
    config = tiny_config(request.param)
    return config, make_case(config, tiny_target(request.param), num_prompts=4, steps=40)


@on_devices
@pytest.mark.parametrize(
    "acceptor", [PLAIN, CHAIN, tree_acceptor(24), spine_acceptor(6)], ids=lambda a: a.key
)
def test_speculative_text_is_the_cpus_greedy_record(
    case: tuple[Config, Case], acceptor: Acceptor, device: str
) -> None:
    config, on_cpu = case
    target = load_target(config.target, device)
    head = TargetHead(target.embed_tokens, target.lm_head)
    verifier = TreeVerifier(target, config.drafter.target_layer_ids, num_sequences=2)
    prompts = [torch.tensor(prompt, device=device) for prompt in on_cpu.prompts]
    settings = on_cpu.settings()
    drafter = copy.deepcopy(on_cpu.drafter).to(device)
    proposer = make_proposer(verifier, drafter, head, prompts, settings)
    decoded = decode_batch(
        verifier,
        None if acceptor == PLAIN else proposer,
        prompts,
        acceptor,
        settings,
        list(range(len(prompts))),
    )
    assert [d.tokens for d in decoded] == on_cpu.records
    if acceptor != PLAIN:  # some pass took more than one token, or nothing was tested
        assert max(max(d.passes, default=1) for d in decoded) > 1


@on_devices
@on_families
def test_features_of_the_stage_are_the_cpus_hidden_states(
    tiny_config: MakeConfig, tiny_target: MakeTarget, family: str, device: str
) -> None:
    config, cpu = tiny_config(family), tiny_target(family)
    build_corpus(config, Ranks(0, 1, 0, torch.device("cpu")))
    run_extract(config, Ranks(0, 1, 0, torch.device(device)), ignore_disk=True)
    features = open_features(config.run.folder / "features")
    rows = [features.read(entry) for entry in features.of_split("train")]
    assert len(rows) > 5
    for row in rows:
        hidden = cpu.model(row.input_ids[None].long(), output_hidden_states=True).hidden_states
        wanted = torch.stack([hidden[i + 1][0] for i in (1, 2, 4)], dim=1)  # (S, D, H)
        assert (row.features - wanted).norm() <= 1e-4 * wanted.norm()


@on_devices_slowly
def test_training_steps_are_the_cpus(tmp_path: Path, device: str) -> None:
    """Eight steps with warm-up, tree loss and validation: loss and gradient norm of each, float32."""
    wanted = curve(tmp_path / "wanted", "cpu", "train.micro_batch_samples=1")
    # the CPU's half has another split into micro-batches in place of another device
    found = curve(tmp_path / "found", device, "train.micro_batch_samples=2")
    assert len(found) == len(wanted) == 16
    assert found == pytest.approx(wanted, rel=2e-3)


@on_devices_slowly
def test_bf16_training_falls(tmp_path: Path, device: str) -> None:
    found = curve(tmp_path / "run", device, "train.dtype=bfloat16", "train.steps=30")[::2]
    assert found[-1] < 0.7 * found[0]


def curve(folder: Path, device: str, *overrides: str) -> list[float]:
    """Loss and gradient norm a step, trained in a process of its own: one sees a GPU or does not."""
    recipe, jobs = make_recipe(folder), folder / "jobs.json"
    jobs.write_text(json.dumps([[str(recipe), list(overrides), None]]))
    script = Path(__file__).with_name("train_runs.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script), str(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    values = losses_and_norms(folder / "run")
    shutil.rmtree(folder / "run")
    return values
