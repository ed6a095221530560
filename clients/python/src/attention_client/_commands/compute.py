"""Commands that compute: attend, infer, embed, rerank, text, tokens. weights.py has the last one."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client._client import InputKind
from attention_client._commands.arrays import (
    array_file,
    as_lists,
    labelled,
    read_array,
    read_texts,
    read_token_ids,
    write,
)
from attention_client._commands.session import ModelName, ModelVersion, Session, option
from attention_client._commands.tables import print_array, print_json, print_result, table, vectors_table
from attention_client._values import Embeddings, OutputType

INPUTS, OUTPUT = "Inputs", "Output"
Array = Annotated[str | None, option(metavar="ARRAY", panel=INPUTS)]
InFile = Annotated[str | None, option(metavar="FILE", panel=INPUTS)]
OutFile = Annotated[Path | None, option(metavar="FILE", panel=OUTPUT, parser=array_file)]
Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts.", show_default=False)]


def attend(  # noqa: PLR0913 - one parameter is one option
    session: Session,
    *,
    model: ModelName,
    version: ModelVersion = "",
    query: Annotated[str, option(metavar="ARRAY", panel=INPUTS)],
    key: Array = None,
    value: Array = None,
    mask: Array = None,
    lengths: Array = None,
    positions: Array = None,
    context: Annotated[str | None, option("--context", metavar="ID", panel=INPUTS)] = None,
    out: OutFile = None,
    weights: OutFile = None,
) -> None:
    """Compute the context vectors of arrays.

    Options:
        query: (T, d), (..., T, d) or a list of (T, d): a .npy, .npz or JSON file, - for standard input, or a
            JSON list.
        key: Keys, for cross-attention; in the form of the query.
        value: Values, for models that separate them from the keys.
        mask: Booleans, true = may attend: (Tk,), (Tq, Tk) or (H, Tq, Tk).
        lengths: Valid rows of each key sequence of a padded batch, integers from 1.
        positions: Integer positions of the query rows, for rotary models.
        context: Id of a stored context, in place of --key, --value and --lengths; see `context put`.
        out: Write the context vectors to this file (.npy, .npz, .json) rather than print them.
        weights: Compute the attention weights too and write them to this file; - prints them.
    """
    options = {"query": query, "key": key, "value": value, "mask": mask, "lengths": lengths}
    options["positions"] = positions
    arrays = {name: _read(name, text) for name, text in options.items()}
    result = session.client.attend(
        model, version=version, context=context, return_weights=weights is not None, **arrays
    )
    print_result(session, result, out, weights)


def _read(name: str, value: str | None) -> Any:
    return None if value is None else read_array(f"--{name}", value)


def infer(
    session: Session,
    *,
    model: ModelName,
    version: ModelVersion = "",
    inputs: Annotated[list[str], option("--input", metavar="NAME=ARRAY", panel=INPUTS)],
    names: Annotated[list[str] | None, option("--output-name", metavar="NAME", panel=OUTPUT)] = None,
    output: OutFile = None,
) -> None:
    """Compute the outputs of any model from its inputs, by name. `describe` lists both.

    Options:
        inputs: An input by its name, one sequence or a batch; a .npz file holds one sequence in each of its
            arrays. Repeat for each input. ARRAY is a .npy, .npz or JSON file, - for standard input, or a JSON
            list.
        names: Return this output; repeat for several. Default: all but optional ones.
        output: Write the outputs to this file rather than print them: .npz or .json by their names (NAME[0],
            NAME[1], ... for a list), .npy for one array.
    """
    arrays: dict[str, Any] = {}
    for item in inputs:
        name, _, value = item.partition("=")
        if not name or not value or name in arrays:
            problem = "is given twice" if name in arrays else "must be NAME=ARRAY, such as x=x.npy"
            raise typer.BadParameter(f"{item}: {problem}", param_hint="--input")
        arrays[name] = read_array(f"--input {name}", value)
    result = session.client.infer(model, arrays, outputs=names, version=version)
    if output is not None:
        write("--output", output, result.outputs)
    if session.json:
        answer = {"outputs": as_lists(result.outputs)} if output is None else {"output": str(output)}
        print_json({"model_name": result.model_name, "model_version": result.model_version, **answer})
        return
    for name, outputs in result.outputs.items():
        for label, array in labelled(name, outputs):
            print_array(label, array, result, output)


def text(
    session: Session,
    *,
    texts: Texts = None,
    model: ModelName,
    version: ModelVersion = "",
    file: InFile = None,
    offsets: Annotated[bool, option("--offsets", panel=OUTPUT)] = False,
    out: OutFile = None,
    weights: OutFile = None,
) -> None:
    """Compute the context vectors of texts, for models with a tokenizer.

    Options:
        file: File with one text on each line; - for standard input.
        offsets: Show the characters of each token.
        out: Write the context vectors to this file (.npy, .npz, .json) rather than print them.
        weights: Compute the attention weights too and write them to this file; - prints them.
    """
    items = _read_items("TEXT", texts, file, read_texts)
    result = session.client.attend_text(
        model, items, version=version, return_weights=weights is not None, return_offsets=True
    )
    print_result(session, result, out, weights, texts=items, positions=offsets)


def embed(  # noqa: PLR0913 - one parameter is one option
    session: Session,
    *,
    texts: Texts = None,
    model: ModelName,
    version: ModelVersion = "",
    file: InFile = None,
    prompt: Annotated[str | None, option(metavar="NAME", panel=INPUTS)] = None,
    dimensions: Annotated[int | None, option(metavar="N", panel=INPUTS, min=1)] = None,
    truncate: Annotated[bool | None, option("--truncate/--no-truncate", panel=INPUTS)] = None,
    output_type: Annotated[OutputType, option(panel=OUTPUT)] = "float32",
    input_kind: Annotated[InputKind | None, option(panel=INPUTS)] = None,
    outputs: Annotated[str | None, option(metavar="NAMES", panel=OUTPUT)] = None,
    top_k: Annotated[int | None, option(metavar="N", panel=OUTPUT, min=1)] = None,
    out: OutFile = None,
) -> None:
    """Compute one embedding for each text, with a text encoder.

    Options:
        file: File with one text on each line; - for standard input.
        prompt: Name of the prompt that is put before each text; empty for none.
        dimensions: Only the first N elements of each embedding.
        truncate: Cut texts with too many tokens, or refuse them.
        output_type: Type of the elements.
        input_kind: What the texts are, in place of --prompt.
        outputs: One or more of dense, sparse and token_vectors, separated by commas, computed in one run;
            printed as JSON.
        top_k: Only the N largest weights of each sparse embedding.
        out: Write the embeddings (B, d) to this file (.npy, .npz, .json).
    """
    items = _read_items("TEXT", texts, file, read_texts)
    options: dict[str, Any] = {"prompt": prompt, "dimensions": dimensions, "truncate": truncate}
    options |= {"input_kind": input_kind, "outputs": outputs and outputs.split(","), "top_k": top_k}
    result = session.client.embed(model, items, **options, output_type=output_type, version=version)
    arrays = _named(result) if isinstance(result, Embeddings) else {"embeddings": result}
    if out is not None:
        write("--out", out, result if outputs is None else arrays)
    if session.json or outputs is not None:
        lists = as_lists(arrays) if out is None else dict.fromkeys(arrays, str(out))
        print_json({"model_name": model, **lists})
    elif out is not None:
        typer.echo(f"{out}: {result.shape} {result.dtype} from {model}")
    else:
        typer.echo(vectors_table(items, result), nl=False)


def _named(result: Embeddings) -> dict[str, Any]:
    """The arrays of all outputs by their names; those of sparse embeddings are two lists."""
    names = ("indices", "values") if result.sparse else ()
    sparse = {f"sparse_{name}": [getattr(row, name) for row in result.sparse] for name in names}
    arrays = {"dense": result.dense, **sparse, "token_vectors": result.token_vectors}
    return {name: array for name, array in arrays.items() if array is not None}


def rerank(
    session: Session,
    *,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query.")],
    texts: Texts = None,
    model: ModelName,
    version: ModelVersion = "",
    file: InFile = None,
    top: Annotated[int | None, option(metavar="N", panel=OUTPUT, min=1)] = None,
    truncate: Annotated[bool | None, option("--truncate/--no-truncate", panel=INPUTS)] = None,
) -> None:
    """Sort texts by their relevance to a query, with a reranker.

    Options:
        file: File with one text on each line; - for standard input.
        top: Print the first N only.
        truncate: Cut pairs with too many tokens, or refuse them.
    """
    items = _read_items("TEXT", texts, file, read_texts)
    rankings = session.client.rerank(model, query, items, top_n=top, truncate=truncate, version=version)
    if session.json:
        print_json({"model_name": model, "rankings": [ranking._asdict() for ranking in rankings]})
    else:
        typer.echo(table([(f"{score:.4f}", items[index]) for index, score in rankings]), nl=False)


def tokens(
    session: Session,
    *,
    ids: Annotated[
        list[int] | None, typer.Argument(metavar="ID", help="Token ids of one sequence.", show_default=False)
    ] = None,
    model: ModelName,
    version: ModelVersion = "",
    file: InFile = None,
    mask: Array = None,
    lengths: Array = None,
    out: OutFile = None,
    weights: OutFile = None,
) -> None:
    """Compute the context vectors of token ids.

    Options:
        file: File: .npy, .npz, JSON, or one sequence on each line; - for standard input.
        mask: Booleans, true = may attend: (Tk,), (Tq, Tk) or (H, Tq, Tk).
        lengths: Valid rows of each sequence of a padded batch, integers from 1.
        out: Write the context vectors to this file (.npy, .npz, .json) rather than print them.
        weights: Compute the attention weights too and write them to this file; - prints them.
    """
    result = session.client.attend_tokens(
        model,
        _read_items("ID", ids, file, read_token_ids),
        mask=_read("mask", mask),
        lengths=_read("lengths", lengths),
        version=version,
        return_weights=weights is not None,
    )
    print_result(session, result, out, weights)


def _read_items(name: str, arguments: Any, file: str | None, read: Callable[[str, str], Any]) -> Any:
    """The input, from the arguments or from --file."""
    if arguments and file is not None:
        raise typer.BadParameter(f"give {name} arguments or --file, not both", param_hint=name)
    items = arguments if file is None else read("--file", file)
    if items is None or not len(items):
        raise typer.BadParameter(f"give at least one {name}, or --file with at least one", param_hint=name)
    return items
