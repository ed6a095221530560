"""Checks the health of a server, for container health checks: `python -m server.probe [HOST:PORT]`."""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEFAULT_PORT = "8001"
TIMEOUT_SECONDS = 5.0


def main() -> int:
    """Returns 0 if the server reports SERVING; otherwise 1, with the reason on standard error."""
    port = os.environ.get("ATTENTION_PORT") or DEFAULT_PORT
    target = sys.argv[1] if len(sys.argv) > 1 else f"127.0.0.1:{port}"
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status
        except grpc.RpcError as error:
            sys.stderr.write(f"error: {target}: {error.code().name} {error.details()}\n")
            return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        sys.stderr.write(f"error: {target}: the server reports {name}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
