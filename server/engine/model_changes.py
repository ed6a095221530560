"""What a change did to the models that are served, for those who count it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.repository import FailedModel, Model


class ChangeKind(StrEnum):
    """What happened to one version of a model."""

    LOAD = "load"
    """It is served, and was not served before."""
    REPLACE = "replace"
    """It is served in place of an artifact of the same version."""
    UNLOAD = "unload"
    """It is not served any more."""


@dataclass(frozen=True)
class ModelChange:
    """One version of a model changed, or failed to.

    Attributes:
        name: Name of the model.
        kind: What happened, or was to happen.
        succeeded: Whether it did. A version that failed to load leaves what was served as it is.
    """

    name: str
    kind: ChangeKind
    succeeded: bool


def initial(models: Iterable[Model]) -> Iterator[ModelChange]:
    """The changes of a server that starts with some models."""
    for model in models:
        yield ModelChange(model.name, ChangeKind.LOAD, isinstance(model, LoadedModel))


def made(served: Mapping[str, Model], models: Iterable[Model]) -> Iterator[ModelChange]:
    """The changes between the versions of a model that were served and those that are.

    Args:
        served: What was there before, by version.
        models: What is there now.
    """
    now = {model.version: model for model in models if isinstance(model, LoadedModel)}
    before = {version: model for version, model in served.items() if isinstance(model, LoadedModel)}
    for version, model in now.items():
        if version not in before:
            yield ModelChange(model.name, ChangeKind.LOAD, succeeded=True)
        elif before[version] is not model:
            yield ModelChange(model.name, ChangeKind.REPLACE, succeeded=True)
    for version in before.keys() - now.keys():
        yield ModelChange(before[version].name, ChangeKind.UNLOAD, succeeded=True)


def failed(served: Mapping[str, Model], failures: Iterable[FailedModel]) -> Iterator[ModelChange]:
    """The changes that were not made because versions failed to load.

    Args:
        served: What is there, by version.
        failures: The versions that failed.
    """
    for failure in failures:
        was_served = isinstance(served.get(failure.version), LoadedModel)
        kind = ChangeKind.REPLACE if was_served else ChangeKind.LOAD
        yield ModelChange(failure.name, kind, succeeded=False)
