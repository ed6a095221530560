"""The models that are served, and those that are not and why."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from attention_serving.server.engine.errors import ModelNotFoundError, ModelNotReadyError, quoted
from attention_serving.server.engine.model import LoadedModel


@dataclass(frozen=True)
class FailedModel:
    """A model of the repository that cannot be served: it failed to load, or was taken out of service.

    Attributes:
        reason: Why, for callers: it contains no path of this machine. The log has the details.
        is_withdrawn: Whether it was served, and was taken out of service.
        is_transient: Whether it may load later although none of its files changes.
    """

    name: str
    version: str
    reason: str
    is_withdrawn: bool = False
    is_transient: bool = False


Model = LoadedModel | FailedModel
Key = tuple[str, str]


class Repository:
    """Models by name and version. One thread at a time may replace some, while any thread reads.

    Attributes:
        changes: How often models were replaced.
    """

    def __init__(self, models: Iterable[Model] = ()) -> None:
        """Begins with some models."""
        self.changes = 0
        self._set(models)

    def _set(self, models: Iterable[Model]) -> None:
        ordered = sorted(models, key=lambda model: (model.name, int(model.version)))
        by_key = {(model.name, model.version): model for model in ordered}
        # The highest version that loaded; if none did, the highest version.
        newest = {
            model.name: model for model in sorted(ordered, key=lambda model: isinstance(model, LoadedModel))
        }
        self._snapshot = by_key, newest

    def __iter__(self) -> Iterator[Model]:
        """Every model, sorted by name and version."""
        return iter(self._snapshot[0].values())

    @property
    def loaded_models(self) -> list[LoadedModel]:
        """Those that are ready, sorted by name and version."""
        return [model for model in self if isinstance(model, LoadedModel)]

    def versions(self, name: str) -> Mapping[str, Model]:
        """The versions of a model, lowest first; empty if there is no such model."""
        return {model.version: model for model in self if model.name == name}

    def replace(self, name: str, models: Mapping[str, Model]) -> None:
        """Puts versions of a model in place of those that it has, in one step.

        Requests that have found their model are answered by that one.
        """
        self._set([*(model for model in self if model.name != name), *models.values()])
        self.changes += 1

    def close(self) -> None:
        """Lets the copies of the artifacts go: the process ends."""
        for model in self.loaded_models:
            if model.files is not None:
                model.files.close()

    def find(self, name: str, version: str = "") -> Model:
        """A model in any state: the given version, or the highest one that loaded.

        Raises:
            ModelNotFoundError: The model or version does not exist.
        """
        by_key, newest = self._snapshot
        if name not in newest:
            names = ", ".join(sorted(newest)) or "none"
            problem = f"model {quoted(name)} does not exist; there are: {names}"
            raise ModelNotFoundError(problem, field="model_name")
        model = by_key.get((name, version)) if version else newest[name]
        if model is None:
            versions = ", ".join(self.versions(name))
            problem = f"model {name!r} does not have version {quoted(version)}; it has: {versions}"
            raise ModelNotFoundError(problem, field="model_version")
        return model

    def ready(self, name: str, version: str = "") -> LoadedModel:
        """A loaded model.

        Raises:
            ModelNotFoundError: The model or version does not exist.
            ModelNotReadyError: The model failed to load, or was taken out of service.
        """
        model = self.find(name, version)
        if isinstance(model, FailedModel):
            what = "was taken out of service" if model.is_withdrawn else "failed to load"
            raise ModelNotReadyError(f"model {name!r} version {model.version} {what}: {model.reason}")
        return model
