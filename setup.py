"""Builds the server, with a page that the distribution of the client owns."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPage(build_py):
    """Copies the explorer's page to the HTTP face of the server. A checkout reads it where it is."""

    def run(self) -> None:
        """Builds."""
        super().run()
        if not self.editable_mode:
            page = Path(self.build_lib, "attention_serving/server/http/explorer.html")
            self.copy_file("clients/python/src/attention_client/_explorer.html", str(page))


setup(cmdclass={"build_py": BuildWithPage})
