"""The files of the checkout that are committed: a test must not see what else lies there."""

import subprocess

from scripts.local_server import ROOT


def tracked_files(*patterns: str) -> list[str]:
    """Paths relative to the root, of files that exist."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    paths = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [path for path in paths if path and (ROOT / path).exists()]
