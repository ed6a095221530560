"""The OpenAPI document, and the page of it."""

import re

from attention_serving.server.http.openapi import document
from attention_serving.server.http.routes import ROUTES
from tests.server.http.clients import ask
from tests.server.http.scripted import SERVICE


def test_every_method_of_the_service_has_a_route() -> None:
    own, streamed = {"Embeddings", "EncoderModels"}, {"ModelStreamInfer"}
    assert {route.name for route in ROUTES} - own | streamed == set(SERVICE.methods_by_name)


def test_the_description_names_every_route_and_its_references_exist(front_port: int) -> None:
    answer = ask(front_port, "/openapi.json")
    assert answer.json == document()
    described = answer.json["paths"]
    expected = {(path, route.verb.lower()) for route in ROUTES for path in route.paths}
    assert {(path, verb) for path, verbs in described.items() for verb in verbs} == expected
    operations = [operation for verbs in described.values() for operation in verbs.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for reference in re.findall(rb'"\$ref": "#/components/(\w+)/(\w+)"', answer.body):
        kind, name = (part.decode() for part in reference)
        assert name in answer.json["components"][kind]


def test_the_page_needs_no_other_host(front_port: int) -> None:
    answer = ask(front_port, "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none';")
    assert b"//" not in answer.body
