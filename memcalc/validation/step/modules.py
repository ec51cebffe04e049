"""Which module runs, in forward and in backward.

In backward it is the module whose forward pass made the node that runs. A node gets the name of its
module in its ``metadata`` when a module is entered or left. So it also holds for what checkpointing
recomputes in other threads.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

KEY = "memcalc.module"
ROOT = "."


class Modules:
    """Names of the modules that run.

    Attributes:
        names: The name of every known module; an unknown one has the name of what calls it.
    """

    def __init__(self) -> None:
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._path: list[str] = []

    def know(self, model: nn.Module) -> None:
        """Learn the names of a model's modules; those of further models begin with its class."""
        prefix = f"{type(model).__name__}." if self.names and model not in self.names else ""
        for name, module in model.named_modules():
            self.names.setdefault(module, (prefix + name).rstrip(".") or ROOT)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow forward passes."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            leave = register_module_forward_hook(self._leave, always_call=True)
            stack.callback(leave.remove)
            yield

    @property
    def depth(self) -> int:
        """How many modules run within one another."""
        return len(self._path)

    @property
    def current(self) -> str:
        """The module that runs; empty outside of all modules."""
        if self._path:
            return self._path[-1]
        node: Any = torch._C._current_autograd_node()
        return "" if node is None else node.metadata.get(KEY, "")

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._path and module not in self.names:
            self.know(module)
        outer = self._path[-1] if self._path else ""
        _name(inputs, outer)
        self._path.append(self.names.get(module, outer))

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._path:
            _name(outputs, self._path.pop())


def _name(tensors: Any, module: str) -> None:
    """Name the nodes behind tensors, as far as they have no name yet."""
    leaves = tree_leaves(tensors)
    nodes: list[Any] = [
        each.grad_fn for each in leaves if isinstance(each, Tensor) and each.grad_fn
    ]
    while nodes:
        node = nodes.pop()
        if node is not None and KEY not in node.metadata:
            node.metadata[KEY] = module
            nodes += [each for each, _ in node.next_functions]
