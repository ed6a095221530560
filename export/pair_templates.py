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
    transformer, reader = reranker.library[0], reranker.reader
    options = {"restore_suffix": True, **transformer.processing_kwargs.get("chat_template", {})}
    restores_suffix = options.pop("restore_suffix")

    def make_messages(*pair: str) -> Any:
        formatter = transformer.input_formatter
        messages = formatter.batch_to_message("text", {"text": [pair]})[1]["message"]
        return (formatter.prepend_prompt_to_messages(messages, prompt) if prompt else messages)[0]

    def render(*pair: str) -> str:  # what the library gives the tokenizer
        try:
            return str(reader.apply_chat_template(make_messages(*pair), tokenize=False, **options))
        except Exception as error:  # of the template, which may raise anything
            raise ExportError(f"the chat template fails for the pair {pair}: {error}") from error

    text = render(QUERY, DOCUMENT)
    before, _, tail = text.partition(QUERY)
    between, _, after = tail.partition(DOCUMENT)
    suffix: list[int] = []
    if restores_suffix:
        suffix = transformer._chat_template_suffix_ids(make_messages(QUERY, DOCUMENT), options, {})
    strips = render(f"{SPACES}{QUERY}{SPACES}", DOCUMENT) == text
    template = PairTemplate(
        before=before, between=between, after=after, strips=strips, suffix_ids=tuple(suffix)
    )
    if template.render(QUERY, DOCUMENT) != text or QUERY in after or DOCUMENT in after:
        raise ExportError(
            "the chat template must write the query once, and later the document once; it writes "
            f"{text[:200]!r}. If the folder is that of an encoder, choose its pooling"
        )
    for special in dict.fromkeys((*SPECIAL, *reader.all_special_tokens, *reader.get_added_vocab())):
        for pair in ((special, DOCUMENT), (QUERY, special), (special, special)):
            rendered = render(*pair)
            if rendered != template.render(*pair):
                raise ExportError(
                    "the chat template changes the texts of a pair, which is not supported: for the query "
                    f"{pair[0]!r} and the document {pair[1]!r} it writes {rendered[:200]!r}"
                )
    return template
