"""The optimizers: what each keeps per parameter, what its step holds, and what files call it.

Clipping gradients needs no record: it takes norms, and scales the gradients in place (PyTorch
nn/utils/clip_grad.py: clip_grad_norm_). A GradScaler holds two scalars (torch/amp/grad_scaler.py).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

ALL, MATRICES, OTHERS = "all weights", "matrices of the layers", "all other weights"

# The forms of a step. PyTorch on CUDA takes foreach unless it is told otherwise
# (torch/optim/optimizer.py: _default_to_fused_or_foreach).
FORMS = {
    "foreach": "each operation is on all weights at once",
    "fused": "one kernel updates weights in place",
    "loop": "weights are updated one by one",
}

# The dtype of what a step holds.
MOMENT = "of the moments"
WEIGHT = "of the weights that it updates"
FP32, BF16 = "fp32", "bf16"
WIDE_WEIGHT = "fp32, where the weights are narrower"
WIDE_MOMENT = "fp32, where the moments are narrower and the kernel needs copies"
WIDE_MASTER = "fp32, where the master weights are fp16 and the kernel needs copies"

Elements = Callable[[Sequence[int]], int]


def factors(shape: Sequence[int]) -> int:
    """The elements of a matrix's row and column factors; a vector has no factors.

    >>> factors((3, 5)), factors((5,))
    (8, 5)
    """
    return sum(shape)


def grams(shape: Sequence[int]) -> int:
    """The elements of a matrix's two Gram matrices over its shorter side.

    >>> grams((2, 8))
    8
    """
    return 2 * min(shape) ** 2


def whole(shape: Sequence[int], size: int) -> int:
    """Bytes of a moment that is as large as its weight; ``size`` is the bytes of an element."""
    return size * prod(shape)


def factored(shape: Sequence[int], size: int) -> int:
    """Bytes of a second moment that is kept as row and column factors."""
    return size * factors(shape)


def in_blocks(shape: Sequence[int], size: int) -> int:
    """Bytes of an 8-bit moment, with an fp32 scale per 256 elements; fp32 below 4096 elements.

    >>> in_blocks((64, 64), 4), in_blocks((4095,), 4)
    (4160, 16380)
    """
    elements = prod(shape)
    return 4 * elements if elements < 4096 else elements + 4 * -(-elements // 256)


class Moments(NamedTuple):
    """Moments that an optimizer keeps of some weights, in the dtype of ``Run.moments``.

    Attributes:
        name: What they are called in a table.
        weights: Of which weights: ``ALL``, ``MATRICES`` or ``OTHERS``.
        number: How many of them there are per parameter.
        source: Where they are allocated.
        of_momentum: Whether they are kept only with a momentum other than 0.
        layout: The bytes of one of them, from a weight's shape and the bytes of an element.
        summary: What they take, in words, where it is not ``number`` elements per parameter.
    """

    name: str
    weights: str
    number: int
    source: str
    of_momentum: bool = False
    layout: Callable[[Sequence[int], int], int] = whole
    summary: str = ""


class Step(NamedTuple):
    """What a step holds beside weights, gradients and moments, while it updates some weights.

    Attributes:
        source: Where it is allocated.
        weights: Which weights: ``ALL``, ``MATRICES`` or ``OTHERS``.
        all: The dtypes of copies of all these weights.
        now: Those of copies of the weight that it updates.
        before: Those of copies of the weight before it: a name keeps the old tensor until the new
            one is there.
        more: Further elements that the weight being updated needs, with their dtype.
        decay: Where a weight decay that is added to the gradients makes one more copy of them:
            ``all``, ``now`` or nothing.
        not_counted: What else it holds that is not counted, or nothing.
    """

    source: str
    weights: str = ALL
    all: Sequence[str] = ()
    now: Sequence[str] = ()
    before: Sequence[str] = ()
    more: tuple[Elements, str] | None = None
    decay: str = ""
    not_counted: str = ""


class Optimizer(NamedTuple):
    """An optimizer, as a new one is added: by one record.

    Attributes:
        summary: What it keeps, in a line.
        moments: What it keeps between steps, beside the master weights.
        aliases: What DeepSpeed, gpt-neox, nanotron, Megatron-LM and transformers call it too, in
            lower case.
        steps: What each form of its step holds, by the words of ``FORMS``. Where there are several
            parts, one runs after the other. The first form is the one where a framework's usual
            form is missing.
        lazy: When its moments are allocated: ``at once`` when the first step begins, ``one by one``
            as the first step updates the weights, or nothing, where they are there before.
    """

    summary: str
    moments: tuple[Moments, ...]
    aliases: tuple[str, ...]
    steps: Mapping[str, tuple[Step, ...]]
    lazy: str = "at once"


ADAM = "PyTorch optim/adam.py, Apex FusedAdam: exp_avg and exp_avg_sq"
ADAM_FOREACH = "PyTorch optim/adam.py: _multi_tensor_adam, exp_avg_sq_sqrt"
ADAM_LOOP = "PyTorch optim/adam.py: _single_tensor_adam, denom"
ADAM_FUSED = "Transformer Engine optimizers/fused_adam.py: FusedAdam.step, unscaled_lists"
SGD = "PyTorch optim/sgd.py: momentum_buffer"
ADAGRAD = "PyTorch optim/adagrad.py"
RMSPROP = "PyTorch optim/rmsprop.py"
ADAFACTOR = "transformers optimization.py: Adafactor"
TORCH_ADAFACTOR = "PyTorch optim/_adafactor.py"
BITSANDBYTES = "bitsandbytes optim/optimizer.py: init_state"
MUON = "Megatron-core optimizer/muon.py: matrices that are no embedding and no head"
TORCH_MUON = "PyTorch optim/_muon.py: _zeropower_via_newtonschulz"

FACTORED = "an element per row and column of Adafactor's second moment"
LOOP_OF_ADAM = Step(ADAM_LOOP, now=(MOMENT, MOMENT), before=(MOMENT,))  # sqrt and denom; old denom
# the update, its orthogonal form before and after an iteration, and two Gram matrices
LOOP_OF_MUON = Step(TORCH_MUON, MATRICES, now=(WEIGHT, BF16, BF16), more=(grams, BF16))

OPTIMIZERS = {
    "adam": Optimizer(
        "two moments per parameter (Adam, AdamW)",
        moments=(Moments("Adam's moments", ALL, 2, ADAM),),
        aliases=("adamw", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
        steps={
            "foreach": (Step(ADAM_FOREACH, all=(MOMENT,)),),
            "fused": (Step(ADAM_FUSED, all=(WIDE_MOMENT, WIDE_MOMENT, WIDE_MASTER)),),
            "loop": (LOOP_OF_ADAM,),
        },
    ),
    "adam-8bit": Optimizer(
        "two 8-bit moments per parameter, with an fp32 scale per 256 elements (bitsandbytes)",
        moments=(
            Moments(
                "Adam's 8-bit moments",
                ALL,
                2,
                BITSANDBYTES,
                layout=in_blocks,
                summary="2.03 B of Adam's 8-bit moments (8 B where a weight has fewer than 4096 "
                "elements)",
            ),
        ),
        aliases=("adam8bit", "adamw8bit", "adamw_8bit", "adamw_bnb_8bit"),
        steps={"fused": (Step(BITSANDBYTES),)},
        lazy="one by one",
    ),
    "adagrad": Optimizer(
        "a sum of squares per parameter",
        moments=(Moments("Adagrad's sum", ALL, 1, f"{ADAGRAD}: sum"),),
        aliases=(),
        steps={
            "foreach": (Step(f"{ADAGRAD}: _multi_tensor_adagrad", all=(MOMENT, WEIGHT)),),
            "fused": (Step(f"{ADAGRAD}: _fused_adagrad"),),
            "loop": (
                Step(
                    f"{ADAGRAD}: _single_tensor_adagrad, std",
                    now=(MOMENT,),
                    before=(MOMENT,),
                    decay="now",
                ),
            ),
        },
        lazy="",
    ),
    "adafactor": Optimizer(
        "row and column factors of the second moment (transformers)",
        moments=(
            Moments(
                "Adafactor's moment",
                ALL,
                1,
                f"{ADAFACTOR}.step",
                layout=factored,
                summary=FACTORED,
            ),
        ),
        aliases=(),
        steps={
            "loop": (  # fp32 copies of gradient and weight, the square and the sum; old update
                Step(
                    f"{ADAFACTOR}.step",
                    now=(WIDE_WEIGHT, WIDE_WEIGHT, FP32, FP32),
                    before=(FP32,),
                ),
            ),
        },
        lazy="one by one",
    ),
    "adafactor-torch": Optimizer(
        "row and column factors of the second moment (PyTorch)",
        moments=(
            Moments(
                "Adafactor's moment",
                ALL,
                1,
                f"{TORCH_ADAFACTOR}: row_var, col_var",
                layout=factored,
                summary=FACTORED,
            ),
        ),
        aliases=(),
        steps={
            "foreach": (Step(f"{TORCH_ADAFACTOR}: _multi_tensor_adafactor", all=(WEIGHT,)),),
            "loop": (
                Step(
                    f"{TORCH_ADAFACTOR}: _single_tensor_adafactor, var_estimate",
                    now=(WEIGHT,),
                    before=(WEIGHT,),
                    more=(factors, WEIGHT),
                ),
            ),
        },
    ),
    "lion": Optimizer(
        "a momentum per parameter",
        moments=(Moments("Lion's momentum", ALL, 1, BITSANDBYTES),),
        aliases=("lion_32bit", "fusedlion"),
        steps={"fused": (Step(BITSANDBYTES),)},
        lazy="one by one",
    ),
    "muon": Optimizer(
        "a momentum per weight of the layers' matrices, Adam's moments for all others",
        moments=(
            Moments("Muon's momentum", MATRICES, 1, MUON),
            Moments("Adam's moments", OTHERS, 2, ADAM),
        ),
        aliases=("dist_muon",),
        steps={
            "foreach": (LOOP_OF_MUON, Step(ADAM_FOREACH, OTHERS, all=(MOMENT,))),
            "fused": (
                Step(
                    MUON,
                    not_counted="temporary buffers of Muon's Newton-Schulz steps, a few copies of "
                    "one matrix",
                ),
            ),
            "loop": (LOOP_OF_MUON, LOOP_OF_ADAM._replace(weights=OTHERS)),
        },
    ),
    "rmsprop": Optimizer(
        "a mean of squares per parameter, and a momentum where one is set",
        moments=(
            Moments("RMSprop's mean of squares", ALL, 1, f"{RMSPROP}: square_avg"),
            Moments("momentum", ALL, 1, f"{RMSPROP}: momentum_buffer", of_momentum=True),
        ),
        aliases=(),
        steps={
            "foreach": (
                Step(f"{RMSPROP}: _multi_tensor_rmsprop, avg", all=(MOMENT,), decay="all"),
            ),
            "loop": (
                Step(
                    f"{RMSPROP}: _single_tensor_rmsprop, avg",
                    now=(MOMENT,),
                    before=(MOMENT,),
                    decay="now",
                ),
            ),
        },
    ),
    "sgd": Optimizer(
        "a momentum per parameter, where one is set",
        moments=(Moments("momentum", ALL, 1, SGD, of_momentum=True),),
        aliases=(),
        steps={
            "foreach": (Step("PyTorch optim/sgd.py: _multi_tensor_sgd", decay="all"),),
            "fused": (Step("PyTorch optim/sgd.py: _fused_sgd"),),
            "loop": (Step("PyTorch optim/sgd.py: _single_tensor_sgd", decay="now"),),
        },
    ),
}

# The names that files use, each with the key of its record.
NAMES = {name: key for key, each in OPTIMIZERS.items() for name in (key, *each.aliases)}
