"""LayerNorm and RMSNorm, in one kernel or as a chain of operations."""

from memcalc.graph.graph import Graph, Save, Scratch, Tensor, Weight, plain
from memcalc.graph.ops.elementwise import cast
from memcalc.graph.ops.sources import (
    HF_COHERE,
    HF_T5,
    KORTHIKANTI,
    TORCH_CHAIN,
    TORCH_NORM,
    TORCH_RMS_NORM,
)

LAYER_NORM = plain("layer_norm")
LAYER_NORM_CHAIN = plain("layer_norm_chain")
RMS_NORM = plain("rms_norm")
RMS_NORM_CHAIN = plain("rms_norm_chain")


def layer_norm(
    g: Graph, name: str, x: Tensor, statistic_bytes: int = 4, bias: bool = True
) -> Tensor:
    """LayerNorm. Saves its input, and each row's mean and reciprocal standard deviation in fp32."""
    mean = Tensor(f"{name}_mean", x.axes[:-1], statistic_bytes)
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], statistic_bytes)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = [Weight(f"{name}.weight", x.axes[-1:])]
    if bias:
        weights.append(Weight(f"{name}.bias", x.axes[-1:]))
    g.record(
        name,
        LAYER_NORM,
        (x,),
        (out,),
        saves=(
            Save(x, "input: backward normalizes it again", KORTHIKANTI),
            Save(mean, "mean of each row, fp32", TORCH_NORM, small=True),
            Save(rstd, "reciprocal standard deviation of each row, fp32", TORCH_NORM, small=True),
        ),
        weights=weights,
    )
    return out


def layer_norm_chain(g: Graph, name: str, x: Tensor, bias: bool = True) -> Tensor:
    """LayerNorm operation by operation, in fp32, as Hugging Face's Command-R does it.

    Saves the centered input twice (for the variance, and as a factor), each row's reciprocal
    standard deviation, the normalized input, and an fp32 copy of the weight that scales it.
    """
    deviation, centered, normal = (
        Tensor(f"{name}_{part}_fp32", x.axes, 4) for part in ("deviation", "centered", "normalized")
    )
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    weights = [Weight(f"{name}.weight", x.axes[-1:])]
    if bias:
        weights.append(Weight(f"{name}.bias", x.axes[-1:]))
    reason = "factor, fp32: needed for the other factor's gradient"
    saves = [
        Save(deviation, "centered input, fp32: needed for its square's gradient", HF_COHERE),
        Save(centered, reason, HF_COHERE),
        Save(rstd, "reciprocal standard deviation of each row, fp32", HF_COHERE, small=True),
        Save(normal, reason, HF_COHERE),
    ]
    if x.dtype_bytes != 4:
        scale_ = Tensor(f"{name}_scale", x.axes[-1:], 4)
        saves.append(Save(scale_, "fp32 copy of the weight: a factor", HF_COHERE, small=True))
    g.record(name, LAYER_NORM_CHAIN, (x,), (out,), saves=saves, weights=weights)
    return out


def rms_norm(g: Graph, name: str, x: Tensor) -> Tensor:
    """RMSNorm in one kernel. Saves its input, and the fp32 reciprocal norm of each row."""
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    g.record(
        name,
        RMS_NORM,
        (x,),
        (out,),
        saves=(
            Save(x, "input: backward normalizes it again", TORCH_RMS_NORM),
            Save(rstd, "reciprocal norm of each row, fp32", TORCH_RMS_NORM, small=True),
        ),
        weights=(Weight(f"{name}.weight", x.axes[-1:]),),
    )
    return out


def rms_norm_chain(g: Graph, name: str, x: Tensor, scaled: str = "cast") -> Tensor:
    """RMSNorm operation by operation, in fp32, as Hugging Face's Llama does it.

    Saves the input in fp32, the reciprocal norm, and the normalized input that the weight scales:
    either cast to the dtype of the activations, or in fp32. Gemma scales by 1 + weight, which is
    saved too. ``scaled`` is a word of ``memcalc.config.model.NORM_SCALES``.
    """
    wide = cast(g, f"{name}_fp32", x, 4)
    rstd = Tensor(f"{name}_rstd", x.axes[:-1], 4)
    normal = Tensor(f"{name}_normalized_fp32", x.axes, 4)
    g.record(
        f"{name}_normalize",
        RMS_NORM_CHAIN,
        (wide,),
        (normal,),
        saves=(
            Save(
                wide, "input in fp32: needed for the gradients of square and product", TORCH_CHAIN
            ),
            Save(rstd, "reciprocal norm of each row, fp32", TORCH_CHAIN, small=True),
        ),
        # backward of the mean of squares: a quotient, a power, two products; no row norms by then
        scratch=Scratch(forward=rstd.bytes, backward=3 * wide.bytes - rstd.bytes),
    )
    narrow = cast(g, f"{name}_normalized", normal, x.dtype_bytes) if scaled == "cast" else normal
    out = Tensor(f"{name}_output", x.axes, x.dtype_bytes)
    saves = [Save(narrow, "normalized input: needed for the weight gradient", TORCH_CHAIN)]
    if scaled == "one_plus":
        scale_ = Tensor(f"{name}_scale", x.axes[-1:], 4)
        saves.append(Save(scale_, "1 + weight, fp32: a factor", TORCH_CHAIN, small=True))
    g.record(
        name,
        RMS_NORM_CHAIN,
        (narrow,),
        (out,),
        saves=saves,
        weights=(Weight(f"{name}.weight", x.axes[-1:]),),
        # the product that is summed to the weight's gradient
        scratch=Scratch(forward=rstd.bytes, backward=narrow.bytes),
        holds=(normal,) if narrow is not normal else (),
    )
    return out


def rms_norm_chain_of_both(g: Graph, name: str, x: Tensor) -> Tensor:
    """RMSNorm operation by operation as in T5: squares in fp32, a product with x in its own dtype.

    Saves the input in its own dtype, beside what ``rms_norm_chain`` saves.
    """
    reason = "factor: needed for the gradient of the reciprocal norm"
    g.record(f"{name}_product", RMS_NORM_CHAIN, (x,), (), saves=(Save(x, reason, HF_T5),))
    return rms_norm_chain(g, name, x)
