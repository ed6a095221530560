"""Command line: `python -m benchmarks --help`."""

# Worker processes import this file again; they must not load what only the command needs.
if __name__ == "__main__":
    import signal
    import sys

    from benchmarks.cli import app

    # The servers of a run have process groups of their own; leaving by an exception ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
