"""Exits with 0 if the server at an address, such as 127.0.0.1:50051, says that it serves, and with 1 if not: the health check of the image.

Needs no token. Kubernetes asks the server itself.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT = 4.0  # seconds


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            print(f"{address}: {error.details()}", file=sys.stderr)
            return False
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
