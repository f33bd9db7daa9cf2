"""The DeepSpeed engine around the drafter: one optimizer step is micro-batches forward and backward, a check, an update.

The gradient of a step is exactly that of the sum of its micro-batch losses over all ranks: no division by the number of
ranks or of micro-batches stays in it. The target's embedding and head are no part of the engine: they are in no optimizer,
no reduction and no checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
from collections.abc import Iterator
from typing import Any, cast

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import Ranks
from configs.schema import TrainSection
from drafter.model import BlockLayout, Drafter
from train.optimizers import (
    make_optimizer,
    moment_names,
    names_by_group,
    set_adam_step,
    set_learning_rate,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_BUCKET_ELEMENTS = 500_000_000
SHARED_MEMORY_OP = "deepspeed_shm_comm"


class Engine:
    """A drafter that trains. Collective: every rank makes the same calls in the same order."""

    def __init__(self, drafter: Drafter, train: TrainSection, ranks: Ranks, num_micro_batches: int):
        """`num_micro_batches`: what each rank runs in one optimizer step."""
        join_process_group(ranks)
        self.ranks = ranks
        self.zero_stage = train.zero_stage
        self.dtype = DTYPES[train.dtype]
        self.shapes = {
            name: tuple(p.shape) for name, p in drafter.named_parameters() if p.requires_grad
        }
        self.moments = {name: moment_names(shape, train) for name, shape in self.shapes.items()}
        drafter.activation_checkpointing = train.activation_checkpointing
        self._not_finite = torch.zeros((), device=ranks.device)
        for _, parameter in trained(drafter):
            parameter.register_hook(self._watch)
        self.optimizer = make_optimizer(drafter, train)
        self.names_by_group = names_by_group(drafter, self.optimizer)
        if train.offload is not None:
            use_all_cores(ranks)
        # BF16_Optimizer prints memory lines whatever the log level
        with contextlib.redirect_stdout(io.StringIO()), self._eager(), cheap_collections():
            self.deepspeed = deepspeed.initialize(
                model=drafter,
                optimizer=self.optimizer,
                config=deepspeed_config(drafter, train, num_micro_batches),
                dist_init_required=False,
            )[0]
        # ZeRO 0 in bf16 has taken an optimizer step on zero gradients by now: it must not count in Adam's bias correction
        set_adam_step(self.optimizer, 0)

    @property
    def drafter(self) -> Drafter:
        return cast(Drafter, self.deepspeed.module)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name, without frozen ones."""
        return trained(self.drafter)

    def forward(self, features: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        """(B, N, K, H) hidden states; arguments as Drafter.forward."""
        return self.deepspeed(features, embeddings, layout)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; `last`: of this optimizer step, gradients are reduced over ranks."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; ours is a sum with its own normaliser
        self.deepspeed.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def take_not_finite(self) -> Tensor:
        """() 1.0 if a gradient of this rank has not been finite since the last call; then forgets it."""
        flag = self._not_finite.clone()
        self._not_finite.zero_()
        return flag

    def step(self, learning_rate: float) -> float:
        """Clip, update, zero the gradients. Returns the gradient's norm before clipping."""
        set_learning_rate(self.optimizer, learning_rate)
        norm = self._plain_grad_norm() if self.zero_stage == 0 else None
        with self._eager():
            self.deepspeed.step()
        if norm is None:
            norm = self.deepspeed.get_global_grad_norm()
        assert norm is not None
        return float(norm)

    def _eager(self) -> contextlib.AbstractContextManager[object]:
        """On a CPU Muon's kernels are not compiled: that takes minutes and a compiler, and saves nothing there."""
        if self.ranks.device.type == "cpu":
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def _plain_grad_norm(self) -> Tensor:
        gradients = [p.grad.float() for p in self.drafter.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def _watch(self, gradient: Tensor) -> None:
        # a sum is not finite if one of its terms is not: one pass, no sync with the device, the same for every ZeRO stage
        total = gradient.detach().sum(dtype=torch.float32)
        self._not_finite.copy_(torch.maximum(self._not_finite, (~total.isfinite()).float()))


@contextlib.contextmanager
def cheap_collections() -> Iterator[None]:
    """For BF16_Optimizer, which collects garbage ten times while it is built: a second each with compiled kernels loaded."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def trained(drafter: Drafter) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in drafter.named_parameters() if p.requires_grad)


def use_all_cores(ranks: Ranks) -> None:
    """For an optimizer on the CPU beside a GPU; torchrun leaves a rank one thread. On a CPU run.cpu_threads decides."""
    if ranks.device.type == "cuda":
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))


def deepspeed_config(
    drafter: Drafter, train: TrainSection, num_micro_batches: int
) -> dict[str, Any]:
    """DeepSpeed's settings for a recipe.

    Gradients are accumulated in float32, but for ZeRO 0 in bf16, where DeepSpeed knows bf16 accumulation only.
    """
    # the default buckets of 2 GB would be allocated even for a drafter of a few megabytes
    bucket = min(MAX_BUCKET_ELEMENTS, sum(p.numel() for p in drafter.parameters()))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch_samples,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    if train.offload is not None:
        # torch's fused AdamW runs on a CPU too: the same optimizer, to be offloaded at any time, and nothing to compile
        settings["zero_force_ds_cpu_optimizer"] = False
        on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        settings["zero_optimization"]["offload_optimizer"] = on_cpu
        if train.offload == "all":
            settings["zero_optimization"]["offload_param"] = on_cpu
    if train.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        if train.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def join_process_group(ranks: Ranks) -> None:
    """DeepSpeed wants a process group even for one process: a store in memory needs no launcher, address or port."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # required even without a launcher
    if not dist.is_initialized():
        assert ranks.world_size == 1
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # public in the docs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if ranks.device.type == "cpu":
        # a collective for inference only, that would be compiled at first use (seconds, and g++ must be there)
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    deepspeed.comm.init_distributed(dist.get_backend(), verbose=False)
