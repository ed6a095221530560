"""The published worked examples of tests/data/attention_tables.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import DERIVED, AttentionConfig
from attention_serving.model.projections import SeparateProjections

FILE = Path(__file__).parents[1] / "data/attention_tables.json"
TABLES = json.loads(FILE.read_text())
TEXT = TABLES["text"]


@dataclass(frozen=True)
class GoldenTable:
    """One example: a configuration, its weights, its inputs and the table that was printed."""

    case: dict[str, Any]

    @property
    def id(self) -> str:
        """Name of the example."""
        return str(self.case["id"])

    @property
    def inputs(self) -> list[NDArray[np.float32]]:
        """Query, and the key for cross-attention: (T, d) or (B, T, d)."""
        given = self.case["inputs"]
        return [np.array(given[name], np.float32) for name in ("query", "key") if name in given]

    @property
    def expected(self) -> dict[str, NDArray[np.float64]]:
        """The tables: context_vectors, attention_weights, or one row of either."""
        return {name: np.array(table) for name, table in self.case["expected"].items()}

    @property
    def tolerance(self) -> float:
        """Half a unit of the last printed decimal, and a little for that unit's own rounding."""
        return float(0.51 * 10.0 ** -self.case["decimals"])

    def module(self) -> MultiHeadAttention:
        """The configuration in eager PyTorch, with the published weights."""
        module = MultiHeadAttention(self._config())
        weights = {name: torch.tensor(values) for name, values in self.case["weights"].items()}
        with torch.no_grad():
            for name, projection in zip(("w_q", "w_k", "w_v"), linear_layers(module), strict=True):
                # [heads][d_in][d] to a linear layer's (heads * d, d_in).
                projection.weight.copy_(weights[name].transpose(1, 2).flatten(0, 1))
            if module.output is not None:
                module.output.weight.copy_(weights["w_o"].T)
                module.output.bias.copy_(weights["b_o"])
        return module.eval()

    def _config(self) -> AttentionConfig:
        config, bias = self.case["config"], self.case["weights"].get("b_o")
        derived = {
            "cross": "key" in self.case["inputs"],
            "d_out": len(bias) if bias else DERIVED,
            "scale": config["scale"] if isinstance(config["scale"], float) else DERIVED,
        }
        return AttentionConfig(**config | derived)


def linear_layers(module: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """The projections of query, key and value of a module that has one for each."""
    projections = module.projections
    assert isinstance(projections, SeparateProjections)
    layers = projections.query, projections.key, projections.value
    return cast(tuple[nn.Linear, nn.Linear, nn.Linear], layers)


GOLDEN_TABLES = [GoldenTable(case) for case in TABLES["cases"]]
