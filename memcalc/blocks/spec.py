"""What a block reads: the model's structure, its axes, and the implementation."""

from collections.abc import Mapping
from dataclasses import dataclass

from memcalc.config import Config, Implementation, Model
from memcalc.errors import ConfigError
from memcalc.graph.graph import Graph, Tensor
from memcalc.graph.mesh import Axis, Mesh, Size


@dataclass(frozen=True, slots=True)
class Spec:
    """A model as its blocks see it.

    Attributes:
        model: The kinds of its parts; a block takes sizes from the axes, never from here.
        kernels: The variants of operations to run.
        s: The sequence.
        b: The micro-batch.
        h: The hidden size.
        a: The attention heads.
        k: The key and value heads; the axis ``a`` itself where they are the same.
        d: The head size.
        f: The MLP's width.
        v: The vocabulary, or None where it is unknown.
    """

    model: Model
    kernels: Implementation
    s: Axis
    b: Axis
    h: Axis
    a: Axis
    k: Axis
    d: Axis
    f: Axis
    v: Axis | None

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, Size]) -> "Spec":
        """The spec of a config, over sizes given by letter: ints, Fractions or symbols."""
        model = config.model
        s, b, h, a, d, f = (Axis.whole(letter, sizes[letter]) for letter in "sbhadf")
        grouped = model.kv_heads != model.heads
        k = Axis.heads("k", sizes["k"]) if grouped else a
        v = Axis.whole("v", sizes["v"]) if "v" in sizes else None
        return cls(model, config.run.implementation, s, b, h, a, k, d, f, v)

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key and value head."""
        return self.k is not self.a

    def vocabulary(self) -> Axis:
        """The vocabulary.

        Raises:
            ConfigError: Its size is unknown.
        """
        if self.v is None:
            raise ConfigError(f"{self.model.name} states no vocabulary size")
        return self.v

    def positions(self) -> Axis:
        """The rows of a table of learned positions: as many as the model is meant for."""
        most = self.model.max_seq_length
        if most is None or not isinstance(self.s.size, int):
            return self.s
        return Axis.whole("positions", most)

    def hidden_state(self, g: Graph, name: str) -> Tensor:
        """A tensor (s, b, h) from outside, as ranks hold it between tensor-parallel regions."""
        return g.input(name, (g.mesh.sequence(self.s), self.b, self.h))


def graph(config: Config, t: Size) -> Graph:
    """An empty graph for a config, over ``t`` tensor-parallel ranks."""
    return Graph(Mesh(t, config.parallel.sp), config.run.activation_bytes)
