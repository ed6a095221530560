"""The models that are served, and those that are not and why."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        aliases: Those of its manifest, if it was served.
    """

    name: str
    version: str
    reason: str
    is_withdrawn: bool = False
    is_transient: bool = False
    aliases: tuple[str, ...] = ()


Model = LoadedModel | FailedModel
Key = tuple[str, str]
# Is called with the name of a model, and raises an error if it may not be used.
Permit = Callable[[str], None]


class Repository:
    """Models by name and version. One thread at a time may replace some, while any thread reads.

    Attributes:
        changes: How often models were replaced.
        default_name: Name or alias of the model of requests for texts that name none; empty for none.
    """

    def __init__(
        self, models: Iterable[Model] = (), aliases: Mapping[str, str] | None = None, default_name: str = ""
    ) -> None:
        """Begins with some models.

        Args:
            models: The models.
            aliases: Names of models by alias, which take precedence over the aliases of manifests. The models
                need not exist.
            default_name: As the attribute.
        """
        self.changes, self.default_name, self._fixed_aliases = 0, default_name, dict(aliases or {})
        self._set(models)

    def _set(self, models: Iterable[Model]) -> None:
        ordered = sorted(models, key=lambda model: (model.name, int(model.version)))
        by_key = {(model.name, model.version): model for model in ordered}
        # The highest version that loaded; if none did, the highest version.
        newest = {
            model.name: model for model in sorted(ordered, key=lambda model: isinstance(model, LoadedModel))
        }
        # By alias, the names of its models: several if their manifests contradict each other.
        aliases = defaultdict[str, set[str]](set)
        for model in ordered:
            for alias in (model.manifest if isinstance(model, LoadedModel) else model).aliases:
                aliases[alias].add(model.name)
        aliases |= {alias: {name} for alias, name in self._fixed_aliases.items()}
        self._snapshot = by_key, newest, aliases | {name: {name} for name in newest}

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

    def resolve(self, name: str) -> str:
        """The name of the model that a name or alias stands for; an unknown or ambiguous name as it is."""
        names = self._snapshot[2].get(name, ())
        return next(iter(names)) if len(names) == 1 else name

    def aliases(self, name: str) -> list[str]:
        """The aliases that lead to a model, sorted."""
        names = self._snapshot[2].items()
        return sorted(alias for alias, models in names if models == {name} and alias != name)

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

    def find(self, name: str, version: str = "", permit: Permit = lambda _: None) -> Model:
        """A model in any state: the given version, or the highest one that loaded.

        Args:
            name: Its name or an alias.
            version: The version; empty for the highest.
            permit: Called with the model's own name before anything is looked for; raises what `find` raises.

        Raises:
            ModelNotFoundError: The model or version does not exist.
        """
        by_key, newest, names = self._snapshot
        sent, name = name, self.resolve(name)
        permit(name)
        if name not in newest:
            problem = f"does not exist; there are: {', '.join(sorted(newest)) or 'none'}"
            if len(names.get(name, ())) > 1:
                problem = "is an alias of several models; send the name of one of them"
            raise ModelNotFoundError(f"model {quoted(sent)} {problem}", field="model_name")
        model = by_key.get((name, version)) if version else newest[name]
        if model is None:
            versions = ", ".join(self.versions(name))
            problem = f"model {name!r} does not have version {quoted(version)}; it has: {versions}"
            raise ModelNotFoundError(problem, field="model_version")
        return model

    def ready(self, name: str, version: str = "", permit: Permit = lambda _: None) -> LoadedModel:
        """A loaded model; arguments as for `find`.

        Raises:
            ModelNotFoundError: The model or version does not exist.
            ModelNotReadyError: The model failed to load, or was taken out of service.
        """
        model = self.find(name, version, permit)
        if isinstance(model, FailedModel):
            what = "was taken out of service" if model.is_withdrawn else "failed to load"
            raise ModelNotReadyError(f"model {model.name!r} version {model.version} {what}: {model.reason}")
        return model
