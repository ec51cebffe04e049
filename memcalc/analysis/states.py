"""Weights, gradients and optimizer states: bytes of each parameter, by the recipe of training."""

from typing import NamedTuple


class Recipe(NamedTuple):
    """Bytes that one parameter takes while training.

    Attributes:
        weight: The weight that the passes use.
        gradient: Its gradient.
        optimizer: The optimizer's own: a master copy and moments.
    """

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it.

        >>> RECIPES["paper"].total
        18
        """
        return self.weight + self.gradient + self.optimizer


RECIPES = {
    # 16-bit weights, fp32 gradients; Adam's fp32 master copy and two moments
    "paper": Recipe(weight=2, gradient=4, optimizer=4 + 4 + 4),
}
