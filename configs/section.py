"""What all sections of a recipe have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TreeBudget = Annotated[int, Field(ge=1, le=8192)]
"""Nodes of a draft tree without its root; the largest is that of ddtree/order.py."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
