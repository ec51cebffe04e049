"""Li et al. 2021 (arXiv 2105.13120; ACL 2023, pages 2395, 2396): its sequence parallelism.

It shards all activations along the sequence over N devices and replicates parameters and optimizer
states; that of Korthikanti et al. shards the sequence only between tensor-parallel regions. Units
are the paper's, not memcalc's: elements, not bytes, of parameters, gradients, Adam's two moments
and each operation's output once. The letters are the paper's too:
B batch, L sequence length, H hidden size, A head size, Z heads, N devices.
"""

from typing import Any, NamedTuple

import sympy

B, L, H, A, Z, N = sympy.symbols("B L H A Z N", positive=True)

COPIES = 4  # of each parameter: itself, its gradient, Adam's two moments


class Block(NamedTuple):
    """A block of table 1 or 2.

    Attributes:
        name: Its name.
        parameters: Elements of its weights.
        inner: Elements of the outputs that both parallelisms shard.
        output: Elements of its output, which tensor parallelism replicates.
    """

    name: str
    parameters: Any
    inner: Any
    output: Any

    @property
    def tensor(self) -> Any:
        """Elements per device under tensor parallelism."""
        return COPIES * self.parameters / N + self.inner / N + self.output

    @property
    def sequence(self) -> Any:
        """Elements per device under sequence parallelism."""
        return COPIES * self.parameters + self.inner / N + self.output / N

    @property
    def break_even(self) -> Any:
        """The B L from which sequence parallelism needs less: where the two are equal.

        >>> MLP.break_even, ATTENTION.break_even
        (32*H, 16*A*Z)
        """
        tokens = sympy.Symbol("tokens", positive=True)
        at = {L: tokens / B}
        (found,) = sympy.solve((self.tensor - self.sequence).subs(at), tokens)
        return found


# The MLP's two weights of H x 4H; its outputs of 4H and of H.
MLP = Block("MLP", 2 * H * 4 * H, 4 * B * L * H, B * L * H)

# Four weights of H x AZ; query, key, value and context of AZ; the scores; its output of H.
ATTENTION = Block("attention", 4 * H * A * Z, 4 * B * L * Z * A + B * Z * L**2, B * L * H)

# As printed: table 1 and equation 5 (page 2395), table 2 and its condition.
PRINTED = {
    "MLP": {
        "tensor": 32 * H**2 / N + 4 * B * L * H / N + B * L * H,
        "sequence": 32 * H**2 + 5 * B * L * H / N,
        "break_even": 32 * H,
    },
    "attention": {
        "tensor": 16 * A * Z * H / N + 4 * B * L * Z * A / N + B * Z * L**2 / N + B * L * H,
        "sequence": 16 * A * Z * H + 4 * B * Z * L * A / N + B * Z * L**2 / N + B * L * H / N,
        "break_even": 16 * A * Z,
    },
}
