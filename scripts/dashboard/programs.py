"""Finds Prometheus' programs, which are not Python packages."""

import os
import shutil

# The environment variable that names each program, if it is not on PATH.
VARIABLES = {"prometheus": "PROMETHEUS", "promtool": "PROMTOOL"}


class ProgramNotFoundError(Exception):
    """A program of Prometheus is not installed."""


def find_program(name: str) -> str:
    """The path of `prometheus` or `promtool`.

    Raises:
        ProgramNotFoundError: It is neither on PATH nor where its environment variable says.
    """
    given = os.environ.get(VARIABLES[name])
    found = shutil.which(given or name)
    if found is None:
        variable = VARIABLES[name]
        where = f"{variable}={given} is not a program" if given else f"set {variable} to its path"
        raise ProgramNotFoundError(f"{name} is not installed, or not on PATH: {where}")
    return found
