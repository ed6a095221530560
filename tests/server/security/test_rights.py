"""What rights are, and what they cover."""

import pytest

from attention_serving.server.security.rights import Right, Rights


@pytest.mark.parametrize(
    ("text", "right", "model", "covered"),
    [
        ("infer:team-a-*", Right.INFER, "team-a-7", True),
        ("infer:team-a-*", Right.INFER, "Team-a-7", False),
        ("infer:bert-?", Right.INFER, "bert-12", False),
        ("infer:*", Right.READ, "any", False),
        ("read", Right.READ, "any", True),
        ("read:team-a-*", Right.READ, "team-b", False),
        ("admin", Right.INFER, "any", False),
        ("admin", Right.READ, "any", False),
        ("admin", Right.ADMIN, "any", True),
    ],
)
def test_rights_cover_models(text: str, right: Right, model: str, covered: bool) -> None:
    rights = Rights.parse([text, "infer:other"])
    assert rights.covers(right, model) is covered
    assert rights.has(right) is (text.startswith(right) or right is Right.INFER)
    assert rights.reads_every_model is (text == "read")


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["write"], "'write' is not a right; must be infer:PATTERN, read, read:PATTERN or admin"),
        (["infer"], "infer needs a pattern of model names, such as infer:*"),
        (["read:"], "read needs a pattern"),
        (["infer:a b"], "infer needs a pattern"),
        (["admin:models"], "admin takes no pattern"),
        (["INFER:*"], "is not a right"),
        (["infer:a"] * 257, "there are more than 256 rights"),
    ],
)
def test_other_texts_are_not_rights(texts: list[str], error: str) -> None:
    with pytest.raises(ValueError, match="right") as raised:
        Rights.parse(["read", *texts])
    assert error in str(raised.value)


def test_texts_that_belong_to_others_are_left_out() -> None:
    assert Rights.known(["openid", "infer:a", "profile", "infer", "admin"]) == Rights(("a",), admin=True)
