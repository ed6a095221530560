"""Shortened embeddings: the first elements of each, as Matryoshka models are trained for.

Source: Kusupati et al., "Matryoshka Representation Learning" (2022), section 3.
"""

import numpy as np

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array

DIMENSIONS = "dimensions"


def check_dimensions(dimensions: int, model: LoadedModel) -> None:
    """Checks whether embeddings of a model can be shortened to a number of elements.

    Raises:
        InvalidRequestError: The model does not allow it.
    """
    if model.encoder is None:
        raise InvalidRequestError(DIMENSIONS, f"model {model.name!r} is not a text encoder")
    allowed = (*model.encoder.dimensions, model.encoder.embedding_width)
    if dimensions not in allowed:
        raise InvalidRequestError(
            DIMENSIONS, f"is {dimensions}; model {model.name!r} allows {', '.join(map(str, allowed))}"
        )


def shortened(outputs: dict[str, list[Array]], model: LoadedModel, dimensions: int) -> dict[str, list[Array]]:
    """The outputs of a request with its embeddings (..., d) cut to (..., dimensions), normalised again."""
    if not dimensions or model.encoder is None or EMBEDDING not in outputs:
        return outputs
    cut = [embedding[..., :dimensions] for embedding in outputs[EMBEDDING]]
    if model.encoder.normalised:
        least = np.finfo(np.float32).tiny
        lengths = [np.linalg.norm(embedding, axis=-1, keepdims=True) for embedding in cut]
        cut = [embedding / np.maximum(length, least) for embedding, length in zip(cut, lengths, strict=True)]
    return {**outputs, EMBEDDING: cut}
