"""Jobs whose model changes: a table is of one model, or its job ends with an error."""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attention_client.enrich import EnrichError, plan
from attention_client.enrich.backends import ServerBackend
from attention_client.enrich.job import run_chunks, run_job
from attention_client.enrich.options import Role, read_options

from attention_serving.enrich.local import LocalBackend
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device
from tests.clients.enrich.tables import QUERY, vectors_of, write
from tests.clients.enrich.test_resume import BAD, GOOD
from tests.server.samples import SELF
from tests.server.seams import Served


@pytest.mark.parametrize("width", [4, 3], ids=["answered", "refused"])
def test_an_answer_or_a_refusal_by_another_model_ends_the_job(artifacts: Path, width: int) -> None:
    model, options = load_model(artifacts / SELF / "1", Device()), read_options(QUERY)
    with Served(model) as served:
        connect = partial(ServerBackend, served.target, options, retry_seconds=0)
        with closing(connect()) as backend:
            served.engine.repository.replace(SELF, {"1": replace(model)})  # the same model, loaded again
            backend.submit({Role.QUERY: [np.ones((2, 4))]})()
            served.engine.repository.replace(SELF, {"1": replace(model, digest="other")})
            with pytest.raises(EnrichError, match="its digest is other; it must be"):
                backend.submit({Role.QUERY: [np.ones((2, width))]})()
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
