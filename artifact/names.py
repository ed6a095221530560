"""What a model's name and version may be, which are the names of the folders of an artifact."""

import re

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
MAX_VERSION = 2**63 - 1


def is_model_name(text: str) -> bool:
    """Whether a text may be the name of a model."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def is_version(text: str) -> bool:
    """Whether a text is a version as its folder is named: a number without leading zeros."""
    return re.fullmatch(r"[1-9][0-9]{0,18}", text) is not None and int(text) <= MAX_VERSION
