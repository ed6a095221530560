"""The chat templates of causal rerankers, as what they write around the two texts of a pair.

A server has no Jinja: it joins these pieces. The export renders the template with texts that a template might
treat in a special way, and refuses one that does anything else.
"""

from collections.abc import Mapping
from typing import Any, Final

from attention_serving.artifact.encoder import PairTemplate
from attention_serving.export.errors import ExportError
from attention_serving.model.text_reranker import CausalReranker

# Texts that no template contains.
QUERY, DOCUMENT = "\ue000query\ue001", "\ue000document\ue001"
SPACES: Final = "\n "
# Texts that templates treat in a special way: empty ones, white space, quotes, syntax of templates, markup,
# tags of thoughts and tools, links, and numbers.
SPECIAL: Final = (
    "", " a", "a ", "\n\na\t", "\u00a0a\u3000", "a\r\nb", "\"a\" 'b' \\n", "{{ a }}", "{% if a %}", "{# a #}",
    "<b>&amp;</b>", "<think>\na\n</think>\n\nb", "<tool_response>a</tool_response>", "[INST] a [/INST]",
    "/no_think", "https://a.b/c?d=e", "<Query>: a", "<Document>: a", "5", "None", "\u0000\u200b",
    "\u6f22\u5b57 \U0001f370",
)  # fmt: skip


def read_templates(reranker: CausalReranker, prompts: Mapping[str, str]) -> dict[str, PairTemplate]:
    """The template of each prompt by its name, and without a prompt by the empty name.

    Empty if the library gives the tokenizer the two texts as a pair.

    Raises:
        ExportError: A template changes the texts, or does not contain both once, the query first.
    """
    transformer = reranker.library[0]
    if "message" not in transformer.modality_config:
        return {}
    return {name: _read_template(reranker, prompt) for name, prompt in {**prompts, "": ""}.items()}


def _read_template(reranker: CausalReranker, prompt: str) -> PairTemplate:
    text = _render(reranker, prompt, QUERY, DOCUMENT)
    before, _, tail = text.partition(QUERY)
    between, _, after = tail.partition(DOCUMENT)
    if text != f"{before}{QUERY}{between}{DOCUMENT}{after}" or QUERY in after or DOCUMENT in after:
        raise ExportError(
            "the chat template must write the query once, and later the document once; it writes "
            f"{text[:200]!r}. If the folder is that of an encoder, choose its pooling"
        )
    tokens = [*reranker.reader.all_special_tokens, *reranker.reader.get_added_vocab()]
    spaced = _render(reranker, prompt, f"{SPACES}{QUERY}{SPACES}", DOCUMENT)
    suffix_ids = tuple(_suffix_ids(reranker, prompt))
    strips = spaced == text
    template = PairTemplate(before=before, between=between, after=after, strips=strips, suffix_ids=suffix_ids)
    for special in (*SPECIAL, *dict.fromkeys(tokens)):
        for pair in ((special, DOCUMENT), (QUERY, special), (special, special)):
            rendered = _render(reranker, prompt, *pair)
            if rendered != template.render(*pair):
                raise ExportError(
                    "the chat template changes the texts of a pair, which is not supported: for the query "
                    f"{pair[0]!r} and the document {pair[1]!r} it writes {rendered[:200]!r}"
                )
    return template


def _messages(reranker: CausalReranker, prompt: str, *pair: str) -> Any:
    formatter = reranker.library[0].input_formatter
    (messages,) = formatter.batch_to_message("text", {"text": [pair]})[1]["message"]
    return formatter.prepend_prompt_to_messages([messages], prompt)[0] if prompt else messages


def _render(reranker: CausalReranker, prompt: str, *pair: str) -> str:
    """What the library gives the tokenizer for a pair."""
    messages, (options, _) = _messages(reranker, prompt, *pair), _template_options(reranker)
    try:
        return str(reranker.reader.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # of the template, which may raise anything
        raise ExportError(f"the chat template fails for the pair {pair}: {error}") from error


def _template_options(reranker: CausalReranker) -> tuple[dict[str, Any], bool]:
    """The options of the folder that the template sees, and whether pairs that are cut keep their end."""
    options = dict(reranker.library[0].processing_kwargs.get("chat_template", {}))
    return options, options.pop("restore_suffix", True)


def _suffix_ids(reranker: CausalReranker, prompt: str) -> list[int]:
    """The ids that the library puts in place of the last ones of a pair that is cut."""
    messages, (options, restores) = _messages(reranker, prompt, QUERY, DOCUMENT), _template_options(reranker)
    return reranker.library[0]._chat_template_suffix_ids(messages, options, {}) if restores else []
