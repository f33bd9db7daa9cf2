"""What an optimizer step does to weights, under every ZeRO stage: Muon, decay, offload; and that it can be continued."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import (
    ONE_RANK,
    TAPS,
    killed_after_saving,
    losses_and_norms,
    make_config,
    read_curve,
)

from configs.load import load_config
from configs.schema import Config
from drafter.masks import BlockLayout
from drafter.model import Drafter
from train.engine import Engine, join_process_group
from train.full_state import read_full_state
from train.initialise import initial_drafter
from train.loop import train_drafter

RATE = 1e-2
LENGTH, BLOCKS = 160, 20
STAGES = [(0, "float32"), (0, "bfloat16"), (1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")]  # fmt: skip


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


def inputs(config: Config, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, BlockLayout]:
    """Enough tokens that gradients have full rank: Muon makes a direction of noise as large as any other."""
    generator = torch.Generator().manual_seed(0)
    hidden = config.target.hidden_size
    features = torch.randn(1, LENGTH, len(TAPS), hidden, generator=generator)
    embeddings = torch.randn(1, BLOCKS, config.drafter.block_size, hidden, generator=generator)
    place, anchors = torch.arange(LENGTH)[None], torch.arange(1, BLOCKS + 1)[None] * 7
    layout = BlockLayout(place, place * 0, anchors, anchors * 0)
    return features.to(dtype), embeddings.to(dtype), layout


def aim(config: Config) -> torch.Tensor:
    shape = (1, BLOCKS, config.drafter.block_size, config.target.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def stepped(config: Config, num_steps: int) -> tuple[dict[str, torch.Tensor], Engine]:
    """Float32 masters after so many steps towards `aim`."""
    engine = Engine(initial_drafter(config), config.train, ONE_RANK, 1)
    for _ in range(num_steps):
        hidden = engine.forward(*inputs(config, engine.dtype))
        engine.backward((hidden.float() - aim(config)).square().sum(), last=True)
        engine.step(RATE)
    return {p.name: p.weight.clone() for p in read_full_state(engine)}, engine


def gradients(config: Config, drafter: Drafter) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    hidden = drafter(*inputs(config, torch.float32))
    (hidden - aim(config)).square().sum().backward()
    return {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps in float64, as Jordan et al. publish them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_muon_moves_matrices_by_its_orthogonalised_momentum_at_adamws_size(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    """Two steps by hand: Nesterov momentum, five Newton-Schulz steps, 0.2 sqrt(max(rows, columns)); norms by AdamW."""
    settings = [f"train.zero_stage={stage}", f"train.dtype={dtype}", "train.max_grad_norm=1e9"]
    config = make_config(tmp_path, "train.optimizer=muon", "train.weight_decay=0.3", *settings)
    plain = initial_drafter(config)
    momenta = {n: torch.zeros_like(p) for n, p in plain.named_parameters() if p.dim() == 2}
    norms = [p for p in plain.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(norms, RATE, (0.9, 0.95), weight_decay=0.0)
    for _ in range(2):
        found = gradients(config, plain)
        adam.step()
        for name, parameter in plain.named_parameters():
            if name in momenta:
                momenta[name].lerp_(found[name], 0.05)
                update = orthogonalised(found[name].lerp(momenta[name], 0.95))
                parameter.data *= 1 - RATE * 0.3
                parameter.data -= RATE * 0.2 * max(parameter.shape) ** 0.5 * update
    start = initial_drafter(config).state_dict()
    weights, _ = stepped(config, 2)
    for name, wanted in plain.named_parameters():
        if name not in momenta and dtype == "bfloat16":
            continue  # AdamW's first steps are signs: one gradient that rounds to another is a whole step
        moved, by_hand = weights[name] - start[name], wanted.detach() - start[name]
        # Newton-Schulz in half precision, gradients in bfloat16: a few per cent
        tolerance = 0.03 if dtype == "float32" else 0.12
        assert (moved - by_hand).norm() < tolerance * by_hand.norm(), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_decay_shrinks_matrices_by_rate_times_decay_and_leaves_norms(
    tmp_path: Path, stage: int, dtype: str, optimizer: str
) -> None:
    settings = [f"train.zero_stage={stage}", f"train.dtype={dtype}"]
    if optimizer == "muon" and (stage, dtype) not in ((0, "float32"), (0, "bfloat16"), (1, "bfloat16")):  # fmt: skip
        with pytest.raises(ValueError, match="use zero_stage 0, or 1 in bfloat16"):
            make_config(tmp_path, f"train.optimizer={optimizer}", *settings)
        return
    settings.append(f"train.optimizer={optimizer}")
    config = make_config(tmp_path, *settings, "train.weight_decay=0.5")
    start = initial_drafter(config).state_dict()
    decayed, _ = stepped(config, 1)
    kept, _ = stepped(make_config(tmp_path / "kept", *settings), 1)
    for name, value in kept.items():
        first = start[name].to(torch.bfloat16).float() if dtype == "bfloat16" else start[name]
        wanted = value - RATE * 0.5 * first if value.dim() == 2 else value
        torch.testing.assert_close(decayed[name], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_clipping_bounds_the_gradient_of_the_whole_step(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    """AdamW's first moment is a tenth of the gradient that reached it."""
    settings = [f"train.zero_stage={stage}", f"train.dtype={dtype}"]
    norms = {}
    for limit in (1e9, 0.25):
        config = make_config(tmp_path, *settings, f"train.max_grad_norm={limit}")
        _, engine = stepped(config, 1)
        parts = [p.moments["exp_avg"].norm() for p in read_full_state(engine)]
        norms[limit] = float(torch.stack(parts).norm()) * 10
    plain = initial_drafter(make_config(tmp_path))
    wanted = torch.stack([g.norm() for g in gradients(config, plain).values()]).norm()
    tolerance = 1e-4 if dtype == "float32" else 0.02
    assert norms[1e9] == pytest.approx(float(wanted), rel=tolerance)
    assert norms[0.25] == pytest.approx(0.25, rel=1e-3)


SETTINGS = [
    "train.optimizer=muon train.dtype=bfloat16 train.weight_decay=0.1",
    "train.weight_decay=0.1 train.zero_stage=2 train.offload=optimizer",
]
MORE_SETTINGS = [
    "train.optimizer=muon train.zero_stage=0",
    "train.weight_decay=0.1 train.zero_stage=2",
    "train.zero_stage=1 train.dtype=bfloat16 train.offload=optimizer",
    "train.zero_stage=3 train.offload=optimizer",
    "train.zero_stage=3 train.dtype=bfloat16 train.offload=all",
]


@pytest.mark.parametrize(
    "settings", [*SETTINGS, *(pytest.param(more, marks=pytest.mark.slow) for more in MORE_SETTINGS)]
)
def test_a_killed_run_continues_bit_for_bit_with_every_optimizer(
    tmp_path: Path, settings: str
) -> None:
    whole = make_config(tmp_path / "whole", *settings.split())
    train_drafter(whole, ONE_RANK)
    halves = make_config(tmp_path / "halves", *settings.split())
    with killed_after_saving(4):
        train_drafter(halves, ONE_RANK)
    train_drafter(halves, ONE_RANK)
    assert read_curve(halves.run.folder) == read_curve(whole.run.folder)


def test_offload_may_be_switched_in_the_middle_and_changes_nothing(tmp_path: Path) -> None:
    whole = make_config(tmp_path / "whole", "train.zero_stage=2")
    train_drafter(whole, ONE_RANK)
    config = make_config(tmp_path / "moved", "train.zero_stage=2", "train.offload=optimizer")
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    on_gpu = load_config(tmp_path / "moved" / "tiny.yaml", ["train.zero_stage=2"])
    train_drafter(on_gpu, ONE_RANK)
    # the norm is summed in another order: its last bit may differ
    found, wanted = losses_and_norms(config.run.folder), losses_and_norms(whole.run.folder)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_run_of_another_optimizer_is_another_run(tmp_path: Path) -> None:
    with killed_after_saving(4):
        train_drafter(make_config(tmp_path, "train.zero_stage=0"), ONE_RANK)
    other = ["train.zero_stage=0", "train.optimizer=muon"]
    with pytest.raises(ValueError, match=r"train\.optimizer='adamw', this run has 'muon'"):
        train_drafter(load_config(tmp_path / "tiny.yaml", other), ONE_RANK)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["train.optimizer=muon", "train.zero_stage=2"], "use zero_stage 0, or 1 in bfloat16"),
        (["train.optimizer=muon", "train.zero_stage=1"], "use zero_stage 0, or 1 in bfloat16"),
        (["train.offload=optimizer", "train.zero_stage=0"], "raise zero_stage to 1"),
        (["train.offload=all", "train.zero_stage=2"], "raise zero_stage to 3"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_with_the_remedy(
    tmp_path: Path, overrides: list[str], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        make_config(tmp_path, *overrides)
