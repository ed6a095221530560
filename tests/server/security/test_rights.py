"""What rights are, and what they cover."""

import pytest

from attention_serving.server.security.rights import Right, Rights


@pytest.mark.parametrize(
    ("texts", "right", "model", "covered"),
    [
        (["infer:*"], Right.INFER, "any", True),
        (["infer:team-a-*"], Right.INFER, "team-a-7", True),
        (["infer:team-a-*"], Right.INFER, "team-b-7", False),
        (["infer:team-a-*"], Right.INFER, "Team-a-7", False),
        (["infer:a", "infer:b"], Right.INFER, "b", True),
        (["infer:bert-?"], Right.INFER, "bert-12", False),
        (["infer:*"], Right.READ, "any", False),
        (["read"], Right.READ, "any", True),
        (["read:team-a-*"], Right.READ, "team-b", False),
        (["admin"], Right.INFER, "any", False),
        (["admin"], Right.READ, "any", False),
        (["admin"], Right.ADMIN, "any", True),
    ],
)
def test_rights_cover_models(texts: list[str], right: Right, model: str, covered: bool) -> None:
    assert Rights.parse(texts).covers(right, model) is covered


def test_a_right_for_some_model_is_a_right() -> None:
    rights = Rights.parse(["infer:one"])
    assert [rights.has(right) for right in Right] == [True, False, False]
    assert [Rights.parse(["read", "admin"]).has(right) for right in Right] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("write", "'write' is not a right; must be infer:PATTERN, read, read:PATTERN or admin"),
        ("", "'' is not a right"),
        ("infer", "infer needs a pattern of model names, such as infer:*"),
        ("infer:", "infer needs a pattern"),
        ("read:", "read needs a pattern"),
        ("infer:a b", "infer needs a pattern"),
        ("admin:models", "admin takes no pattern"),
        ("INFER:*", "is not a right"),
    ],
)
def test_other_texts_are_not_rights(text: str, error: str) -> None:
    with pytest.raises(ValueError, match="right") as raised:
        Rights.parse(["read", text])
    assert error in str(raised.value)


def test_texts_that_belong_to_others_are_left_out() -> None:
    assert Rights.known(["openid", "infer:a", "profile", "infer", "admin"]) == Rights(("a",), admin=True)
