"""Run a module on tensors without values: what it saves and prints, or where it stops.

Sizes are numbers, or PyTorch's symbols. Stand-ins replace the module's own tensors meanwhile.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.errors import MemcalcError, UsageError
from memcalc.validation.measuring.kernels import CudaKernels
from memcalc.validation.measuring.measure import Stored, measure, module_path

MOST_LINES, LONGEST = 3, 120  # of what a module prints or warns of

# From the size of each letter to a module, its arguments and its keyword arguments.
Build = Callable[[Mapping[str, Any]], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]


class StoppedError(Exception):
    """A run stopped; the message says where and why."""


class Subject(NamedTuple):
    """What is derived; the arguments of ``derive_from``."""

    build: Build
    sizes: Mapping[str, int]
    device: str
    stands: str | None

    def at(self, sizes: Mapping[str, int]) -> "ValuelessRun":
        """A run at numbers."""
        with quiet(), ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(without_values())
            return self.on(sizes)

    def on(self, sizes: Mapping[str, Any]) -> "ValuelessRun":
        """A run at numbers or symbols.

        Raises:
            StoppedError: With the module's path and the operation.
        """
        return _run(self.build, sizes, self.device, self.stands)


class ValuelessRun(NamedTuple):
    """What a run saves for backward, and the lines that it printed or warned of."""

    stored: tuple[Stored, ...]
    told: tuple[str, ...]


def without_values(symbols: ShapeEnv | None = None) -> FakeTensorMode:
    """PyTorch's mode in which tensors have no values, and sizes may be symbols."""
    mode = FakeTensorMode(shape_env=symbols, allow_non_fake_inputs=True)
    # nearly every operation misses PyTorch's cache, and a miss runs the operation twice
    mode.cache_enabled = False
    return mode


class _Place(TorchDispatchMode):
    """Where a run is or stopped: the last module that began, and the last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.last = ".", ""
        self.current: Callable[[], str] = lambda: self.module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation, and run it."""
        if str(func).startswith("aten."):
            self.module, self.last = self.current(), operation(str(func))
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        after = f", at or after {self.last}" if self.last else ""
        return f"in module {self.module}{after}"

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Follow a module's submodules."""

        def enter(entered: nn.Module, inputs: Any) -> None:
            self.module = self.current()

        with module_path(module) as self.current:
            hook = register_module_forward_pre_hook(enter)
            try:
                yield
            finally:
                hook.remove()


class _Printed(io.StringIO):
    """The first lines that are printed, with the module that prints them."""

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place, self.rest = place, ""
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        """Keep the first lines."""
        before, self.rest = self.rest + text, ""
        *lines, self.rest = before.split("\n")
        told = [f"printed {self.place}: {_line(line)}" for line in lines if line.strip()]
        self.lines += told[: MOST_LINES - len(self.lines)]
        return len(text)


def _run(build: Build, sizes: Mapping[str, Any], device: str, stands: str | None) -> ValuelessRun:
    """Run a module forward on tensors without values, and measure what it saves.

    Raises:
        StoppedError: With the module's path and the operation.
    """
    place = _Place()
    try:
        with ExitStack() as stack:
            printed = stack.enter_context(redirect_stdout(_Printed(place)))
            complaints = stack.enter_context(warned())
            module, arguments, keywords = build(sizes)
            if stands:
                stack.enter_context(_stood_in(module, stands))
            stack.enter_context(place.within(module))
            kernels = stack.enter_context(CudaKernels()) if device == "cuda" else None
            stack.enter_context(place)
            measured = measure(module, *arguments, keywords=keywords)
            otherwise = sorted(kernels.otherwise) if kernels else ()
            return ValuelessRun(measured.stored, (*printed.lines, *complaints, *otherwise))
    except (MemcalcError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a user's module raises
        raise StoppedError(f"it stopped {place}: {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """An error's type and its message, in one short line.

    >>> error_text(ValueError("no such size"))
    'ValueError: no such size'
    """
    try:
        text = _line(str(error))
    except Exception:  # str() of a user's error may itself fail
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(text: str) -> str:
    """The beginning of a text, as one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of the user's code and of PyTorch, as lines, each once."""
    lines: list[str] = []

    def keep(message: Any, *_: Any, **__: Any) -> None:
        line = f"warned: {_line(str(message))}"
        if line not in lines and len(lines) < MOST_LINES:
            lines.append(line)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = keep
        yield lines


@contextmanager
def _stood_in(module: nn.Module, device: str) -> Iterator[None]:
    """Replace a module's tensors by ones without values, and restore its own at the end."""
    stand_ins: dict[int, Any] = {}
    theirs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def stand_in(tensor: Tensor) -> Any:
        if id(tensor) not in stand_ins:
            made = like(tensor, device, {}, {})
            stand_ins[id(tensor)] = (
                nn.Parameter(made, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else made
            )
        return stand_ins[id(tensor)]

    for each in module.modules():
        for own in (vars(each), each._parameters, each._buffers):
            theirs.append((own, dict(own)))
            own.update({k: stand_in(t) for k, t in own.items() if isinstance(t, Tensor)})
    try:
        yield
    finally:
        for own, before in theirs:
            own.clear()
            own.update(before)


def like(tensor: Tensor, device: str, sizes: Mapping[str, Any], axes: Mapping[int, str]) -> Tensor:
    """A tensor without values and with another's memory layout; some axes have other sizes."""
    if tensor.layout != torch.strided:
        raise UsageError(f"derive needs dense (strided) tensors, not {tensor.layout}")
    shape = [sizes[axes[i]] if i in axes else size for i, size in enumerate(tensor.shape)]
    order = sorted(range(tensor.dim()), key=lambda i: tensor.stride()[i], reverse=True)
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid = torch.empty([shape[i] for i in order], dtype=tensor.dtype, device=device)
    made = laid.permute([order.index(i) for i in range(tensor.dim())])
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence PyTorch's log: memcalc itself reports what stops a run."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def operation(name: str) -> str:
    """An operation's name, without its namespace and overload.

    >>> operation("aten.addmm.default")
    'addmm'
    """
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name
