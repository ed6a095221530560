"""Where a job writes: checks that nothing else is lost."""

import posixpath

from pyarrow import fs

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.formats import SUFFIXES, is_table
from attention_client.enrich.sources import TableSource
from attention_client.enrich.storage import Location, locate


def locate_target(output: str, source: TableSource) -> Location:
    """The location of the output.

    Raises:
        EnrichError: It overlaps the input, or is a file for a folder.
    """
    if not output:
        raise EnrichError("the output has no name: give a path or URL")
    target = locate(output.rstrip("/") or output)
    for location in source.locations:
        if target.overlaps(location):
            raise EnrichError(f"the output {target} overlaps the input {location}: choose another output")
    is_folder = [file.name for file in source.files] != [""]
    if is_folder and is_table(target.path):
        raise EnrichError(f"the input is a folder and the output {target} is a file: name a folder")
    has_suffix = posixpath.splitext(target.path)[1] != "" and not output.endswith("/")
    if has_suffix and not is_folder and not is_table(target.path):
        raise EnrichError(f"{target} ends in none of {SUFFIXES}; the name of a folder ends in /")
    return target


def check_replaceable(target: Location, *, overwrite: bool, resume: bool) -> None:
    """Checks that an existing output may be replaced.

    Raises:
        EnrichError: The options do not say to replace it, or it contains anything but tables.
    """
    if not overwrite:
        hint = " and is not the result of this job" if resume else ""
        raise EnrichError(f"{target} exists{hint}: --overwrite (overwrite=True) replaces it")
    if target.file_type is fs.FileType.Directory:
        for name, _ in target.files(hidden=True):
            if not is_table(name):
                raise EnrichError(f"{target} contains {name}, which is not a table: it is not replaced")
