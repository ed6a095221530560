"""Jobs whose model changes: a table is of one model, or its job ends with an error."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from attention_client.enrich import EnrichError, plan
from attention_client.enrich.backends import ServerBackend
from attention_client.enrich.job import run_chunks, run_job
from attention_client.enrich.options import Role, read_options

from attention_serving.artifact.names import ModelId
from attention_serving.enrich import enrich
from attention_serving.enrich.local import LocalBackend
from attention_serving.export.artifact import write_artifact
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device
from tests.clients.enrich.tables import QUERY, read, vectors_of, write
from tests.clients.enrich.test_resume import BAD, CHUNK_ROWS, GOOD, finished, start
from tests.server.samples import CONFIGS, SELF
from tests.server.seams import Served, wait_until
from tests.support.eager import Array

JOBS, CHUNKS = 20, 16
# The models that a server has in turn from a random moment of a job on, which began with the first of them.
CHANGES = {
    "replaced": [1],
    "replaced and restored": [1, 0],
    "loaded again": [0, 0],
    "another one on a second server": [],
    "replaced after a kill": [1],
}


class Sample(NamedTuple):
    """A table, two models of one name and version, and the context vectors of the table by each of them."""

    source: Path
    models: list[LoadedModel]
    vectors: list[Array]


def test_a_refusal_by_another_model_ends_the_job(artifacts: Path) -> None:
    model, options = load_model(artifacts / SELF / "1", Device()), read_options(QUERY)
    with Served(model) as served:
        connect = partial(ServerBackend, served.target, options, retry_seconds=0)
        with closing(connect()) as backend:
            served.engine.repository.replace(SELF, {"1": replace(model, digest="other")})
            with pytest.raises(EnrichError, match="its digest is other; it must be"):
                backend.submit({Role.QUERY: [np.ones((2, 3))]})()
        served.engine.repository.replace(SELF, {"1": replace(model, digest="")})
        with pytest.raises(EnrichError, match="does not state its digest"):
            connect()


def test_a_job_is_neither_computed_nor_resumed_with_another_model(
    tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", 1)
    source, options = write(tmp_path, 2, query=vectors_of(GOOD, BAD)), read_options(QUERY)
    run, resumed = partial(run_job, source, tmp_path / "out.parquet"), replace(options, resume=True)
    with ExitStack() as stack:
        backend, other = (stack.enter_context(closing(LocalBackend(artifacts, options, "cpu"))) for _ in "ab")
        other.model = replace(other.model, digest="other")
        with pytest.raises(EnrichError, match="its digest is other; it must be"):
            run(backend, options, runner=partial(run_chunks, backend=other, splitter=None))
        with pytest.raises(EnrichError, match="row 1 is refused"):
            run(backend, options)
        with pytest.raises(EnrichError, match="differs in model digest"):
            run(other, resumed)


@pytest.fixture(scope="module")
def sample(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The vectors are computed in this process."""
    folder = tmp_path_factory.mktemp("sample")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        write_artifact(MultiHeadAttention(CONFIGS[SELF]).eval(), ModelId(SELF), folder / "other")
    sample, output = Sample(write(folder, CHUNKS * CHUNK_ROWS), [], []), folder / "out.parquet"
    for repository in (artifacts, folder / "other"):
        sample.models.append(load_model(repository / SELF / "1", Device()))
        enrich(sample.source, output, **QUERY, model_repository=repository, overwrite=True)
        sample.vectors.append(context_vectors(output))
    return sample


def context_vectors(output: Path) -> Array:
    """The numbers of all rows, one after the other."""
    column = read(output).column("context_vectors").combine_chunks()
    return np.asarray(column.flatten().flatten())


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(JOBS))
def test_a_table_is_of_one_model_or_its_job_ends_with_an_error(
    seed: int, tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
    change, loads = list(CHANGES.items())[seed % len(CHANGES)]
    moment = int(np.random.default_rng(seed).integers(CHUNKS // 2))
    output = tmp_path / "out.parquet"

    def load(index: int) -> None:
        served.engine.repository.replace(SELF, {"1": replace(sample.models[index])})

    def wait_for(chunks: int, is_over: Callable[[], bool]) -> None:
        wait_until(lambda: finished(output) >= chunks or is_over())

    def run(*, resume: bool) -> str:
        try:
            enrich(sample.source, output, **QUERY, servers=targets, resume=resume)
        except EnrichError as error:
            return str(error)
        return ""

    first, second = map(Served, sample.models)
    with first as served, second, ThreadPoolExecutor(1) as pool:
        targets = [server.target for server in (first, second)[: 1 if loads else 2]]
        if change == "replaced after a kill":
            process = start(sample.source, output, f"--server={served.target}")
            wait_for(moment, lambda: process.poll() is not None)
            process.kill()
            process.communicate()
            load(1)
            error = run(resume=True)
        else:
            job = pool.submit(run, resume=False)
            for chunks, index in enumerate(loads, moment):
                wait_for(chunks, job.done)
                load(index)
            error = job.result()
        if error:
            assert change != "loaded again"
            assert "its digest is" in error or "differs in model digest" in error
            load(0)
            del targets[1:]
            assert not run(resume=True)
    assert any(np.allclose(context_vectors(output), vectors, atol=1e-5) for vectors in sample.vectors)
