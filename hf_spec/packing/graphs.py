"""Products with packed weights as operators of torch, so that torch.compile can trace them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

compiling: ContextVar[bool] = ContextVar("compiling", default=False)  # whether graphs of packed weights may be made


@contextlib.contextmanager
def packed_in_graphs() -> Iterator[None]:
    """Let torch.compile read packed weights in this context."""
    token = compiling.set(True)
    try:
        yield
    finally:
        compiling.reset(token)


def product(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply ``states`` (..., inputs) by the transpose of ``packed`` (outputs, inputs), and add ``bias``."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(states, packed, bias, "none", [], "")
    return found


def _shape(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return a tensor like that of ``product``, without values."""
    _teach_inductor()
    return states.new_empty(*states.shape[:-1], packed.shape[0])


def _operator() -> Any:
    """Return ``product`` as an operator of torch.

    A draft that was published with its code brings another copy of this file. If that made the operator again, torch
    would take it away from the copy that made it first, whose calls then fail.
    """
    if not hasattr(torch.ops.hf_spec, "packed_product"):
        torch.library.custom_op("hf_spec::packed_product", product, mutates_args=()).register_fake(_shape)
    return torch.ops.hf_spec.packed_product.default


packed_product = _operator()


def quick_operator(name: str, arguments: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    """Return ``function`` as an operator of torch that takes less time to call than one of ``custom_op``.

    Published drafts bring copies of this file, which share the operator: other ``arguments`` need another ``name``.
    """
    if not hasattr(torch.ops.hf_spec, name):
        LIBRARY.define(f"{name}({arguments}) -> Tensor")
        LIBRARY.impl(name, function, "CPU")
        torch.library.register_fake(f"hf_spec::{name}", shape, lib=LIBRARY)
    return getattr(torch.ops.hf_spec, name).default


LIBRARY = torch.library.Library("hf_spec", "FRAGMENT")


@functools.cache
def _teach_inductor() -> None:
    """Let inductor call oneDNN's product itself, without Python in between where it writes C++.

    Its own lowering of that product takes packed weights that are constants of a graph. Here they are inputs: a graph
    then holds no weights, and other processes find it on disk. To torch's compiler a packed tensor looks like a plain
    one with strides that mean nothing. So it is passed on as it is, and never copied into another layout.
    """
    from torch._inductor import ir, mkldnn_ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.hf_spec.packed_product.default, type_promotion_kind=None)
    def lowered(states: Any, packed: Any, bias: Any) -> Any:
        kernel = ir.ExternKernel
        inputs = [kernel.require_contiguous(kernel.realize_input(states)), kernel.realize_input(packed)]
        constants: list[Any] = ["none", [-1], ""]  # no operation after the product
        if bias is None:
            constants = [None, *constants]
        else:
            inputs.append(kernel.require_contiguous(kernel.realize_input(bias)))
        size = [*states.get_size()[:-1], packed.get_size()[0]]
        layout = ir.FixedLayout(device=states.get_device(), dtype=states.get_dtype(), size=size)
        product = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        return ir.TensorBox.create(mkldnn_ir._create_output_node(product))
