"""Caches of what follows from a model. Their entries keep the model alive, so they can be emptied."""

import threading
from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Protocol, TypeVar
from weakref import WeakSet


class ModelCache(Protocol):
    """Has entries that keep models alive."""

    def cache_clear(self) -> None:
        """Empties the cache."""


R = TypeVar("R")
_caches: WeakSet[ModelCache] = WeakSet()
# To copy the set takes several steps, between which another thread could add to it.
_adding = threading.Lock()


def register(cache: ModelCache) -> None:
    """Has a cache emptied by `forget_models`, as long as it exists."""
    with _adding:
        _caches.add(cache)


def cached_by_model(maxsize: int) -> "Callable[[Callable[..., R]], _lru_cache_wrapper[R]]":
    """As `functools.lru_cache`, for functions that are called with a model."""

    def decorate(function: Callable[..., R]) -> "_lru_cache_wrapper[R]":
        cached = lru_cache(maxsize=maxsize)(function)
        register(cached)
        return cached

    return decorate


def forget_models() -> None:
    """Empties every cache, so that models that were unloaded can be freed."""
    with _adding:
        caches = list(_caches)
    for cache in caches:
        cache.cache_clear()
