"""Checks who calls before anything of a call is received: its identity, its right, and what it may hold."""

from attention_serving.server.rpc.calls.ordered_stream import StreamProgress
from attention_serving.server.rpc.calls.route import CallKind, Route
from attention_serving.server.rpc.identity_shares import AccountShares, PlaceShares
from attention_serving.server.rpc.transport.seam import Call
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

    def admit(self, call: Call, route: Route) -> None:
        """Notes who calls, and takes what inference holds of the identity's shares.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
            IdentityLimitError: The identity holds its share.
        """
        if route.right is None:
            return
        identity = self._identify(call, route)
        call.identity = identity
        if not route.takes_place:
            return
        call.account = self._accounts.of(identity)
        self._calls.acquire(call, identity, identity.limits.max_calls)
        if route.kind is CallKind.ORDERED_STREAM:
            self._streams.acquire(call, identity)

    def check_again(self, call: Call, route: Route) -> None:
        """Checks a stream whose next message has arrived: the token may have expired or been revoked.

        Raises:
            CredentialsError: It is not known any more who calls.
            PermissionDeniedError: The identity does not have the right any more.
        """
        if route.right is not None:
            call.identity = self._identify(call, route)

    def check(self, call: Call, route: Route) -> Identity | None:
        """Who calls, if the caller may call a method; None if everyone may.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
        """
        return None if route.right is None else self._identify(call, route)

    def _identify(self, call: Call, route: Route) -> Identity:
        identity = self._guard.identify(call.metadata, call.peer_identities, call.client)
        if route.right is not None:
            identity.require(route.right)
        return identity


class RecheckedStream:
    """The progress of a stream whose caller is checked again with every message."""

    def __init__(self, access: CallAccess, route: Route, progress: StreamProgress) -> None:
        """Checks before another progress is told of a message."""
        self._access = access
        self._route = route
        self._progress = progress

    def received(self, call: Call) -> None:
        """See `StreamProgress`. An error ends the stream: replies that were not sent yet are dropped."""
        self._access.check_again(call, self._route)
        self._progress.received(call)

    def idle(self, call: Call) -> None:
        """See `StreamProgress`."""
        self._progress.idle(call)
