"""What requests of the same lengths have in common: decided once, and kept for the requests that follow."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from attention_serving.artifact.manifest import POSITIONS, GraphKind
from attention_serving.server.engine.caller import Caller
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, Request, SequenceInputs, SequenceShape
from attention_serving.server.engine.validation import ValidatedRequest, split


class RequestForm(NamedTuple):
    """A valid request without its vectors.

    Attributes:
        lengths: Rows of each sequence, for each of the model's inputs.
        shapes: What follows for each sequence.

    The others are those of `ValidatedRequest`. A form does not keep its model alive.
    """

    graph: GraphKind
    lengths: tuple[tuple[int, ...], ...]
    shapes: tuple[SequenceShape, ...]
    input_bytes: int
    held_bytes: int
    dimensions: int

    @classmethod
    def of(cls, request: Request, validated: ValidatedRequest) -> Self | None:
        """The form of a request; None if more than its lengths decides whether it is valid."""
        model = validated.model
        if request.texts or request.mask or request.spans or request.offsets or request.head_selection:
            return None
        if any(
            spec.name == POSITIONS or spec.exclusive_upper_bound is not None or spec.data_type == "bool"
            for spec in model.inputs
        ):
            return None
        return cls(
            validated.graph,
            tuple([request.inputs[spec.name].lengths for spec in model.inputs]),
            tuple([sequence.shape for sequence in validated.sequences]),
            validated.input_bytes,
            validated.held_bytes,
            validated.dimensions,
        )

    def filled(
        self, model: LoadedModel, rows: Sequence[Array], deadline: float, caller: Caller
    ) -> ValidatedRequest:
        """A request of this form.

        Args:
            model: The model that the form was made for.
            rows: The rows (sum of lengths, ...) of each of the model's inputs, of its element types.
            deadline: On `time.monotonic`'s clock, in seconds.
            caller: Whose request it is.
        """
        names = model.inputs_by_name
        columns = [split(own, lengths) for own, lengths in zip(rows, self.lengths, strict=True)]
        return ValidatedRequest(
            model=model,
            graph=self.graph,
            sequences=tuple(
                [
                    SequenceInputs(dict(zip(names, arrays, strict=True)), None, shape)
                    for shape, *arrays in zip(self.shapes, *columns, strict=True)
                ]
            ),
            deadline=deadline,
            input_bytes=self.input_bytes,
            held_bytes=self.held_bytes,
            caller=caller,
            dimensions=self.dimensions,
        )
