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
NO_PROXY = ("grpc.enable_http_proxy", 0)
CERTIFICATE, KEY = "ATTENTION_TLS_CERTIFICATE", "ATTENTION_TLS_KEY"


def main() -> int:
    """Returns 0 if the server reports SERVING; otherwise 1, with the reason on standard error."""
    arguments = _arguments()
    target = arguments.target
    try:
        with _channel(target, arguments) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            status = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status
            if status == health_pb2.HealthCheckResponse.SERVING:
                return 0
            reason = f"the server reports {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"
    except grpc.RpcError as error:
        reason = f"{error.code().name} {error.details()}"
    except OSError as error:
        reason = str(error)
    sys.stderr.write(f"error: {target}: {reason}\n")
    return 1


def _arguments() -> argparse.Namespace:
    certificate, key = os.environ.get(CERTIFICATE), os.environ.get(KEY)
    here = f"127.0.0.1:{os.environ.get('ATTENTION_PORT') or DEFAULT_PORT}"
    tls = f"connect with TLS, to whatever certificate the server has; on if {CERTIFICATE} is set"
    client = "PEM file of a certificate to show, for mutual TLS; default: the server's own"
    parser = argparse.ArgumentParser(prog="python -m server.probe", description=__doc__)
    parser.add_argument("target", nargs="?", default=here, help=f"HOST:PORT or unix:PATH; default: {here}")
    parser.add_argument("--tls", action="store_true", default=bool(certificate), help=tls)
    parser.add_argument("--certificate", default=certificate, help=client)
    parser.add_argument("--key", default=key, help="PEM file of its private key")
    return parser.parse_args()


def _channel(target: str, arguments: argparse.Namespace) -> grpc.Channel:
    if not arguments.tls or target.startswith("unix:"):
        return grpc.insecure_channel(target, [NO_PROXY])
    # The server is on this machine, under a name that its certificate need not have. It is asked for the
    # certificate first, because the file may be renewed before the server takes it.
    host, _, port = target.rpartition(":")
    certificate = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=TIMEOUT_SECONDS).encode()
    pair = (arguments.key, arguments.certificate) if arguments.certificate and arguments.key else ()
    name = next(iter(names_in(certificate)), "")
    credentials = grpc.ssl_channel_credentials(certificate, *[Path(file).read_bytes() for file in pair])
    return grpc.secure_channel(target, credentials, [NO_PROXY, ("grpc.ssl_target_name_override", name)])


if __name__ == "__main__":
    sys.exit(main())
