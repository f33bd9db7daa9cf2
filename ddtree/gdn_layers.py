"""Gated-DeltaNet layers under a tree: their states, and a forward that reads them for every node and writes nothing.

The forward stands in for the module's own only while a tree is verified; it uses the module's sub-modules and parameters.
Prompts go through the module's own forward, with whatever kernels transformers has for it, into transformers' own cache
layer, whose last state is then taken over. The states of all layers of a device lie in one tensor, so that a commit is a
handful of kernels whatever the number of layers.

L layers of one device, R rows, T nodes, H hidden, C convolution channels, W convolution width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ddtree.gdn import (
    TreeInputs,
    TreeWrites,
    commit_states,
    core_dtype,
    on_path,
    tree_convolution,
    tree_delta_rule,
)
from ddtree.gdn_modules import known_module, project
from ddtree.nodes import NodeBatch, PathBatch


class DeltaNetLayers:
    """The Gated-DeltaNet layers of one device, in the model's order, and what each remembers of every row."""

    def __init__(self, modules: Sequence[nn.Module], num_rows: int):
        """Raises ValueError for a module whose insides are not known or whose weights are not on a device."""
        self.modules = [known_module(module) for module in modules]
        first = self.modules[0]
        self.num_columns = first.conv_kernel_size - 1
        weight = first.conv1d.weight
        heads = (first.num_v_heads, first.head_k_dim, first.head_v_dim)
        self.states = torch.zeros(
            len(modules), num_rows, *heads, dtype=core_dtype(weight.dtype), device=weight.device
        )  # (L, R, Hv, dk, dv)
        self.columns = weight.new_zeros(len(modules), num_rows, self.num_columns, first.conv_dim)
        # of the pass verified last, a layer each; never read before they are written
        self._writes: list[TreeWrites] = []
        self._inputs: list[Tensor] = []  # (R, T, C) before the convolution

    @contextlib.contextmanager
    def under_tree(self, nodes: NodeBatch) -> Iterator[None]:
        """While open, the modules' forwards are those of tree nodes."""
        nodes = nodes.on(self.states.device)
        columns = nodes.convolution_columns(self.num_columns + 1)
        self._writes, self._inputs = [], []
        own = [module.__dict__.get("forward") for module in self.modules]  # of accelerate's hooks
        try:
            for index, module in enumerate(self.modules):
                module.forward = functools.partial(self._forward, index, nodes, columns)
            yield
        finally:
            for module, forward in zip(self.modules, own, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward

    def layer(self, index: int) -> DeltaNetLayer:
        return DeltaNetLayer(self, index)

    def commit(self, paths: PathBatch) -> None:
        """Advance every layer's state and convolution columns down one path a row."""
        assert len(self._writes) == len(self.modules), "commit follows a verify pass"
        paths = paths.on(self.states.device)
        commit_states(self.states, self._writes, paths)
        num_cached = self.columns.shape[2]
        from_cache = paths.columns.clamp_max(num_cached - 1)[None, :, :, None]
        self.columns = torch.where(
            paths.columns[:, :, None] < num_cached,
            torch.take_along_dim(self.columns, from_cache, dim=2),
            on_path(self._inputs, (paths.columns - num_cached).clamp_min(0)),
        )
        self._writes, self._inputs = [], []

    def take(self, index: int, row: int, prompt: LinearAttentionLayer) -> None:
        """Start a row's state from what transformers' own cache layer holds after the prompt."""
        columns, state = prompt.conv_states[0], prompt.recurrent_states[0]
        channels = self.columns.shape[-1]
        if (
            columns is None
            or state is None
            or columns.shape[:2] != (1, channels)
            or columns.shape[2] < self.num_columns
            or state.shape[1:] != self.states.shape[2:]
        ):
            raise ValueError(
                f"{type(self.modules[index]).__name__} leaves a cache of another layout than known here; install the "
                "transformers version of the constraints file"
            )
        self.states[index, row] = state[0]
        self.columns[index, row] = columns[0, :, columns.shape[2] - self.num_columns :].mT

    def _forward(
        self,
        index: int,
        nodes: NodeBatch,
        columns: Tensor,
        hidden_states: Tensor,
        **_: object,
    ) -> Tensor:
        """(R, T, H) of the nodes' normed hidden states -> (R, T, H): the module's own arithmetic, down each path."""
        module = self.modules[index]
        mixed, gate, beta, decay = project(module, hidden_states)
        convolved = tree_convolution(
            self.columns[index], mixed, module.conv1d.weight.squeeze(1), module.conv1d.bias, columns
        )
        queries, keys, values = ACT2FN[module.activation](convolved).split(
            [module.key_dim, module.key_dim, module.value_dim], dim=-1
        )
        core = self.states.dtype
        log_decay = -module.A_log.to(core).exp() * nn.functional.softplus(
            decay.to(core) + module.dt_bias
        )
        inputs = TreeInputs(
            queries.unflatten(-1, (-1, module.head_k_dim)),
            keys.unflatten(-1, (-1, module.head_k_dim)),
            values.unflatten(-1, (-1, module.head_v_dim)),
            log_decay,
            beta.sigmoid(),
        )
        outputs, writes = tree_delta_rule(inputs, self.states[index], nodes)
        self._writes.append(writes)
        self._inputs.append(mixed)
        normed = module.norm(
            outputs.reshape(-1, module.head_v_dim), gate.reshape(-1, module.head_v_dim)
        )
        return module.out_proj(normed.view(*hidden_states.shape[:2], -1))


class DeltaNetLayer:
    """One layer's part in the verifier: nothing to mask, and a cache layer for prompts."""

    sees_all_committed = False

    def __init__(self, layers: DeltaNetLayers, index: int):
        self._layers, self._index = layers, index

    def visible(self, nodes: NodeBatch) -> None:
        """Ancestry is inside the layer's own forward."""

    def visible_in_prompt(self, start: int, count: int, device: torch.device) -> None:
        """The recurrence is causal by itself."""

    def row_view(self, row: int) -> LinearAttentionLayer:
        return LinearAttentionLayer()

    def end_prompt(self, row: int, view: CacheLayerMixin | LinearAttentionLayer) -> None:
        assert isinstance(view, LinearAttentionLayer)
        self._layers.take(self._index, row, view)

    def commit(self, paths: PathBatch) -> None:
        """Done for all layers of a device at once."""

    def committed(self, row: int) -> list[Tensor]:
        """Views of a row's state (Hv, dk, dv) and columns (W - 1, C)."""
        return [self._layers.states[self._index, row], self._layers.columns[self._index, row]]
