"""Checks who calls before anything of a call is received: its identity, its right, and what it may hold."""

from collections.abc import Callable

from attention_serving.server.rpc.calls.method import CallKind, Method
from attention_serving.server.rpc.identity_shares import AccountShares, PlaceShares
from attention_serving.server.rpc.transport.call import Call
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.identities import Identity


class CallAccess:
    """Admits the calls of identities that have the right for them. Belongs to the transport's thread."""

    def __init__(self, guard: Guard, *, max_calls: int, max_streams: int, share: float) -> None:
        """Creates the access of a server.

        Args:
            guard: Knows the identities.
            max_calls: The server's limit of inference calls, of which identities hold shares.
            max_streams: The limit of streams among them.
            share: Part of each limit, and of the memory, that one identity may hold while nobody else does.
        """
        self._guard = guard
        self._calls = PlaceShares("calls", max_calls, share)
        self._streams = PlaceShares("streams", max_streams, share)
        self._accounts = AccountShares(share)

    def admit(self, call: Call, method: Method, keep: Callable[[Callable[[], object]], object]) -> None:
        """Notes who calls, and takes what inference holds of the identity's shares.

        Args:
            call: The call.
            method: Its method.
            keep: Is given what gives a share back, once the core is done with the call.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
            IdentityLimitError: The identity holds its share.
        """
        if method.right is None:
            return
        identity = self._identify(call, method)
        call.identity = identity
        if not method.is_inference:
            return
        call.account = self._accounts.of(identity)
        keep(self._calls.take(identity, identity.limits.max_calls))
        if method.kind is CallKind.ORDERED_STREAM:
            keep(self._streams.take(identity))

    def check_again(self, call: Call, method: Method) -> None:
        """Checks a stream whose next message has arrived: the token may have expired or been revoked.

        Raises:
            CredentialsError: It is not known any more who calls.
            PermissionDeniedError: The identity does not have the right any more.
        """
        if method.right is not None:
            call.identity = self._identify(call, method)

    def check(self, call: Call, method: Method) -> Identity | None:
        """Who calls, if the caller may call a method; None if everyone may.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
        """
        return None if method.right is None else self._identify(call, method)

    def _identify(self, call: Call, method: Method) -> Identity:
        identity = self._guard.identify(call.metadata, call.peer_identities, call.client)
        if method.right is not None:
            identity.require(method.right)
        return identity
