"""Command line: `python -m benchmarks --help`."""

# Worker processes import this file again; they must not load what only the command line needs.
if __name__ == "__main__":
    import signal
    import sys

    from benchmarks.cli import app

    # Each server has a process group of its own. Leaving by an exception stops all of them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
