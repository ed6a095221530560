"""Addresses as gRPC and the log write them."""


def address_of(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address, given with or without brackets, has them."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
