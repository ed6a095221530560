"""Caches of values that depend on a model. They do not keep it alive: it is freed after its last request."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar
from weakref import ref

from attention_serving.server.engine.model import LoadedModel

R = TypeVar("R")


def cached_by_model(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """As `functools.lru_cache`, for functions of a model whose results do not refer to the model."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        # References to one model are equal while it lives, and afterwards equal to no other.
        @lru_cache(maxsize=maxsize)
        def cached(model: "ref[LoadedModel]", *arguments: Hashable) -> R:
            return function(model(), *arguments)

        @wraps(function)
        def by_reference(model: LoadedModel, *arguments: Hashable) -> R:
            return cached(ref(model), *arguments)

        return by_reference

    return decorate
