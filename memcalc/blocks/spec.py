"""The inputs of a block: the model's structure, its axes and the implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from memcalc.config import Config, Experts, Implementation, Model, Parallel
from memcalc.config.families import FAMILIES
from memcalc.errors import ConfigError
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import CONTEXT, SEQUENCE, Axis, Mesh, Size, Split, divide
from memcalc.graph.ops import BIAS_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAxes:
    """The axes of multi-head latent attention.

    Attributes:
        query: q, the width of the compressed query, or None where it is not compressed.
        key_value: l, the width of the compressed key and value.
        rotary: o, the part of a head that is rotated.
        value: u, the size of a value head.
    """

    query: Axis | None
    key_value: Axis
    rotary: Axis
    value: Axis

    @classmethod
    def of(cls, sizes: Mapping[str, Size]) -> "LatentAxes":
        """The axes of sizes by letter."""
        return cls(
            query=_optional("q", sizes),
            key_value=Axis.whole("l", sizes["l"]),
            rotary=Axis.whole("o", sizes["o"]),
            value=Axis.whole("u", sizes["u"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAxes:
    """The axes of a mixture of experts.

    Attributes:
        number: n, the experts.
        per_token: r, the experts that each token goes to.
        width: g, the width of an expert.
        shared: y, the width of the shared experts together, or None where there are none.
        routed: The copies of tokens that a rank's experts receive.
    """

    number: Axis
    per_token: Axis
    width: Axis
    shared: Axis | None
    routed: Axis

    @classmethod
    def of(
        cls, experts: Experts, config: Config, mesh: Mesh, sizes: Mapping[str, Size]
    ) -> "ExpertAxes":
        """The axes of sizes by letter."""
        return cls(
            number=Axis.whole("n", sizes["n"]),
            per_token=Axis.whole("r", sizes["r"]),
            width=Axis.whole("g", sizes["g"]),
            shared=_optional("y", sizes),
            routed=_routed(experts, config, mesh, sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model as its blocks see it.

    Attributes:
        model: The kinds of its parts; a block takes sizes from the axes, never from here.
        kernels: The variants of operations to run.
        parallel: The kinds of its parallelism; degrees are the mesh's.
        causal: Whether a token attends only to those before it, in the stack at hand.
        masked: Whether a fused kernel is given a mask or a bias of the scores, which PyTorch's
            flash kernel does not take, in the layer at hand.
        s: The sequence, as a context-parallel rank has it.
        b: The micro-batch.
        h: The hidden size.
        a: The attention heads.
        k: The key and value heads; the axis ``a`` itself where they are the same.
        d: The head size.
        f: The MLP's width.
        v: The vocabulary, or None where it is unknown.
        pixels: The pixels of a patch, over all channels, or None where the model reads tokens.
        latent: The axes of multi-head latent attention, or None where the model has none.
        experts: The axes of a mixture of experts, or None where the model has none.
        single: Whether a micro-batch is one sequence, of which PyTorch's products take heads as
            they lie in memory; of several sequences they copy them.
        padded: Whether a row of scores is no multiple of what PyTorch pads a bias of them to.
    """

    model: Model
    kernels: Implementation
    parallel: Parallel
    causal: bool
    masked: bool
    s: Axis
    b: Axis
    h: Axis
    a: Axis
    k: Axis
    d: Axis
    f: Axis
    v: Axis | None
    pixels: Axis | None
    latent: LatentAxes | None
    experts: ExpertAxes | None
    single: bool
    padded: bool

    @classmethod
    def of(cls, config: Config, mesh: Mesh, sizes: Mapping[str, Size]) -> "Spec":
        """The spec of a config, over sizes given by letter: ints, Fractions or symbols."""
        model, run = config.model, config.run
        experts, vision = model.experts, model.vision
        a = Axis.whole("a", sizes["a"])
        return cls(
            model=model,
            kernels=run.implementation,
            parallel=config.parallel,
            causal=model.causal,
            masked=config.masked_layers == "all",
            s=mesh.context(Axis.whole("s", sizes["s"])),
            b=Axis.whole("b", sizes["b"]),
            h=Axis.whole("h", sizes["h"]),
            a=a,
            k=a if model.kv_heads == model.heads else Axis.heads("k", sizes["k"]),
            d=Axis.whole("d", sizes["d"]),
            f=Axis.whole("f", sizes["f"]),
            v=_optional("v", sizes),
            pixels=Axis.whole("pixels", vision.pixels) if vision else None,
            latent=LatentAxes.of(sizes) if model.latent else None,
            experts=ExpertAxes.of(experts, config, mesh, sizes) if experts else None,
            single=run.micro_batch_size == 1,
            padded=run.seq_length % BIAS_TILE != 0,
        )

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key and value head."""
        return self.k is not self.a

    def separate(self, linears: str) -> bool:
        """Whether linears of a kind (``qkv``, ``gate``) have a weight each."""
        family = FAMILIES.get(self.model.family or "")
        return self.kernels.separate_linears and linears not in (family.packs if family else ())

    def alone(self, anyway: bool) -> bool:
        """Whether a norm is alone, rather than fused into a linear."""
        return anyway or not self.kernels.norms_in_linears

    def vocabulary(self) -> Axis:
        """The vocabulary.

        Raises:
            ConfigError: Its size is unknown.
        """
        if self.v is None:
            raise ConfigError(f"{self.model.name} gives no vocabulary size: pass --vocab-size")
        return self.v

    def positions(self) -> Axis:
        """The rows of a table of learned positions: the model's context length."""
        most = self.model.max_seq_length
        if most is None or not isinstance(self.s.size, int):
            return self.s
        return Axis.whole("positions", most)

    def hidden_state(self, g: Graph, name: str, shared: bool = False) -> Tensor:
        """A tensor (s, b, h) from outside, as ranks hold it between tensor-parallel regions."""
        return g.input(name, (g.mesh.sequence(self.s), self.b, self.h), shared)


def _optional(letter: str, sizes: Mapping[str, Size]) -> Axis | None:
    """The axis of a letter, or None where its size is not given."""
    return Axis.whole(letter, sizes[letter]) if letter in sizes else None


def _routed(experts: Experts, config: Config, mesh: Mesh, sizes: Mapping[str, Size]) -> Axis:
    """Copies of tokens: r of each, of which a rank's experts receive x in ct, were all alike.

    Experts are spread over ranks, but so are the tokens that come to them: their number does not
    depend on e. The busiest rank receives ``imbalance`` times as many, but not more than the tokens
    of all e ranks, nor than its experts take.
    """
    load = min(Fraction(str(config.run.imbalance)), Fraction(config.parallel.ep))
    if experts.capacity_factor is not None:
        load = min(load, Fraction(str(experts.capacity_factor)))
    size = sizes["r"] * sizes["s"] * sizes["b"]
    over, times = (mesh.t, mesh.x) if mesh.sequence_parallel else (1, 1)
    if type(size) is int and type(over) is int:
        local = ceil(Fraction(size * times, over * mesh.c) * load)
    else:
        exact = load.numerator if load.denominator == 1 else load
        local = divide(size * times * exact, over * mesh.c, "routed tokens")
    splits = []
    if mesh.c != 1:
        splits.append(Split(CONTEXT, "c", mesh.c))
    if over != times:
        splits.append(Split(SEQUENCE, "t", over))
    return Axis("rsb" if times in (1, over) else "rsbx", size, local, tuple(splits))
