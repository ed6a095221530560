"""How calls reach the server: one interface (`call`) and two adapters.

`completion_queue` is the fast adapter, with one thread, and the only file of the server that uses grpcio's
internal API. `threaded` has a thread for each call, and uses grpcio's public API only, so that a new grpcio
can be adopted at once, whatever it changed internally.
"""
