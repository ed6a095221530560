"""The store of contexts: who may use them, what makes room, what frees memory, what files bring back."""

import dataclasses
import gc
import os
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.artifact.manifest import KEY_POSITIONS, PROJECTED
from attention_serving.server.engine import contexts
from attention_serving.server.engine.contexts import ContextStore
from attention_serving.server.engine.errors import (
    ContextNotFoundError,
    OverloadedError,
    UnsupportedError,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import CONTEXT_BYTES, Array, Context

ROWS = 16
NBYTES = CONTEXT_BYTES + 1000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the store."""
    moment = [1e9]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    return moment


def put(
    store: ContextStore, model: LoadedModel, name: str, owner: str = "", nbytes: int = NBYTES, **fields: Any
) -> Context:
    """Stores a context of noise, for a minute."""
    rng = np.random.default_rng(0)
    (graph,) = model.projector.manifest.graphs.values()
    shapes = [[axis if isinstance(axis, int) else ROWS for axis in spec.axes[1:]] for spec in graph.outputs]
    tensors: dict[str, Array] = {
        each: rng.standard_normal((1, *shape), np.float32)
        for each, shape in zip(PROJECTED, shapes, strict=True)
    }
    tensors[KEY_POSITIONS] = np.arange(ROWS)[np.newaxis]
    expires = time.time() + 60
    context = Context(id=name, nbytes=nbytes, length=ROWS, owner=owner, expires_at=expires, **fields)
    store.put(model, context, lambda: tensors)
    return context


def names(store: ContextStore, model: LoadedModel, caller: str = "") -> list[str]:
    return [context.id for context in store.page(model, caller, 1000)[0]]


def has(store: ContextStore, model: LoadedModel, name: str, caller: str = "") -> bool:
    try:
        store.find(model, name, caller)
    except ContextNotFoundError:
        return False
    return True


@pytest.mark.usefixtures("now")
def test_the_least_recently_used_context_makes_room(cross_model: LoadedModel) -> None:
    store = ContextStore(3 * NBYTES)
    for name in "abc":
        put(store, cross_model, name)
    store.find(cross_model, "a", "")
    put(store, cross_model, "d")
    assert names(store, cross_model) == ["d", "a", "c"]
    assert (store.held_bytes, store.evictions) == (3 * NBYTES, 1)
    assert not has(store, cross_model, "b")
    assert (store.hits, store.misses) == (1, 1)


@pytest.mark.usefixtures("now")
def test_a_caller_evicts_its_own_contexts_and_those_beyond_a_share(cross_model: LoadedModel) -> None:
    store = ContextStore(4 * NBYTES)
    put(store, cross_model, "small", "modest")
    for name in "abcdef":
        put(store, cross_model, name, "greedy")
    assert names(store, cross_model, "greedy") == ["f", "e", "d"]
    put(store, cross_model, "mine", "modest")
    assert names(store, cross_model, "modest") == ["mine", "small"]
    assert names(store, cross_model, "greedy") == ["f", "e"]
    with pytest.raises(OverloadedError, match="hold their share"):
        put(store, cross_model, "huge", "greedy", nbytes=3 * NBYTES)
    assert names(store, cross_model, "modest") == ["mine", "small"]


def test_contexts_expire_and_free_their_memory(cross_model: LoadedModel, now: list[float]) -> None:
    store = ContextStore(9 * NBYTES)
    renewed = put(store, cross_model, "renewed")
    put(store, cross_model, "a")
    store.renew(cross_model, renewed, now[0] + 120)
    now[0] += 61
    assert not has(store, cross_model, "a")
    assert names(store, cross_model) == ["renewed"]
    del renewed
    now[0] += 60
    store.purge()
    assert store.held_bytes == 0


def test_a_context_in_use_is_not_freed_and_counts_until_its_run_ends(cross_model: LoadedModel) -> None:
    store = ContextStore(2 * NBYTES)
    put(store, cross_model, "a")
    put(store, cross_model, "b")
    in_use = store.find(cross_model, "a", "")
    store.drop(cross_model, "a", "")
    with pytest.raises(OverloadedError, match="in use"):
        put(store, cross_model, "large", nbytes=2 * NBYTES)
    assert names(store, cross_model) == ["b"]  # evicting it would not have made enough room
    assert in_use.context.tensors[PROJECTED[0]].any()
    del in_use
    put(store, cross_model, "large", nbytes=2 * NBYTES)


def test_contexts_are_gone_with_their_model(cross_model: LoadedModel) -> None:
    store, loaded = ContextStore(9 * NBYTES), dataclasses.replace(cross_model)
    put(store, loaded, "a")
    again = dataclasses.replace(cross_model)
    assert not has(store, again, "a")
    del loaded
    gc.collect()
    assert store.held_bytes == 0


def test_contexts_may_be_switched_off(cross_model: LoadedModel) -> None:
    with pytest.raises(UnsupportedError, match="max_context_bytes"):
        put(ContextStore(0), cross_model, "a")


def test_memory_stays_below_its_bound_with_greedy_callers(cross_model: LoadedModel) -> None:
    """A thousand contexts, put by four callers at once, some of which are in use."""
    store, most = ContextStore(20 * NBYTES), [0]

    def caller(name: str) -> None:
        used, rng = list[LoadedModel](), random.Random(name)  # noqa: S311 - not for secrets
        for index in range(250):
            try:
                put(store, cross_model, str(index), name, nbytes=rng.choice([NBYTES, 2 * NBYTES]))
                used.append(store.find(cross_model, str(index), name))
            except (OverloadedError, ContextNotFoundError):
                used.clear()
            used = used[-rng.randrange(4) :]
            most[0] = max(most[0], store.held_bytes)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(caller, "abcd"))
    assert 10 * NBYTES < most[0] <= store.limit_bytes
    assert store.evictions > 100
    for name in "abcd":
        for context in names(store, cross_model, name):
            store.drop(cross_model, context, name)
    assert store.held_bytes == 0


def test_contexts_come_back_from_their_folder_unless_a_file_is_damaged(
    cross_model: LoadedModel, self_model: LoadedModel, tmp_path: Path, now: list[float]
) -> None:
    folder = tmp_path / "contexts"
    before = put(ContextStore(9 * NBYTES, folder), cross_model, "a", "one")
    after = ContextStore(9 * NBYTES, folder)
    assert not has(after, cross_model, "a", "other")
    assert not has(after, self_model, "a", "one")
    found = after.find(cross_model, "a", "one").context
    assert found is not None
    assert (found.length, found.owner, found.expires_at) == (ROWS, "one", before.expires_at)
    for name, array in before.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], array)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert not has(ContextStore(9 * NBYTES, folder), cross_model, "a", "one")
    assert not list(folder.iterdir())
    put(after, cross_model, "b")
    after.drop(cross_model, "b", "")
    assert not list(folder.iterdir())
    put(after, cross_model, "c")
    now[0] += 61
    assert not has(ContextStore(9 * NBYTES, folder), cross_model, "c")
    assert not list(folder.iterdir())


def test_the_folder_is_bounded_by_size_and_number(cross_model: LoadedModel, tmp_path: Path) -> None:
    """Those that expire first go first; one that made room in memory is still in its file."""
    most = contexts.FOLDER_FACTOR * 10
    store = ContextStore(10 * NBYTES, tmp_path)
    for index in range(3 * most):
        put(store, cross_model, str(index))
        assert sum(path.stat().st_size + CONTEXT_BYTES for path in tmp_path.iterdir()) <= most * NBYTES
    assert len(list(tmp_path.iterdir())) > 0.8 * most
    assert len(names(store, cross_model)) == 10
    assert has(store, cross_model, str(2.5 * most).removesuffix(".0"))


def test_a_file_is_looked_for_by_its_name_and_dropped_unread(
    cross_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ContextStore(9 * NBYTES, tmp_path), cross_model, "a", "one")
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def fail(*_: object) -> None:
        raise AssertionError("the folder is listed")

    monkeypatch.setattr(os, "scandir", fail)
    after = ContextStore(9 * NBYTES, tmp_path)
    assert not has(after, cross_model, "b")
    for name, caller in (("b", "one"), ("a", "other")):
        with pytest.raises(ContextNotFoundError):
            after.drop(cross_model, name, caller)
    after.drop(cross_model, "a", "one")
    assert not os.listdir(tmp_path)  # noqa: PTH208 - without os.scandir


def test_a_folder_that_fails_is_a_warning(
    cross_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that was removed is made again; a full disk, and a file in its place, are counted."""
    folder = tmp_path / "contexts"
    store = ContextStore(9 * NBYTES, folder)
    folder.rmdir()
    assert not has(store, cross_model, "none")
    put(store, cross_model, "a")
    assert len(list(folder.iterdir())) == 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk: a part is written
    try:
        for name in "bc":
            put(store, cross_model, name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (len(list(folder.iterdir())), store.folder_errors, len(caplog.records)) == (1, 2, 1)
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()  # which is not a file that can be removed
    with pytest.raises(OverloadedError, match="cannot be removed"):
        store.drop(cross_model, "a", "")
    path.rmdir()
    folder.rmdir()
    folder.write_text("")
    store.renew(cross_model, put(store, cross_model, "d"), time.time() + 99)
    assert names(store, cross_model) == ["d", "c", "b", "a"]
    assert not has(ContextStore(9 * NBYTES, folder), cross_model, "a")
    assert {record.levelname for record in caplog.records} == {"WARNING"}
