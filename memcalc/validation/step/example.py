"""A training step to try ``memcalc trace`` with."""

import torch
from torch import nn
from torch.nn import functional


class Decoder(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, vocabulary: int = 32000, hidden: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next tokens; ids (b, s)."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)[:, :-1].flatten(0, 1).float()
        return functional.cross_entropy(logits, ids[:, 1:].flatten())


def make() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    """A model in bf16, 4 sequences of 1024 tokens and AdamW."""
    model = Decoder().bfloat16()
    ids = torch.zeros(4, 1024, dtype=torch.long)
    return model, ids, torch.optim.AdamW(model.parameters())
