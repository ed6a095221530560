"""Checks the health of a server, for container health checks: `python -m server.probe [HOST:PORT]`."""

import argparse
import os
import ssl
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.server.security.peers import names_in

DEFAULT_PORT = "8001"
TIMEOUT_SECONDS = 5.0
CERTIFICATE, KEY = "ATTENTION_TLS_CERTIFICATE", "ATTENTION_TLS_KEY"


def main() -> int:
    """Returns 0 if the server reports SERVING; otherwise 1, with the reason on standard error."""
    arguments = _arguments()
    target = arguments.target
    try:
        with _channel(target, arguments) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            status = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status
    except grpc.RpcError as error:
        sys.stderr.write(f"error: {target}: {error.code().name} {error.details()}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {target}: {error}\n")
        return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        sys.stderr.write(f"error: {target}: the server reports {name}\n")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    environment = os.environ
    parser = argparse.ArgumentParser(prog="python -m server.probe", description=__doc__)
    parser.add_argument(
        "target", nargs="?", help=f"HOST:PORT or unix:PATH; default: port {DEFAULT_PORT} here"
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        default=bool(environment.get(CERTIFICATE)),
        help=f"connect with TLS, to whatever certificate the server has; on if {CERTIFICATE} is set",
    )
    parser.add_argument(
        "--certificate",
        default=environment.get(CERTIFICATE),
        help="PEM file of a certificate to show, for mutual TLS; default: the server's own",
    )
    parser.add_argument("--key", default=environment.get(KEY), help="PEM file of its private key")
    arguments = parser.parse_args()
    arguments.target = arguments.target or f"127.0.0.1:{environment.get('ATTENTION_PORT') or DEFAULT_PORT}"
    return arguments


def _channel(target: str, arguments: argparse.Namespace) -> grpc.Channel:
    if not arguments.tls or target.startswith("unix:"):
        return grpc.insecure_channel(target)
    # The server is on this machine, under a name that its certificate need not have. It is asked for the
    # certificate first, because the file may be renewed before the server takes it.
    host, _, port = target.rpartition(":")
    found = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=TIMEOUT_SECONDS).encode()
    key, certificate = None, None
    if arguments.certificate and arguments.key:
        key, certificate = Path(arguments.key).read_bytes(), Path(arguments.certificate).read_bytes()
    credentials = grpc.ssl_channel_credentials(found, key, certificate)
    return grpc.secure_channel(target, credentials, [("grpc.ssl_target_name_override", _name(found))])


def _name(certificate: bytes) -> str:
    return next(iter(names_in(certificate)), "")


if __name__ == "__main__":
    sys.exit(main())
