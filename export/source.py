"""The module that is exported: a copy of the caller's, without wrappers, in float32 and evaluation mode."""

import copy
import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._export.converter import TS2EPConverter
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from attention_serving.export.errors import ExportError, first_line

Examples = Mapping[str, Tensor] | Sequence[Tensor]
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
OTHER_REALS = (torch.float16, torch.bfloat16, torch.float64)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ConvertedScript(nn.Module):
    """The operators of a TorchScript module, which torch.export cannot take, as a module that it can."""

    def __init__(self, graph: nn.Module, signature: inspect.Signature) -> None:
        super().__init__()
        self.graph, self.signature = graph, signature

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Calls the operators, which take inputs by position."""
        return self.graph(*self.signature.bind(*args, **kwargs).arguments.values())


class CopyOfTensors(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors that are results of operators, such as weights with a weight norm."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator; copies the values of a tensor that is not a leaf."""
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def copy_module(module: nn.Module, example: Examples) -> tuple[nn.Module, list[str]]:
    """The module that is exported, and what differs from that of the caller, which stays as it is.

    Args:
        module: Any module, also one of `torch.compile`, `DataParallel`, PEFT or `torch.jit`.
        example: Its inputs. TorchScript is converted with them.

    Raises:
        ExportError: The module cannot be copied or converted.
    """
    inner = copy_state(unwrap(module)).eval()
    for parent in [*inner.modules()]:
        for name, child in parent.named_children():
            if (plain := unwrap(child)) is not child:
                setattr(parent, name, plain)
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ExportError(
                f"the weights of {name!r} do not exist before the first call: call the module once, with "
                f"the sizes that it is used for, before its export"
            )
    notes = []
    if types := sorted({str(p.dtype) for p in inner.parameters() if p.dtype in OTHER_REALS}):
        notes.append(f"weights in {', '.join(types)}: computed in torch.float32, in a copy")
        _to_float32(inner)
    if callable(merge := getattr(inner, "merge_and_unload", None)):
        notes.append("adapters of PEFT: merged into the weights, in a copy")
        inner = merge()
    if isinstance(inner, torch.jit.ScriptModule):
        return _from_script(inner, example), [*notes, "TorchScript: converted into operators of PyTorch"]
    return inner, notes


def copy_state(module: nn.Module) -> nn.Module:
    """A copy of a module, with its weights, buffers and attributes."""
    try:
        with CopyOfTensors():
            return copy.deepcopy(module)
    except Exception as error:  # attributes of modules can be anything
        raise ExportError(
            f"the module cannot be copied, and an export must not change it: {type(error).__name__}: "
            f"{error}. Remove the attribute that copy.deepcopy refuses",
            traceback.format_exc(),
        ) from error


def to_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if it has real numbers of another type."""
    return tensor.float() if tensor.dtype in OTHER_REALS else tensor


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and the like.

    Raises:
        ExportError: It is not a module.
    """
    while True:
        if not isinstance(module, nn.Module):
            raise ExportError(f"the module is {type(module).__name__}; wrap it in a torch.nn.Module")
        if isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
        elif isinstance(module, WRAPPERS):
            module = module.module
        else:
            return module


def _to_float32(module: nn.Module) -> None:
    """Also tensors that are plain attributes, such as tables of positions."""
    module.float()
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                vars(part)[name] = to_float32(value)


def _from_script(module: torch.jit.ScriptModule, example: Examples) -> nn.Module:
    examples = name_inputs(module, example)
    try:
        # Sizes of 1 would become constants.
        tensors = [_without_single_rows(to_float32(tensor)) for tensor in examples.values()]
        graph = TS2EPConverter(module, tuple(tensors)).convert().module(check_guards=False)
        for name in ("train", "eval"):  # which would raise
            vars(graph).pop(name)
    except Exception as error:  # the converter raises many types
        raise ExportError(
            f"the TorchScript of the module cannot be converted: {first_line(error)}. Export the "
            f"Python module that it was compiled from",
            traceback.format_exc(),
        ) from error
    signature = inspect.Signature([*forward_parameters(module).values()][: len(tensors)])
    return ConvertedScript(graph, signature).eval()


def _without_single_rows(tensor: Tensor) -> Tensor:
    return tensor.expand(*(2 if size == 1 and at < 2 else size for at, size in enumerate(tensor.shape)))  # noqa: PLR2004


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of `forward`."""
    if isinstance(module, torch.jit.ScriptModule):
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        arguments = module.forward.schema.arguments[1:]  # type: ignore[attr-defined]
        return {
            argument.name: inspect.Parameter(
                argument.name, kind, default=argument.default_value if argument.has_default_value() else empty
            )
            for argument in arguments
        }
    if isinstance(module, ConvertedScript):
        return module.signature.parameters
    return inspect.signature(module.forward).parameters


def are_positional(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether `forward` takes inputs of these names by position only."""
    parameters = forward_parameters(module)
    kinds = {parameters[name].kind for name in names if name in parameters}
    has_keywords = any(parameter.kind is VARIADIC[1] for parameter in parameters.values())
    return inspect.Parameter.POSITIONAL_ONLY in kinds or not (has_keywords or set(names) <= set(parameters))


def name_inputs(module: nn.Module, examples: Examples) -> dict[str, Tensor]:
    """The example tensors by parameter of `forward`; those of `*args` are `input_0` and so on.

    Raises:
        ValueError: They are not the inputs of the module.
    """
    parameters = forward_parameters(module)
    plain = [name for name, parameter in parameters.items() if parameter.kind not in VARIADIC]
    is_open = len(plain) < len(parameters)
    if isinstance(examples, Tensor):
        raise ValueError("example_inputs: give tensors by name, or a sequence of them")  # noqa: TRY004
    if not isinstance(examples, Mapping):
        if len(examples) > len(plain) and not is_open:
            raise ValueError(f"{len(examples)} example_inputs; forward takes {', '.join(parameters)}")
        further = (f"input_{at}" for at in range(len(plain), len(examples)))
        examples = dict(zip((*plain, *further), examples, strict=False))
    required = {name for name in plain if parameters[name].default is inspect.Parameter.empty}
    unknown = () if is_open else set(examples) - set(plain)
    if not examples or unknown or required - set(examples):
        raise ValueError(f"example_inputs={list(examples)}: forward takes {', '.join(parameters)}")
    for name, example in examples.items():
        if not isinstance(example, Tensor):
            raise ValueError(  # noqa: TRY004 - as for all other arguments
                f"example_inputs[{name!r}] is {type(example).__name__}, not a tensor: wrap the module to "
                f"fix it"
            )
    return {name: examples[name] for name in (*plain, *examples) if name in examples}
