"""Caches of what follows from a model. Their entries keep the model alive, so they can be emptied."""

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, TypeVar
from weakref import WeakSet

R = TypeVar("R")
_caches: "WeakSet[_lru_cache_wrapper[Any]]" = WeakSet()


def cached_by_model(maxsize: int) -> "Callable[[Callable[..., R]], _lru_cache_wrapper[R]]":
    """As `functools.lru_cache`, for functions that are called with a model."""

    def decorate(function: Callable[..., R]) -> "_lru_cache_wrapper[R]":
        cached = lru_cache(maxsize=maxsize)(function)
        _caches.add(cached)
        return cached

    return decorate


def forget_models() -> None:
    """Empties every cache, so that models that were unloaded can be freed."""
    for cached in list(_caches):
        cached.cache_clear()
